"""What building and running TensorRT engines share: the log's last error, and what it means."""

from __future__ import annotations

import re
from typing import Any

from bertopt.errors import BertoptError, ResourceError, Unsupported
from bertopt.system import gpu

_MEMORY = re.compile(r"out ?of ?memory|cudaErrorMemoryAllocation|insufficient (device )?memory|bad_alloc", re.IGNORECASE)


def logger(trt: Any) -> Any:
    """Return a logger that keeps the last error, for messages, and prints nothing."""

    class Logger(trt.ILogger):  # type: ignore[misc]
        last = ""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.Severity.ERROR:
                self.last = message

    return Logger()


def failure(what: str, said: str) -> BertoptError:
    """Return the error for something that TensorRT could not do: ResourceError where its log speaks of memory."""
    reason = f"{what}: {said or 'TensorRT gave no reason'}"
    if _MEMORY.search(said):
        return ResourceError(f"{reason}{free_memory()}; use smaller profiles, or free GPU memory")
    return Unsupported(reason)


def built_with() -> tuple[str | None, str | None]:
    """Return the driver's version and the CUDA version of torch, whose libraries TensorRT shares."""
    import torch

    return gpu.driver(), torch.version.cuda


def refusal(driver: str | None, cuda_version: str | None) -> str | None:
    """Return the reason why a plan that was built with these may not be opened here, or None.

    Within one major version CUDA's libraries fit each other, and a newer driver runs what an older one ran.
    """
    driver_here, cuda_here = built_with()
    if driver and driver_here and _numbers(driver_here) < _numbers(driver):
        return f"the engine was built with driver {driver}; here is {driver_here}: update the driver, or rebuild the engine here"
    if cuda_version and cuda_here and _numbers(cuda_version)[0] != _numbers(cuda_here)[0]:
        return f"the engine was built with CUDA {cuda_version}; torch here has {cuda_here}: install that version, or rebuild the engine here"
    return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))


def free_memory() -> str:
    """Return how much GPU memory is free, as the end of a message; empty where CUDA does not say."""
    import torch

    try:
        free, total = torch.cuda.mem_get_info()
    except (RuntimeError, AssertionError):
        return ""
    return f" ({free / 2**30:.1f} of {total / 2**30:.1f} GiB GPU memory free)"
