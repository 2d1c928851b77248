"""Wrongs done to files between runs, and between an export and its use, whose hashes were written anew."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bertopt
from bertopt import stages
from bertopt.commands.verify import verify
from bertopt.core import Context, Eager, Onnx, Result
from bertopt.errors import BertoptError
from bertopt.passes import registry
from campaigns.mutants.harness import gates
from campaigns.mutants.plant import EXPORT, LABELS, MEAN, SDPA, Checkpoint, mutant, part
from campaigns.mutants.unseen_inputs import RARE

Caught = tuple[list[str], str]


def tried(what: Callable[[], Any]) -> Caught:
    """What noticed: the gates that a stage failed, else the exit code or the exception."""
    try:
        report = what()
    except BertoptError as error:
        return [type(error).__name__], str(error)
    code = getattr(report, "exit_code", 0)
    if not code:
        return [], f"exit 0, {getattr(report, 'reason', None)}"
    failed = next((stage for stage in report.stages if stage.status != "ok"), None)
    return [f"exit {code}"] if failed is None else gates(failed, code), str(report.reason)


def fresh(bench: Any, name: str, on: Checkpoint, *steps: Any, **head: Any) -> tuple[Path, Callable[[], Any]]:
    """A new output directory, and what runs `steps` there."""
    out = bench.scratch / "tampered" / name
    shutil.rmtree(out, ignore_errors=True)
    model = bench.checkpoint(on)
    recipe = {
        "schema_version": 1, "model": str(model), "device": "cpu", "steps": [dict(step) for step in steps],
        "inputs": {"shapes": [[1, 8]], "texts": str(bench.texts(on, model, False))}, **head,
    }  # fmt: skip
    return out, lambda: bertopt.run(recipe, out)


def resealed(directory: Path, **fields: Any) -> None:
    """Hash a directory's files anew, and change its manifest's `fields`."""
    manifest = stages.read_manifest(directory)
    before = manifest.model_dump(mode="json", exclude={"files", "manifest_sha256"})
    stages.write_manifest(directory, {**before, **fields})


def rewritten(path: Path, content: bytes) -> None:
    """Give a file another content, and no other file that is linked to it."""
    path.unlink()
    path.write_bytes(content)


def rare_row(path: Path) -> bytes:
    """Weights whose rare token has its neighbour's embedding."""
    from safetensors.torch import load_file, save

    weights = load_file(path)
    name = next(name for name in weights if name.endswith("word_embeddings.weight"))
    weights[name][RARE] = weights[name][RARE + 1]
    return save(weights, {"format": "pt"})


@part
def keeps_weights_of_its_own(model: Eager, ctx: Context) -> Result[Eager]:
    """Writes the weights itself: as they are the first time, with another rare embedding from the second time on."""
    from dataclasses import replace

    marker = ctx.workdir.parents[1] / "built-before"
    source = model.checkpoint / "model.safetensors"
    (ctx.workdir / "model.safetensors").write_bytes(rare_row(source) if marker.exists() else source.read_bytes())
    marker.touch()
    return Result(replace(model, checkpoint=ctx.workdir), {"planted": 1})


@mutant("coverage", "")
def built_again_otherwise(bench: Any) -> Caught:
    """A pass gives another model when its stage, damaged since, is built again: figures are the first one's."""
    out, run = fresh(bench, "again", LABELS, {"pass": "plant_model", "mutant": "keeps_weights_of_its_own", "name": "mutant", "allow_noop": True})
    report = run()
    assert report.exit_code == 0, report.reason
    shutil.rmtree(next(out.glob("stages/mutant-*")))
    return tried(run)


@mutant("coverage", "")
def resealed_stage(bench: Any) -> Caught:
    """Between two runs a stage's weights change, and its hashes are written anew."""
    out, run = fresh(bench, "stage", LABELS, SDPA)
    assert run().exit_code == 0
    stage = next(out.glob("stages/use_sdpa-*"))
    rewritten(stage / "model.safetensors", rare_row(stage / "model.safetensors"))
    resealed(stage)
    return tried(run)


@mutant("integrity", "")
def resealed_reference(bench: Any) -> Caught:
    """Between two runs the weights of the reference change, with its hashes, and all is built anew from them."""
    out, run = fresh(bench, "reference", LABELS, SDPA)
    assert run().exit_code == 0
    stage = next(out.glob("stages/reference-*"))
    content = rare_row(stage / "model.safetensors")
    rewritten(stage / "model.safetensors", content)
    resealed(stage)
    shutil.rmtree(next(out.glob("stages/use_sdpa-*")))
    shutil.rmtree(out / "checks")
    caught, said = tried(run)
    if not caught and (out / "artifact" / "model.safetensors").read_bytes() != content:
        return ["build"], "the reference was loaded from the checkpoint again"
    return caught, said


@mutant("integrity", "")
def copied_record(bench: Any) -> Caught:
    """The figures recorded for a right stage are copied to the place of a wrong one's."""
    out, run = fresh(bench, "record", LABELS, SDPA)
    assert run().exit_code == 0
    records = {path.name: path.read_bytes() for path in (out / "checks").iterdir()}
    wrong = {"pass": "plant_torch", "mutant": "a_rare_token", "name": "mutant"}
    _, again = fresh(bench, "record", LABELS, wrong)
    assert again().exit_code == 3
    for path in (out / "checks").iterdir():
        path.write_bytes(next(iter(records.values())))
    return tried(again)


def _artefact(bench: Any, name: str, on: Checkpoint = LABELS) -> tuple[Path, str]:
    out, run = fresh(bench, name, on, SDPA, EXPORT)
    assert run().exit_code == 0
    return out / "artifact", str(bench.checkpoint(on))


def _respecified(on: Checkpoint, name: str, about: str, **fields: Callable[[Any], Any]) -> None:
    def deed(bench: Any) -> Caught:
        artefact, checkpoint = _artefact(bench, name, on)
        spec = stages.read_manifest(artefact).spec.model_dump(mode="json")
        resealed(artefact, spec={**spec, **{key: change(spec[key]) for key, change in fields.items()}})
        return tried(lambda: verify(artefact, checkpoint))

    deed.__name__, deed.__doc__ = name, about
    mutant("integrity", "")(deed)


_respecified(LABELS, "resealed_labels", "The manifest of an artefact names its labels the other way round; `verify --against`.", labels=lambda old: old[::-1])
_respecified(LABELS, "resealed_multi_label", "The manifest says that several labels may hold; `verify --against`.", multi_label=lambda old: True)
_respecified(LABELS, "resealed_regression", "The manifest says that labels are numbers; `verify --against`.", regression=lambda old: True)
_respecified(MEAN, "resealed_normalize", "The manifest says that embeddings are not of length 1, so servers scale them; `verify --against`.", normalize=lambda old: not old)
_respecified(LABELS, "resealed_length", "The manifest cuts texts at 60 tokens instead of 64; `verify --against`.", text_length=lambda old: 60)


def _refiled(name: str, about: str, file: str, change: Callable[[str], str]) -> None:
    def deed(bench: Any) -> Caught:
        artefact, checkpoint = _artefact(bench, name)
        before = (artefact / file).read_text()
        after = change(before)
        assert before != after, f"{file} must hold what is changed"
        (artefact / file).write_text(after)
        resealed(artefact)
        return tried(lambda: verify(artefact, checkpoint))

    deed.__name__, deed.__doc__ = name, about
    mutant("integrity", "")(deed)


def _swapped(one: str, other: str) -> Callable[[str], str]:
    return lambda text: text.replace(f'"{one}"', '"#"').replace(f'"{other}"', f'"{one}"').replace('"#"', f'"{other}"')


_refiled("resealed_words", "Two rare letters have each other's id in an artefact's tokenizer; `verify --against`.", "tokenizer.json", _swapped("##q", "##z"))
_refiled("resealed_accents", "An artefact's tokenizer keeps accents; `verify --against`.", "tokenizer.json", lambda text: text.replace('"strip_accents": null', '"strip_accents": false').replace('"strip_accents":null', '"strip_accents":false'))
_refiled("resealed_config", "`config.json` of an artefact names labels in another order, for other loaders; `verify --against`.", "config.json", _swapped("bad", "good"))
_refiled("resealed_side", "An artefact's tokenizer cuts the beginning of long texts; `verify --against`.", "tokenizer_config.json", lambda text: text.replace("{", '{"truncation_side": "left",', 1))


@mutant("integrity", "")
def answers_removed(bench: Any) -> Caught:
    """The answers that an artefact records are removed, then it is opened with `check=True`."""
    artefact, _ = _artefact(bench, "answers")
    resealed(artefact, answers=None)
    return tried(lambda: bertopt.load(artefact, check=True))


PASS = '''
from typing import Any

from bertopt.core import Context, Eager, Pass, Result


class LazyHelper(Pass[Eager, Eager]):
    """Scales answers by what a module says that is first imported when texts are run."""

    def __call__(self, model: Eager, ctx: Context) -> Result[Eager]:
        return model.rewritten(self)

    def rewrite(self, network: Any) -> dict[str, int]:
        def scale(module: Any, inputs: Any, answers: Any) -> Any:
            from lazy_mutant_helper import SCALE

            return tuple(answer * SCALE for answer in answers)

        network.register_forward_hook(scale)
        return {"hooks": 1}
'''


@mutant("integrity", "")
def helper_imported_late(bench: Any) -> Caught:
    """A module that a pass imports only when texts are run changes after the export; the artefact is loaded."""
    code = bench.scratch / "tampered" / "code"
    code.mkdir(parents=True, exist_ok=True)
    (code / "lazy_mutant.py").write_text(PASS)
    helper = code / "lazy_mutant_helper.py"
    helper.write_text("SCALE = 1.0\n")
    sys.path.insert(0, str(code))
    try:
        registry.register(importlib.import_module("lazy_mutant").LazyHelper)
        out, run = fresh(bench, "late", LABELS, {"pass": "lazy_helper"})
        report = run()
        assert report.exit_code == 0, report.reason
        helper.write_text("SCALE = 3.0\n")
        return tried(lambda: bertopt.load(out / "artifact"))
    finally:
        sys.path.remove(str(code))
        registry._registered.pop("lazy_helper", None)
        sys.modules.pop("lazy_mutant", None)


@part
def weights_elsewhere(model: Onnx, ctx: Context) -> Result[Onnx]:
    """Leaves the weights in a file beside the stages, which the graph names."""
    from dataclasses import replace

    import onnx

    graph = onnx.load(model.path)
    folder = ctx.workdir / "onnx"
    folder.mkdir()
    path = folder / "model.onnx"
    onnx.save(graph, path, save_as_external_data=True, location="elsewhere.bin", size_threshold=1024)
    (folder / "elsewhere.bin").rename(ctx.workdir.parents[1] / "elsewhere.bin")
    graph = onnx.load(path, load_external_data=False)
    for tensor in graph.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = "../../../elsewhere.bin"
    onnx.save(graph, path)
    return Result(replace(model, path=path), {"planted": 1})


@mutant("load", "")
def weights_outside(bench: Any) -> Caught:
    """A graph reads its weights from a file outside the artefact."""
    _, run = fresh(bench, "outside", LABELS, SDPA, EXPORT, {"pass": "plant_graph", "mutant": "weights_elsewhere", "name": "mutant"})
    return tried(run)


@mutant("coverage", "")
def reverted_parent(bench: Any) -> Caught:
    """A wrong stage passes its light checks and is reverted by its full ones; its child, as wrong, is the next fastest."""
    wrong = {"pass": "plant_torch", "mutant": "length_of_97", "name": "wrong", "on_fail": "revert"}
    out, run = fresh(bench, "reverted", LABELS, wrong, {**SDPA, "name": "child", "after": "wrong"}, deliver="child")
    caught, said = tried(run)
    if not caught and "length_of_97" not in (out / "artifact" / "rewrites.json").read_text():
        return ["coverage"], "reverted before its child was built, from the reference"
    return caught, said


@mutant("coverage", "")
def skipped_beside_a_noop(bench: Any) -> Caught:
    """A wrong stage that may be a no-op and is skipped when it fails is the one to deliver."""
    wrong = {"pass": "plant_torch", "mutant": "one_id_in_float32", "name": "wrong", "allow_noop": True, "on_fail": "skip"}
    _, run = fresh(bench, "skipped", LABELS, SDPA, {**wrong, "after": "use_sdpa"}, deliver="wrong")
    return tried(run)
