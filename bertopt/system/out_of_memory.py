"""Recognise errors about memory that ran out, in the words of each runtime."""

from __future__ import annotations

import re

#: How Python, numpy, torch, Rust's libraries and the loader of shared libraries say it.
_HOST = re.compile(
    r"MemoryError|can(no|')t allocate|unable to allocate|memory allocation of \d+ bytes failed|out of memory|bad_alloc|failed to map segment",
    re.IGNORECASE,
)
#: How ONNX Runtime, TensorRT, CUDA and cuBLAS say it; torch has a class for it.
_DEVICE = re.compile(
    r"Failed to allocate memory for requested buffer|CUDA(_ERROR_| error: | failure 2: )out.of.memory|cudaErrorMemoryAllocation"
    r"|CUBLAS_STATUS_ALLOC_FAILED|BFCArena.*(exhausted|failed)",
    re.IGNORECASE,
)
_CLASSES = ("OutOfMemoryError", "CUDAOutOfMemoryError", "ResourceError")


def ended(error: BaseException) -> bool:
    """Return whether `error` says that memory of the host or of a device ran out."""
    if isinstance(error, MemoryError) or type(error).__name__ in _CLASSES:
        return True
    return _DEVICE.search(str(error)) is not None or said(str(error))


def said(text: str) -> bool:
    """Return whether a message or a log says that the host's memory ran out."""
    return _HOST.search(text) is not None
