"""Part `mix`: texts of committed lengths through the predictor, tokenisation included: all at once, and as a service asks.

Eight threads share one predictor and ask in turn for the windows of one list. The words are invented, one token each: real
words cost the tokenizer a little more.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.gpu import models
from benchmarks.gpu import setting as shared
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.torch_part import VARIANTS

Row = dict[str, Any]
MODELS = ("bert-base", "minilm-l6")
WANTED = ("bf16", "unpadded", "unpadded_graphs", "unpadded_graphs_compile", "compile", "fp8")
_SORTED = "sentence_transformers_bf16"
#: Windows, the most texts asked for in each, and seconds of each measurement.
WINDOWS, TEXTS, SECONDS = (1, 16, 64), 16384, 1.0
#: Timed runs over all texts at once, after one to warm up.
OFFLINE = 3
THREADS = (1, 8)


def cases(quick: bool) -> list[str]:
    # Compiling takes most of a quick run, and part `torch` does it too.
    wanted = [name for name in (*WANTED, _SORTED) if not (quick and "compile" in name)]
    return [f"{model}/{name}" for model in (("tiny",) if quick else MODELS) for name in wanted]


def run(case: str, setting: Setting) -> Iterator[Row]:
    model, variant = case.split("/")
    device = shared.on(setting.device)
    texts = models.texts(32 if setting.quick else TEXTS)
    ask: Callable[[Sequence[str]], Any]
    with tempfile.TemporaryDirectory() as scratch:
        if variant == _SORTED:
            ask = _sentence_transformers(model, Path(scratch), device)
        else:
            reference = models.eager(model, Path(scratch), setting.device)
            session = models.open_model(models.apply(reference, VARIANTS[variant], setting, Path(scratch)), setting.device)
            shared.need("tokenizers")
            from bertopt.runtime.predictor import Predictor

            ask = Predictor(session, session.spec, Path(scratch))
        yield from _asked(ask, texts, setting)


def _asked(ask: Callable[[Sequence[str]], Any], texts: Sequence[str], setting: Setting) -> Iterator[Row]:
    tokens = models.lengths(len(texts))
    if "offline" not in setting.done:
        ask(texts)
        times = []
        with shared.Busy(setting.device) as busy:
            for _ in range(OFFLINE):
                start = time.perf_counter()
                ask(texts)
                times.append(time.perf_counter() - start)
        seconds = statistics.median(times)
        yield {"key": "offline", "texts": len(texts), "seconds": times, "texts_per_s": len(texts) / seconds,
               "tokens_per_s": sum(tokens) / seconds, "gpu_busy": busy.share}  # fmt: skip
    for window in WINDOWS[1:2] if setting.quick else WINDOWS:
        for threads in THREADS:
            key = f"window-{window}-threads-{threads}"
            if key not in setting.done:
                yield {"key": key, "window": window, "threads": threads, **_windows(ask, texts, window, threads, setting)}


def _windows(
    ask: Callable[[Sequence[str]], Any], texts: Sequence[str], window: int, threads: int, setting: Setting
) -> Row:
    pieces = [texts[start : start + window] for start in range(0, len(texts) - window + 1, window)]
    for piece in pieces[: 2 if setting.quick else 32]:
        ask(piece)
    latency_ms: list[float] = []
    seconds = 0.1 if setting.quick else SECONDS
    end = time.perf_counter() + seconds

    def client(first: int) -> int:
        answered, number = 0, first
        while time.perf_counter() < end:
            start = time.perf_counter()
            ask(pieces[number % len(pieces)])
            latency_ms.append((time.perf_counter() - start) * 1e3)
            answered, number = answered + window, number + threads
        return answered

    start = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        answered = sum(pool.map(client, range(threads)))
    took, ordered = time.perf_counter() - start, sorted(latency_ms)
    return {
        "texts_per_s": answered / took, "p50_ms": ordered[len(ordered) // 2], "p95_ms": ordered[int(len(ordered) * 0.95)],
        "n": len(ordered),
    }  # fmt: skip


def _sentence_transformers(model: str, folder: Path, device: Any) -> Callable[[Sequence[str]], Any]:
    """bf16 with its default attention; `encode` sorts by length."""
    network = models.sentence_transformer(model, folder, device)
    return lambda given: network.encode(list(given), batch_size=128, convert_to_tensor=True, show_progress_bar=False).float().cpu()
