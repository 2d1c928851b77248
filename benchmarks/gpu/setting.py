"""What every case of the GPU benchmark shares: the device, timing, memory."""

from __future__ import annotations

import importlib.util
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

#: Seconds of timing for each shape, and the fewest steps.
SECONDS, STEPS = 0.15, 5


class Missing(Exception):
    """This case cannot be run here, and why: a row of the result, no failure."""


@dataclass(frozen=True)
class Setting:
    """Where and how much. `done` are the keys of rows that an earlier call has measured."""

    device: str
    quick: bool
    out: Path
    done: frozenset[str] = frozenset()

    @property
    def seconds(self) -> float:
        return 0.02 if self.quick else SECONDS


def need(*modules: str) -> None:
    """Raise Missing naming the modules that are not installed."""
    absent = [name for name in modules if not found(name)]
    if absent:
        raise Missing(f"not installed: {', '.join(absent)}")


def found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def synchronize(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def time_ms(run: Callable[[], Any], setting: Setting, warm: int = 3) -> dict[str, Any]:
    """Milliseconds of one run, which must return when the device is idle: median, quartiles, count."""
    for _ in range(1 if setting.quick else warm):
        run()
    taken: list[float] = []
    end = time.perf_counter() + setting.seconds
    while len(taken) < STEPS or (time.perf_counter() < end and len(taken) < 2000):
        start = time.perf_counter()
        run()
        taken.append((time.perf_counter() - start) * 1e3)
        if setting.quick and len(taken) >= 2:
            break
    ordered = sorted(taken)
    return {
        "p50_ms": statistics.median(ordered), "p25_ms": ordered[len(ordered) // 4], "p75_ms": ordered[3 * len(ordered) // 4],
        "n": len(ordered),
    }  # fmt: skip


def reset_memory(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def forget(device: str) -> None:
    """Give back what a case held, before another in the same process."""
    import gc

    if (compiler := sys.modules.get("torch._dynamo")) is not None:
        compiler.reset()
    gc.collect()
    if device == "cuda" and (torch := sys.modules.get("torch")) is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def memory(device: str) -> dict[str, int | None]:
    """Peak bytes of torch's allocator, and of the process where NVML tells."""
    if device != "cuda":
        return {}
    import os

    import torch

    held = None
    try:
        from bertopt.system import gpu

        held = gpu.memory_of(os.getpid(), None)
    except ImportError:
        pass
    return {"torch_peak_bytes": torch.cuda.max_memory_allocated(), "process_bytes": held}


class Busy:
    """The share of time with a kernel running, as NVML samples it while the context is open; None where it cannot tell."""

    def __init__(self, device: str) -> None:
        self._nvml: Any = None
        self._stop = threading.Event()
        self._percents: list[int] = []
        self._thread = threading.Thread(target=self._sample, daemon=True)
        if device == "cuda" and found("pynvml"):
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml

    @property
    def share(self) -> float | None:
        return statistics.mean(self._percents) / 100 if self._percents else None

    def __enter__(self) -> Busy:
        if self._nvml is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _sample(self) -> None:
        # A sample covers up to the last 0.2 s: the first ones would tell of what ran before.
        handle = self._nvml.nvmlDeviceGetHandleByIndex(0)
        while not self._stop.wait(0.2):
            self._percents.append(int(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu))


def on(device: str) -> torch.device:
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise Missing("torch sees no CUDA GPU here")
    return torch.device(device)
