"""Wrongs that no single pass commits: what is done to files behind bertopt's back, and by runtimes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import bertopt
from bertopt.core import Context, Eager, Onnx, Result
from bertopt.errors import IntegrityError, Unsupported
from campaigns.mutants.plant import EXPORT, LABELS, SDPA, mutant, part

Caught = tuple[list[str], str]


def spoil(path: Any) -> None:
    """Change one byte in the middle of a file, in place: in every directory that links to it."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 0x40]))


@mutant("integrity", "")
def changed_artefact(bench: Any) -> Caught:
    """One byte of the artefact's graph changes after the export."""
    bench.recipe(LABELS, (SDPA, EXPORT))
    artefact = next(bench.scratch.glob("out/*use_sdpa-export_onnx-False/artifact"))
    spoil(artefact / "onnx" / "model.onnx")
    try:
        bertopt.load(artefact)
    except IntegrityError as error:
        return ["integrity"], str(error)
    return [], "loaded"


@part
def keeps_a_cache(model: Onnx, ctx: Context) -> Result[Onnx]:
    """Writes to a cache of its own, to which the stage is linked; the second call overwrites the cache in place."""
    cache = ctx.workdir.parents[1] / "cache" / "model.onnx"
    if cache.exists():
        spoil(cache)
        return Result(replace(model), {"nodes": 1})
    cache.parent.mkdir()
    cache.write_bytes(model.path.read_bytes())
    return Result(replace(model, path=cache), {"nodes": 1})


@part
def writes_into_its_parent(model: Eager, ctx: Context) -> Result[Eager]:
    """Scales the classifier in the parent's own file."""
    from safetensors import safe_open
    from safetensors.torch import load_file, save

    path = model.checkpoint / "model.safetensors"
    weights = load_file(path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    weights["classifier.weight"] = weights["classifier.weight"] * 1.01
    content = save(weights, metadata)
    with path.open("r+b") as raw:
        raw.write(content)
    return Result(replace(model), {"weights": 1})


@mutant("integrity", "")
def changed_before_delivery(bench: Any) -> Caught:
    """A stage that passed is changed before it is delivered, by a pass that overwrites its cache."""
    step = {"pass": "plant_graph", "mutant": "keeps_a_cache", "allow_noop": True}
    first, again = {**step, "name": "first"}, {**step, "name": "again", "after": "export_onnx"}
    return delivering(bench, (SDPA, EXPORT, first, again), "first")


def delivering(bench: Any, steps: tuple[Any, ...], name: str) -> Caught:
    try:
        report = bench.recipe(LABELS, steps, deliver=name)
    except IntegrityError as error:
        return ["integrity"], str(error)
    if report.exit_code == 6:
        return ["integrity"], report.reason
    return [], f"exit code {report.exit_code} ({report.reason}), delivered: {report.delivered}"


@mutant("integrity", "")
def changed_parent(bench: Any) -> Caught:
    """A pass writes into the weights of the stage it starts from: every stage is linked to the same file."""
    return delivering(bench, ({"pass": "plant_model", "mutant": "writes_into_its_parent", "name": "mutant"},), "mutant")


@mutant("unsupported", "")
def provider_fallback(bench: Any) -> Caught:
    """ONNX Runtime lists a provider, cannot start it, and runs on the CPU."""
    import onnxruntime

    from bertopt.sessions.onnxruntime import OnnxRuntimeSession
    from bertopt.stages import open_stage

    bench.recipe(LABELS, (SDPA, EXPORT))
    graph = open_stage(next(bench.scratch.glob("out/*use_sdpa-export_onnx-False/stages/export_onnx-*")))
    assert isinstance(graph, Onnx)
    with pytest.MonkeyPatch.context() as patch:
        listed = ["CUDAExecutionProvider", "CPUExecutionProvider"]
        patch.setattr(onnxruntime, "get_available_providers", lambda: listed)
        start = onnxruntime.InferenceSession

        def fall_back(path: Any, options: Any, providers: Any = None, **more: Any) -> Any:
            return start(path, options, providers=["CPUExecutionProvider"])

        patch.setattr(onnxruntime, "InferenceSession", fall_back)
        try:
            session = OnnxRuntimeSession(graph, "cuda")
        except Unsupported as error:
            return ["unsupported"], str(error)
    return [], f"runs on {session.facts().provider}"
