"""Part `torch`: every variant of a model of random weights, over batches and lengths: time, parity, memory, largest batch."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from benchmarks.gpu import models
from benchmarks.gpu import setting as shared
from benchmarks.gpu.models import MODELS
from benchmarks.gpu.setting import Setting

Row = dict[str, Any]
Steps = list[tuple[str, dict[str, Any]]]
BATCHES, LENGTHS = (1, 8, 32, 128), (32, 128, 384, 512)
QUICK_BATCHES, QUICK_LENGTHS = (1, 4), (16,)
_BF16: Steps = [("use_sdpa", {}), ("cast_half", {"dtype": "bfloat16"})]
_UNPADDED: Steps = [("merge_qkv", {}), ("cast_half", {"dtype": "bfloat16"}), ("pack_sequences", {"attention": "varlen"})]
#: Passes of each variant, by registered name. What is not registered is named as missing.
VARIANTS: dict[str, Steps] = {
    "fp32": [],
    "tf32": [],
    "sdpa": [("use_sdpa", {})],
    "bf16": _BF16,
    "unpadded": _UNPADDED,
    "unpadded_graphs": [*_UNPADDED, ("capture_graphs", {})],
    "compile": [*_BF16, ("compile_torch", {})],
    "fp8": [*_BF16, ("quantize_fp8", {})],
    "fp8_compile": [*_BF16, ("quantize_fp8", {}), ("compile_torch", {})],
    "package": [*_BF16, ("package_aot", {})],
    "unpadded_graphs_compile": [*_UNPADDED, ("capture_graphs", {}), ("compile_torch", {})],
    "unpadded_graphs_compile_pdl": [*_UNPADDED, ("capture_graphs", {}), ("compile_torch", {})],
    "unpadded_graphs_fp8_compile": [*_UNPADDED, ("quantize_fp8", {}), ("capture_graphs", {}), ("compile_torch", {})],
    "unpadded_graphs_autotune": [*_UNPADDED, ("capture_graphs", {}), ("compile_torch", {"mode": "max-autotune-no-cudagraphs"})],
    "max_autotune": [*_BF16, ("compile_torch", {"mode": "max-autotune-no-cudagraphs"})],
    "max_autotune_graphs": [*_BF16, ("compile_torch", {"mode": "max-autotune"})],
}
PEAK = {"fp32": "float32", "sdpa": "float32", "tf32": "tf32"} | {name: "float8" for name in VARIANTS if "fp8" in name}
#: Settings of Inductor: with pdl a kernel of Triton's is launched before the one that it waits for has ended, on Hopper and later.
SETTINGS: dict[str, dict[str, Any]] = {"unpadded_graphs_compile_pdl": {"triton.enable_pdl": True}}
#: Minutes of compiling: last, and left out by --quick.
_SLOW = ("unpadded_graphs_autotune", "max_autotune", "max_autotune_graphs")
_SENTENCE_TRANSFORMERS = "sentence_transformers_bf16"
#: Where the largest batch is sought, and its length.
_LARGEST, _LARGEST_LENGTH, _LARGEST_ROWS = ("fp32", "bf16", "unpadded"), 512, 1024


def cases(quick: bool) -> list[str]:
    if quick:
        return [f"tiny/{variant}" for variant in (*VARIANTS, _SENTENCE_TRANSFORMERS) if variant not in (*_SLOW, *SETTINGS, "fp8_compile")]
    # What matters most first: a call that ends early has measured it.
    sizes = [name for name in MODELS if name != "tiny"]
    variants = [name for name in (*VARIANTS, _SENTENCE_TRANSFORMERS) if name not in _SLOW]
    return [f"{model}/{name}" for names in (variants, _SLOW) for model in sizes for name in names]


def shapes(quick: bool) -> list[tuple[int, int]]:
    wanted = [(b, s) for s in (QUICK_LENGTHS if quick else LENGTHS) for b in (QUICK_BATCHES if quick else BATCHES)]
    return sorted(wanted, key=lambda shape: (shape != (128, 128), shape != (1, 128), shape[0] * shape[1]))


def run(case: str, setting: Setting) -> Iterator[Row]:
    model, variant = case.split("/")
    import torch

    device = shared.on(setting.device)
    torch.set_float32_matmul_precision("high" if variant == "tf32" else "highest")
    with tempfile.TemporaryDirectory() as scratch:
        if variant == _SENTENCE_TRANSFORMERS:
            yield from _rows(model, variant, _SentenceTransformer(model, Path(scratch), device), setting)
            return
        reference = models.eager(model, Path(scratch), setting.device)
        probe = models.batch(8, 16 if setting.quick else 128, seed=5, ragged=True)
        torch.set_float32_matmul_precision("highest")
        expected = models.open_model(reference, setting.device).run(probe)["sentence_embedding"]
        torch.set_float32_matmul_precision("high" if variant == "tf32" else "highest")
        with inductor(variant):
            session = models.open_model(models.apply(reference, VARIANTS[variant], setting, Path(scratch)), setting.device)
            answers = session.run(probe)["sentence_embedding"]
        if VARIANTS[variant]:
            del reference
        yield {"key": "parity", **models.parity(answers, expected), "facts": session.facts().model_dump(exclude_none=True)}
        yield from _rows(model, variant, session, setting)
        if variant in _LARGEST and setting.device == "cuda" and not setting.quick and "largest" not in setting.done:
            yield _largest(session)


def inductor(variant: str) -> AbstractContextManager[object]:
    """The settings that a variant is compiled with."""
    if variant not in SETTINGS:
        return nullcontext()
    from torch._inductor import config

    patched: AbstractContextManager[object] = config.patch(SETTINGS[variant])
    return patched


def _rows(model: str, variant: str, session: Any, setting: Setting) -> Iterator[Row]:
    for rows, tokens in shapes(setting.quick):
        key = f"{rows}x{tokens}"
        if key in setting.done:
            continue
        shared.reset_memory(setting.device)
        try:
            session.load(models.batch(rows, tokens))
            timed = shared.time_ms(session.step, setting)
        except RuntimeError as error:
            if "out of memory" not in str(error).lower():
                raise
            yield {"key": key, "missing": "out of memory"}
            continue
        ms = timed["p50_ms"]
        yield {
            "key": key, "batch": rows, "sequence": tokens, **timed, "tokens_per_s": rows * tokens / ms * 1e3,
            "tflops": models.flops(model, rows, tokens) / ms / 1e9, "peak_kind": PEAK.get(variant, "bfloat16"),
            **shared.memory(setting.device),
        }  # fmt: skip


def _largest(session: Any) -> Row:
    """Double the rows of a full-length batch until memory ends."""
    import torch

    rows = 128
    while rows <= _LARGEST_ROWS:
        try:
            session.run(models.batch(rows, _LARGEST_LENGTH))
        except Exception as error:  # whatever ends it: a kernel's limits count, too
            memory = "out of memory" in str(error).lower()
            torch.cuda.empty_cache()
            why = "memory" if memory else f"{type(error).__name__}: {str(error)[:200]}"
            return {"key": "largest", "sequence": _LARGEST_LENGTH, "largest_batch": rows // 2, "ended_by": why}
        rows *= 2
    return {"key": "largest", "sequence": _LARGEST_LENGTH, "largest_batch": rows // 2, "ended_by": f"the cap of {_LARGEST_ROWS} rows"}


class _SentenceTransformer:
    """sentence-transformers' forward in bf16 with its default attention, behind a session's interface."""

    def __init__(self, model: str, folder: Path, device: Any) -> None:
        self._network = models.sentence_transformer(model, folder, device)
        self._device = device
        self._inputs: dict[str, Any] = {}

    def load(self, inputs: dict[str, Any]) -> None:
        import torch

        self._inputs = {name: torch.from_numpy(array).to(self._device) for name, array in inputs.items()}

    def step(self) -> None:
        import torch

        with torch.inference_mode():
            self._network(dict(self._inputs))
        shared.synchronize(self._device.type)

