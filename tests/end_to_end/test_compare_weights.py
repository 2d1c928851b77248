"""`bertopt compare` of two artefacts in reduced precision, of which somebody changed and resealed one: refused, or said not to be compared."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertopt import stages
from bertopt.commands.compare import compare
from bertopt.core import Pass
from bertopt.passes import BuildNative, CastHalf, ExportOnnx, QuantizeInt8, UseSdpa
from bertopt.report import junit, markdown_summary
from bertopt.report.diff import Diff, Tolerances
from bertopt.system import native_import
from tests.support.artefacts import reseal, write_line
from tests.support.command_line import call, last_line
from tests.support.shared_workers import SharedWorkers, cheap_workers
from tests.support.tiny_models import Tiny

SLACK = Tolerances(slower=1e9, bigger=99, memory=99)
LINES: dict[str, tuple[Pass[Any, Any], ...]] = {
    "bf16": (UseSdpa(), CastHalf(dtype="bfloat16")), "onnx": (UseSdpa(), ExportOnnx(), QuantizeInt8()), "native": (UseSdpa(), BuildNative()),
}  # fmt: skip
Built = Callable[..., Path]


@pytest.fixture(scope="module", autouse=True)
def workers() -> Iterator[SharedWorkers]:
    with cheap_workers("pipeline", "commands.compare") as shared:
        yield shared


@pytest.fixture(scope="module")
def built(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """`built(name, changed)`: the artefact of a line, or that of a changed checkpoint which says that it is of the right one."""
    folder = tmp_path_factory.mktemp("built")

    def build(line: str, changed: str | None = None) -> Path:
        out = folder / f"{line}-{changed}"
        if out.exists():
            return out
        source = tiny("bert")
        if changed is None:
            return write_line(source, out, *LINES[line])
        wrong = folder / f"checkpoint-{changed}"
        if not wrong.exists():
            shutil.copytree(source, wrong)
            CHECKPOINTS[changed](wrong)
        write_line(wrong, out, *LINES[line])
        right = stages.read_manifest(build(line))
        (out / "config.json").unlink()
        shutil.copyfile(build(line) / "config.json", out / "config.json")
        return reseal(out, checkpoint_sha256=right.checkpoint_sha256, key=right.key)

    return build


def _weights(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def edit(checkpoint: Path) -> None:
        from safetensors.numpy import load_file, save_file

        state = load_file(checkpoint / "model.safetensors")
        key = next(key for key in state if key.endswith(name))
        state[key] = np.ascontiguousarray(change(state[key].copy()))
        save_file(state, checkpoint / "model.safetensors", {"format": "pt"})

    return edit


def _config(**fields: Any) -> Callable[[Path], None]:
    def edit(checkpoint: Path) -> None:
        path = checkpoint / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    return edit


CHECKPOINTS: dict[str, Callable[[Path], None]] = {
    "one matrix scaled": _weights("layer.1.output.dense.weight", lambda array: array * 1.05),
    "a norm's epsilon": _config(layer_norm_eps=1e-3),
    "gelu by tanh": _config(hidden_act="gelu_new"),
}


def refused(found: Diff) -> list[str]:
    assert (found.exit_code == 3) == bool(found.regressions()), found.reason
    return [change.gate for change in found.regressions()]


@pytest.mark.parametrize("line", ["onnx", "native"])
def test_a_resealed_artefact_beside_the_right_one(built: Built, tmp_path: Path, line: str) -> None:
    """All of these passed: in INT8 only outputs that are far off were refused."""
    copy = Path(shutil.copytree(built(line), tmp_path / "copy"))
    right = compare(built(line), copy, SLACK)
    assert refused(right) == [] and [change.note for change in right.changes if change.gate == "certificate"], right.reason
    assert [text.partition(":")[0] for text in right.not_compared] == ["errors with those that int8 explains"]
    assert "NOT compared: errors with those that int8 explains (give --against CHECKPOINT)" in right.reason
    for changed in CHECKPOINTS:
        found = compare(built(line), built(line, changed), SLACK)
        assert "certificate" in refused(found), (changed, found.reason)
        assert "weights must be those of the baseline, rounded: " in " ".join(change.regression or "" for change in found.regressions())


def test_a_baseline_in_torch_is_the_checkpoint(built: Built) -> None:
    """Its files are, whatever runs them: the candidate is compared as `verify --against` compares it."""
    right = compare(built("bf16"), built("native"), SLACK)
    assert refused(right) == [] and right.not_compared == []
    assert {("rounding", "error_ratio"), ("certificate", "weights")} <= {(change.gate, change.what) for change in right.changes}
    found = compare(built("bf16"), built("native", "a norm's epsilon"), SLACK)
    assert refused(found) == ["certificate"] and "against the checkpoint: " in found.reason and "epsilon" in found.reason


def test_what_two_forms_do_not_show_is_said_and_the_checkpoint_shows_it(built: Built, tiny: Tiny) -> None:
    wrong = built("native", "a norm's epsilon")
    found = compare(built("onnx"), wrong, SLACK)
    assert "weights: form 'native' beside form 'onnx'" in found.not_compared
    found = compare(built("onnx"), wrong, SLACK, against=str(tiny("bert")))
    assert "certificate" in refused(found) and found.not_compared == []
    assert refused(compare(built("onnx"), built("native"), SLACK, against=str(tiny("bert")))) == []


def test_artefacts_of_two_checkpoints_are_compared_as_models(built: Built, tiny: Tiny, tmp_path: Path) -> None:
    """A fine-tuned successor has other weights, and its error is not one of rounding."""
    successor = Path(shutil.copytree(tiny("bert"), tmp_path / "successor"))
    _weights("classifier.weight", lambda array: array * 1.0001)(successor)
    for line in ("native", "bf16"):
        found = compare(built(line), write_line(successor, tmp_path / line, *LINES[line]), SLACK)
        assert refused(found) == [], found.reason
        assert not {"certificate", "rounding"} & {change.gate for change in found.changes}
        assert found.not_compared == [
            "the candidate with its own checkpoint: they are of two checkpoints, so that weights and errors of rounding are unknown"
        ]


def test_an_artefact_that_does_not_answer_as_it_recorded(built: Built, tmp_path: Path) -> None:
    import bertopt
    from bertopt.runtime import replay

    copy = Path(shutil.copytree(built("native"), tmp_path / "copy"))
    answers = replay.answers(bertopt.load(copy), False)
    reseal(copy, answers=answers)
    assert refused(compare(built("native"), copy, SLACK)) == []
    reseal(copy, answers=[[[figures[0], *(3 * figure for figure in figures[1:])] for figures in text] for text in answers])
    found = compare(built("native"), copy, SLACK)
    assert refused(found) == ["parity"] and "differ from those recorded" in found.reason


def test_a_file_of_the_native_encoder_with_other_numbers(built: Built, tmp_path: Path) -> None:
    """As somebody edits the file itself: its key says that both are one build."""
    from bertopt_native import layout

    native_import.native()
    wrong = Path(shutil.copytree(built("native"), tmp_path / "wrong"))
    sizes, tensors = layout.read(wrong / "native" / "model.bin")
    kept = [replace(tensor, data=np.array(tensor.data)) for tensor in tensors.values()]
    (wrong / "native" / "model.bin").unlink()
    layout.write(wrong / "native" / "model.bin", replace(sizes, activation=1), kept)
    found = compare(built("native"), reseal(wrong), SLACK)
    assert "certificate" in refused(found) and "activation is 1, the baseline's 0" in found.reason


def test_the_command_says_what_was_not_compared(built: Built, tmp_path: Path) -> None:
    first, second, text, xml = built("native"), shutil.copytree(built("native"), tmp_path / "copy"), tmp_path / "s.md", tmp_path / "j.xml"
    found = call("compare", str(first), str(second), "--slower", "1e9", "--memory", "99", "--summary", str(text), "--junit", str(xml))
    assert found.exit_code == 0, found.stderr
    assert "NOT compared: errors with those that int8 explains: " in found.stdout
    assert f"bertopt verify {second} --against CHECKPOINT" in found.stdout and "NOT compared" in last_line(found)
    assert "### Not compared" in text.read_text() and 'name="errors with those that int8 explains"' in xml.read_text()
    assert call("compare", str(tmp_path), str(tmp_path), "--against", "x").exit_code == 2


def test_reports_take_no_checkpoint(tmp_path: Path) -> None:
    diff = Diff(baseline="a", candidate="b", environment=[], tolerances=Tolerances(), changes=[], exit_code=0, reason="", not_compared=["weights: why"], advice="do this")
    assert "- weights: why" in markdown_summary.render(None, diff)
    assert '<skipped message="why; do this" />' in junit.render(None, diff)
