"""What ships is what was run: models that answer otherwise elsewhere, files that a pass leaves, and code that changed since."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shutil
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

import bertopt
from bertopt import stages
from bertopt.cli import app
from bertopt.commands.verify import verify
from bertopt.errors import IntegrityError, WorkerCrashed, WrongAnswer
from bertopt.passes import registry
from bertopt.pipeline import clean_run
from bertopt.pipeline.clean_run import answers as in_a_new_interpreter
from bertopt.report import junit
from bertopt.results import Report
from bertopt.stages import contents
from bertopt.stages.signature import SIGNATURE
from tests.support import uncovered_passes
from tests.support.shared_workers import cheap_workers
from tests.support.tiny_models import TASKS, Tiny

assert uncovered_passes.LeaveFile.name() == "leave_file"
PASS = '''
from typing import Any

import mine_{name}_helper
from bertopt.core import Context, Eager, Pass, Result


class Mine{name}(Pass[Eager, Eager]):
    """Marks the network."""

    def __call__(self, model: Eager, ctx: Context) -> Result[Eager]:
        return model.rewritten(self)

    def rewrite(self, network: Any) -> dict[str, int]:
        network.marked = mine_{name}_helper.MARK
        return {{"marks": 1}}
'''


@pytest.fixture(scope="module", autouse=True)
def workers() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MY_MODELS_MODE", "checked")  # the workers inherit it, a new interpreter does not
        with cheap_workers("pipeline", "commands.verify"):
            yield


@pytest.fixture
def new_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what is delivered answer in a new interpreter, as it does for users: it takes seconds."""
    monkeypatch.setattr(clean_run, "answers", in_a_new_interpreter)


def run(out: Path, model: Path, *steps: dict[str, Any]) -> Report:
    recipe = {"schema_version": 1, "model": str(model), "device": "cpu", "steps": list(steps), "inputs": {"shapes": [[1, 8]]}}
    return bertopt.run(recipe, out)


@pytest.fixture(scope="module")
def delivered_once(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("delivered")
    assert run(out, tiny(), {"pass": "use_sdpa"}).exit_code == 0
    return out


@pytest.fixture
def delivered(delivered_once: Path, tmp_path: Path) -> Path:
    """The output directory of a run of `use_sdpa`, to be damaged."""
    return Path(shutil.copytree(delivered_once, tmp_path / "delivered"))


@pytest.mark.parametrize("on_fail", ["revert", "stop"])
def test_a_model_without_sdpa_goes_on_without_it(tiny: Tiny, tmp_path: Path, on_fail: str) -> None:
    """optimize delivered the checkpoint itself for MPNet and DeBERTa: every branch of its recipes starts from use_sdpa."""
    report = run(tmp_path, tiny("mpnet"), {"pass": "use_sdpa", "on_fail": on_fail}, {"pass": "export_onnx"})
    status = {row.name: row.status for row in report.stages}
    assert status["use_sdpa"] == "unsupported"
    if on_fail == "revert":
        assert report.exit_code == 0 and report.delivered is not None and report.delivered.stage == "export_onnx"
        assert [record.name for record in stages.read_manifest(tmp_path / "artifact").passes] == ["export_onnx"]
    else:
        assert report.exit_code == 4 and status["export_onnx"] == "skipped"


def test_that_nothing_faster_passed_is_said(tiny: Tiny, tmp_path: Path) -> None:
    recipe = {
        "schema_version": 1, "model": str(tiny("mpnet")), "device": "cpu", "steps": [{"pass": "use_sdpa"}], "deliver": "fastest",
        "inputs": {"shapes": [[1, 8]]},
    }  # fmt: skip
    report = bertopt.run(recipe, tmp_path)
    assert report.delivered is not None and report.delivered.stage == "reference"
    assert any("'reference' is delivered, but nothing faster passed" in text for text in report.model["warnings"])


def test_that_the_artefact_before_was_signed_is_said(tiny: Tiny, delivered: Path) -> None:
    first = run(delivered, tiny(), {"pass": "use_sdpa"})
    (delivered / "artifact" / SIGNATURE).write_bytes(b"")
    second = run(delivered, tiny(), {"pass": "use_sdpa"})
    said = ["was signed, and this one is not yet: bertopt sign" in " ".join(report.model["warnings"]) for report in (first, second)]
    assert said == [False, True]


def exit_code(*arguments: object) -> int:
    """The command line's."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments]).exit_code


@pytest.mark.usefixtures("new_interpreter")
@pytest.mark.parametrize(
    ("on", "where"),
    [
        *((on, "in a new interpreter the artefact holds another tensor") for on in ("hash seed", "directory", "worker", "threads", "variable")),
        ("first call", "a new interpreter that opens the artefact: the outputs of text"),
        ("thread", "a call while other threads call: the outputs of text"),
        ("several callers", "a call while other threads call: the outputs of text"),
        ("another copy", "a call while other threads call: the outputs of text"),
        ("closed copy", "the artefact after another copy of it was closed: the outputs of text"),
        ("calls before", "calls of the artefact change its tensor 'encoder.bert.encoder.layer.0.output.dense.weight'"),
        ("first model", "in a new interpreter the artefact holds another tensor"),
        ("last model", "the artefact beside another model of the same passes: the outputs of text"),
        ("many threads", f"the artefact on {max(5, 2 * (os.cpu_count() or 1) + 1)} threads: the outputs of text"),
    ],
)  # fmt: skip
def test_a_model_that_answers_otherwise_elsewhere_is_not_delivered(tiny: Tiny, tmp_path: Path, on: str, where: str) -> None:
    report = run(tmp_path, tiny(), {"pass": "depend_on_place", "on": on, "threads": 1})  # workers run one thread
    assert report.stages[-1].status == "ok", report.reason
    assert report.exit_code == 3 and report.delivered is None
    assert f"is not delivered: {where}" in str(report.reason)
    assert not (tmp_path / "artifact").exists()


@pytest.mark.usefixtures("new_interpreter")
def test_a_pass_that_takes_no_other_weights_is_reported(tiny: Tiny, tmp_path: Path) -> None:
    weight = load_file(tiny() / "model.safetensors")["bert.encoder.layer.0.output.dense.weight"]
    step = {"pass": "depend_on_place", "on": "other weights", "first": weight.flatten()[0].item()}
    report = run(tmp_path, tiny(), step)
    assert report.exit_code == 0, report.reason
    (said,) = [warning for warning in report.model["warnings"] if "was not run beside another model of the same passes" in warning]
    assert "the first weight must be" in said


@pytest.mark.usefixtures("new_interpreter")
def test_files_that_are_read_from_elsewhere_are_reported(tiny: Tiny, delivered: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "scale.txt"
    elsewhere.write_text("1.0")
    report = run(tmp_path / "out", tiny(), {"pass": "read_elsewhere", "path": str(elsewhere)})
    assert report.exit_code == 0, report.reason
    assert any(f"reads '{elsewhere}'" in warning for warning in report.model["warnings"]), report.model["warnings"]
    elsewhere.write_text("3.0")
    report = run(tmp_path / "out", tiny(), {"pass": "read_elsewhere", "path": str(elsewhere)})
    assert report.stages[-1].status == "failed" and not report.stages[-1].reused, "what was measured is not that of before"
    assert report.exit_code == 3 and report.delivered is None, report.reason
    with pytest.raises(IntegrityError, match=r"reads '.*scale.txt', which is not the file that this stage was built and checked with"):
        bertopt.load(tmp_path / "out" / "artifact")
    report = run(delivered, tiny(), {"pass": "use_sdpa"})
    assert not [warning for warning in report.model["warnings"] if "reads '" in warning]


@pytest.mark.parametrize(
    ("file", "words"),
    [("tokenizer.json", "'tokenizer.json' must be the parent's"), ("config.json", "'config.json' must be the parent's"),
     ("notes.txt", "the pass wrote 'notes.txt'"), ("onnx/model.onnx", "the pass wrote 'onnx/model.onnx'")],
)  # fmt: skip
def test_files_that_are_not_the_forms_are_refused(tiny: Tiny, tmp_path: Path, file: str, words: str) -> None:
    source = tiny()
    content = (source / file).read_text().replace('"cat"', '"dog_"') + "\n" if (source / file).is_file() else "{}"
    report = run(tmp_path, source, {"pass": "leave_file", "name_": file, "content": content})
    assert report.exit_code == 6 and words in str(report.reason), report.reason
    assert not (tmp_path / "artifact").exists()


@pytest.mark.parametrize("swapped", ["tokenizer.json", "config.json", "notes.txt"])
def test_files_that_were_changed_or_added_after_delivery_are_refused(delivered: Path, swapped: str) -> None:
    artifact = delivered / "artifact"
    file = artifact / swapped
    content = file.read_text().replace('"cat"', '"dog_"') + "\n" if file.exists() else "{}"
    file.unlink(missing_ok=True)
    file.write_text(content)
    with pytest.raises(IntegrityError) as refused:
        bertopt.load(artifact)
    assert refused.value.exit_code == exit_code("verify", artifact) == 6


INT8 = {"pass": "quantize_int8", "limits": {"rel_l2": 9, "cosine_min": -1, "cosine_mean": -1, "label_flips_max": 1}}


@pytest.mark.parametrize("task", TASKS)
def test_every_task_is_swept_and_its_artefact_records_what_it_answers(tiny: Tiny, tmp_path: Path, task: str) -> None:
    pooling = "mean" if task == "feature-extraction" else None
    for pooled, steps in ((None, ({"pass": "use_sdpa"}, {"pass": "export_onnx"}, INT8)), (pooling, ({"pass": "use_sdpa"},))):
        out = tmp_path / str(pooled)
        report = run(out, tiny("bert", task, pooled), *steps)
        assert report.exit_code == 0, report.reason
        assert report.model["task"] == task and report.delivered is not None and report.delivered.stage == steps[-1]["pass"]
        for row in report.stages[1:]:
            assert row.coverage is not None and row.coverage.batch_sizes == 1.0
            if row.precision == "float32":
                assert row.coverage.ids == 1.0 and all(output.worst < 1e-5 for output in row.coverage.outputs.values())
        artifact = out / "artifact"
        assert bertopt.load(artifact, check=True)(["a cat"] if task != "question-answering" else [("a", "cat")]) is not None
        assert verify(artifact).exit_code == 0


def test_other_answers_than_the_recorded_ones_are_refused(delivered: Path) -> None:
    artifact = delivered / "artifact"
    manifest = stages.verify(artifact)
    assert manifest.answers is not None and len(json.dumps(manifest.answers)) < 9000
    answers = [[[a * 1.01 if i == 2 else a for i, a in enumerate(values)] for values in text] for text in manifest.answers]
    (artifact / stages.MANIFEST).write_text(manifest.model_copy(update={"answers": answers}).sealed().text())
    bertopt.load(artifact)
    with pytest.raises(WrongAnswer, match="differ from those recorded"):
        bertopt.load(artifact, check=True)
    found = verify(artifact)
    assert found.exit_code == 3 and "differ from those recorded" in found.reason and "<failure" in junit.render(found)


@pytest.fixture
def own_pass(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """A pass in a module of a user's, which imports a helper; both in `tmp_path/code`."""
    name = f"T{zlib.crc32(request.node.name.encode())}"
    code = tmp_path / "code"
    code.mkdir()
    (code / f"mine_{name}.py").write_text(PASS.format(name=name))
    (code / f"mine_{name}_helper.py").write_text("MARK = 1\n")
    sys.path.insert(0, str(code))
    try:
        registry.register(getattr(importlib.import_module(f"mine_{name}"), f"Mine{name}"))
        yield name
    finally:
        sys.path.remove(str(code))
        registry._registered.pop(f"mine_t{name[1:]}", None)


@pytest.mark.parametrize("changed", ["helper", "pass"])
def test_code_that_changed_since_is_refused(own_pass: str, tiny: Tiny, tmp_path: Path, changed: str) -> None:
    name = next(name for name in registry.importable_passes() if name.endswith(own_pass[1:]))
    report = run(tmp_path / "out", tiny(), {"pass": name})
    assert report.exit_code == 0, report.reason
    artifact = tmp_path / "out" / "artifact"
    bertopt.load(artifact, check=True)
    file = tmp_path / "code" / (f"mine_{own_pass}_helper.py" if changed == "helper" else f"mine_{own_pass}.py")
    file.write_text(file.read_text() + "\n# edited\n")
    with pytest.raises(IntegrityError, match=f"the source of {'module' if changed == 'helper' else 'pass'} mine_") as refused:
        bertopt.load(artifact)
    assert refused.value.exit_code == exit_code("verify", artifact) == 6
    assert not run(tmp_path / "out", tiny(), {"pass": name}).stages[1].reused, "built by other code"


def test_another_class_of_the_same_name_is_refused(own_pass: str, tiny: Tiny, tmp_path: Path) -> None:
    name = next(name for name in registry.importable_passes() if name.endswith(own_pass[1:]))
    assert run(tmp_path / "out", tiny(), {"pass": name}).exit_code == 0
    other = tmp_path / "code" / "other.py"
    other.write_text(PASS.format(name=own_pass) + "\n# another module\n")
    spec = importlib.util.spec_from_file_location(f"other_{own_pass}", other)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    del registry._registered[name]
    registry.register(getattr(module, f"Mine{own_pass}"))
    with pytest.raises(IntegrityError, match="restore it, or export again") as refused:
        bertopt.load(tmp_path / "out" / "artifact")
    # Workers of the command line cannot import this module.
    assert refused.value.exit_code == 6
    shutil.rmtree(tmp_path / "out")


def test_a_module_that_is_imported_only_when_texts_are_run_is_recorded(own_pass: str, tiny: Tiny, tmp_path: Path) -> None:
    code = tmp_path / "code" / f"mine_{own_pass}.py"
    helper = tmp_path / "code" / f"mine_{own_pass}_later.py"
    helper.write_text("SCALE = 1.0\n")
    later = f"network.register_forward_pre_hook(lambda *given: __import__('sys') and None)\n        def late():\n            import mine_{own_pass}_later\n"
    code.write_text(code.read_text().replace("        return {", f"        {later}        return {{", 1))
    name = next(name for name in registry.importable_passes() if name.endswith(own_pass[1:]))
    assert run(tmp_path / "out", tiny(), {"pass": name}).exit_code == 0
    bertopt.load(tmp_path / "out" / "artifact", check=True)
    helper.write_text("SCALE = 3.0\n")
    with pytest.raises(IntegrityError, match=f"import of pass .*{helper.name}"):
        bertopt.load(tmp_path / "out" / "artifact")
    helper.unlink()
    bertopt.load(tmp_path / "out" / "artifact", check=True)  # what is not there is not imported


@pytest.mark.usefixtures("new_interpreter")
@pytest.mark.parametrize(
    ("on", "words"),
    [("weights of a worker", "holds another tensor 'encoder.bert.embeddings.word_embeddings.weight'"), ("library", "replaces torch.nn.functional.gelu for"),
     ("method", "LayerNorm.forward for every"), ("dtype", "replaces torch's default dtype for")],
)  # fmt: skip
def test_what_only_other_texts_or_models_would_show_is_not_delivered(tiny: Tiny, tmp_path: Path, on: str, words: str) -> None:
    report = run(tmp_path, tiny(), {"pass": "spoil_process", "on": on})
    assert report.stages[-1].status == "ok", report.reason
    assert report.exit_code == 3 and report.delivered is None and words in str(report.reason), report.reason


def resealed(directory: Path, **fields: Any) -> None:
    before = stages.read_manifest(directory).model_dump(mode="json", exclude={"files", "manifest_sha256"})
    stages.write_manifest(directory, {**before, **fields})


def test_figures_are_those_of_the_files_that_lie_there(tiny: Tiny, delivered: Path) -> None:
    """A pass may give another model when it is built again, under the same key."""
    stage = next(delivered.glob("stages/use_sdpa-*"))
    (stage / "model.safetensors").write_bytes(spoiled(stage / "model.safetensors"))
    resealed(stage)
    report = run(delivered, tiny(), {"pass": "use_sdpa"})
    assert report.stages[1].reused and report.exit_code == 3, report.reason


def test_the_reference_is_the_checkpoint(tiny: Tiny, tmp_path: Path) -> None:
    assert run(tmp_path, tiny(), {"pass": "use_sdpa"}).exit_code == 0
    stage = next(tmp_path.glob("stages/reference-*"))
    (stage / "model.safetensors").write_bytes(spoiled(stage / "model.safetensors"))
    resealed(stage)
    report = run(tmp_path, tiny(), {"pass": "use_sdpa"})
    assert report.exit_code == 0 and not report.stages[0].reused
    assert (tmp_path / "artifact" / "model.safetensors").read_bytes() == (tiny() / "model.safetensors").read_bytes()


def spoiled(path: Path) -> bytes:
    from safetensors.torch import load_file, save

    weights = load_file(path)
    weights["bert.embeddings.word_embeddings.weight"][77] = 0
    return save(weights, {"format": "pt"})


def test_an_artefact_must_say_what_its_checkpoint_says(tiny: Tiny, delivered: Path) -> None:
    artifact = delivered / "artifact"
    assert verify(artifact, str(tiny())).exit_code == 0
    manifest = stages.read_manifest(artifact)
    for name, value in (("max_length", 32), ("inputs", manifest.spec.inputs[:2])):
        with pytest.raises(WrongAnswer, match=f"{name} must be the checkpoint's"):
            contents.check_artefact(manifest, manifest.model_copy(update={"spec": manifest.spec.model_copy(update={name: value})}))
    spec = manifest.spec.model_dump(mode="json")
    resealed(artifact, spec={**spec, "labels": spec["labels"][::-1]})
    found = verify(artifact, str(tiny()))
    assert found.exit_code == 3 and "labels must be the checkpoint's" in found.reason
    (artifact / "config.json").write_text((artifact / "config.json").read_text() + "\n")
    resealed(artifact, spec=spec)
    found = verify(artifact, str(tiny()))
    assert found.exit_code == 3 and "'config.json' of the artefact must be the checkpoint's" in found.reason
    packages = {"transformers": "1.0"}
    resealed(artifact, environment={**stages.read_manifest(artifact).environment, "packages": packages})
    warnings = verify(artifact, str(tiny())).model["warnings"]
    assert any("'config.json' is not byte for byte" in warning for warning in warnings), warnings


def test_answers_that_are_to_be_checked_must_be_there(delivered: Path) -> None:
    artifact = delivered / "artifact"
    resealed(artifact, answers=None)
    bertopt.load(artifact)
    with pytest.raises(IntegrityError, match="must record its answers"):
        bertopt.load(artifact, check=True)
    resealed(artifact, answers=None, sources=None)
    bertopt.load(artifact, check=True)  # of an earlier bertopt


def test_the_log_of_a_copy_that_crashes_is_in_the_report(tiny: Tiny, delivered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 1 came without a traceback, and without a log in the report."""

    def crash(*_: object, **__: object) -> None:
        raise WorkerCrashed("it ended", "Traceback: why")

    monkeypatch.setattr(clean_run, "answers", crash)
    report = run(delivered, tiny(), {"pass": "use_sdpa"})
    assert report.exit_code == 1 and report.delivered is None
    assert report.stages[-1].facts["log"] == "Traceback: why"
