"""Recognise that memory ended, in the words of each runtime."""

from __future__ import annotations

import re

from bertopt.system import limits

#: How ONNX Runtime, TensorRT, CUDA and cuBLAS say it; torch has a class for it.
_WORDS = re.compile(
    r"Failed to allocate memory for requested buffer|CUDA(_ERROR_| error: | failure 2: )out.of.memory|cudaErrorMemoryAllocation"
    r"|CUBLAS_STATUS_ALLOC_FAILED|BFCArena.*(exhausted|failed)",
    re.IGNORECASE,
)
_CLASSES = ("OutOfMemoryError", "CUDAOutOfMemoryError", "ResourceError")


def ended(error: BaseException) -> bool:
    """Return whether `error` says that memory ended, the host's or a device's."""
    if isinstance(error, MemoryError) or type(error).__name__ in _CLASSES:
        return True
    return _WORDS.search(str(error)) is not None or limits.no_memory(str(error))
