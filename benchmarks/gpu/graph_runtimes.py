"""Parts `onnxruntime` and `tensorrt`: the exported graph, where it runs, how fast; engines that are built and, where they can
be, run."""

from __future__ import annotations

import importlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu import models
from benchmarks.gpu import setting as shared
from benchmarks.gpu.setting import Missing, Setting
from benchmarks.gpu.torch_part import Steps, shapes

Row = dict[str, Any]
_HALF = ("cast_onnx_half", {"dtype": "float16"})
ONNX: dict[str, Steps] = {
    "fp32": [("use_sdpa", {}), ("export_onnx", {"opset": 20})],
    "fp16_fused": [("use_sdpa", {}), ("export_onnx", {"opset": 20}), ("fuse_ort", {}), _HALF],
    "fp16_opset23": [("use_sdpa", {}), ("export_onnx", {"opset": 23}), _HALF],
}
#: Length buckets: a batch runs in the tightest one that takes it.
PROFILES = [
    {"min": [1, 1], "opt": [32, 32], "max": [128, 64]},
    {"min": [1, 1], "opt": [32, 128], "max": [128, 128]},
    {"min": [1, 1], "opt": [8, 384], "max": [128, 512]},
]
_QUICK_PROFILES = [{"min": [1, 1], "opt": [1, 16], "max": [4, 32]}]
ENGINES: dict[str, Steps] = {
    "fp16": [("use_sdpa", {}), ("export_onnx", {"opset": 20}), _HALF],
    "int8": [("use_sdpa", {}), ("export_onnx", {"opset": 20}), ("quantize_int8", {"scheme": "static", "symmetric": True, "samples": 32})],
}

#: Whose peak a kind of graph is measured by; that of int8 is not measured, so that its share is left out.
PEAK = {"fp32": "float32", "int8": "int8"}


def onnx_cases(quick: bool) -> list[str]:
    return [f"{model}/{kind}" for model in (("tiny",) if quick else ("bert-base", "minilm-l6")) for kind in ONNX]


def engine_cases(quick: bool) -> list[str]:
    sizes = ("tiny",) if quick else ("bert-base", "minilm-l6")
    kinds = tuple(ENGINES)[: 1 if quick else None]
    return [f"{model}/{library}/{kind}" for model in sizes for library in ("tensorrt", "tensorrt_rtx") for kind in kinds]


def run_onnx(case: str, setting: Setting) -> Iterator[Row]:
    model, kind = case.split("/")
    shared.need("onnx", "onnxscript", "onnxruntime")
    with tempfile.TemporaryDirectory() as scratch:
        _needs_half(kind, setting)
        built, expected = _exported(model, ONNX[kind], setting, Path(scratch))
        yield from _measured(model, kind, built, expected, setting)


def run_engine(case: str, setting: Setting) -> Iterator[Row]:
    model, library, kind = case.split("/")
    shared.need("onnx", "onnxscript", "onnxruntime", library)
    version = str(importlib.import_module(library).__version__)
    ahead = setting.device == "cpu"
    options: dict[str, Any] = {"library": library, "profiles": _QUICK_PROFILES if setting.quick else PROFILES}
    if ahead:
        options["targets"] = ["sm86"] if setting.quick else ["sm86", "sm89"]
    with tempfile.TemporaryDirectory() as scratch:
        start = time.perf_counter()
        steps: Steps = [*ENGINES[kind], ("build_tensorrt", options)]
        built, expected = _exported(model, steps, setting, Path(scratch))
        size = built.path.stat().st_size
        yield {"key": "build", "version": version, "targets": list(built.targets), "build_s": time.perf_counter() - start, "size_bytes": size}
        if ahead:
            yield {"key": "run", "missing": f"built ahead of time for {', '.join(built.targets)}; no GPU here to run it"}
            return
        yield from _measured(model, kind, built, expected, setting)


def _needs_half(kind: str, setting: Setting) -> None:
    if setting.device == "cpu" and kind != "fp32" and not setting.quick:
        raise Missing("half precision is for a GPU")


def _exported(model: str, steps: Steps, setting: Setting, folder: Path) -> tuple[Any, Any]:
    """The built model, and the float32 answers to the probe. The network is exported on the CPU."""
    reference = models.eager(model, folder)
    expected = models.open_model(reference, "cpu").run(_probe(setting))["sentence_embedding"]
    texts = models.texts(32)

    def encode(given: Any) -> Any:
        return models.batch(len(given), 32, seed=len(given), ragged=True)

    return models.apply(reference, steps, setting, folder, texts, encode), expected


def _probe(setting: Setting) -> Any:
    return models.batch(4, 16 if setting.quick else 128, seed=5, ragged=True)


def _measured(model: str, kind: str, built: Any, expected: Any, setting: Setting) -> Iterator[Row]:
    session = models.open_model(built, setting.device)
    answers = session.run(_probe(setting))["sentence_embedding"]
    yield {"key": "parity", **models.parity(answers, expected), "facts": session.facts().model_dump(exclude_none=True)}
    for rows, tokens in shapes(setting.quick):
        key = f"{rows}x{tokens}"
        if key in setting.done:
            continue
        try:
            session.load(models.batch(rows, tokens))
            timed = shared.time_ms(session.step, setting)
        except Exception as error:  # each runtime has its own class for memory
            if "memory" not in str(error).lower():
                raise
            yield {"key": key, "missing": "out of memory"}
            continue
        ms = timed["p50_ms"]
        yield {"key": key, "batch": rows, "sequence": tokens, **timed, "tokens_per_s": rows * tokens / ms * 1e3,
               "tflops": models.flops(model, rows, tokens) / ms / 1e9, "peak_kind": PEAK.get(kind, "float16"), **shared.memory(setting.device)}  # fmt: skip
