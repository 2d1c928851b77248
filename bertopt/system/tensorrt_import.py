"""What building and running TensorRT engines share: the log's last error, and what it means."""

from __future__ import annotations

import re
from typing import Any

from bertopt.errors import BertoptError, ResourceError, Unsupported

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


def capability() -> str:
    """Return the GPU's compute capability, such as `sm86`."""
    import torch

    return "sm{}{}".format(*torch.cuda.get_device_capability())


def free_memory() -> str:
    """Return how much GPU memory is free, as the end of a message; empty where CUDA does not say."""
    import torch

    try:
        free, total = torch.cuda.mem_get_info()
    except (RuntimeError, AssertionError):
        return ""
    return f" ({free / 2**30:.1f} of {total / 2**30:.1f} GiB GPU memory free)"
