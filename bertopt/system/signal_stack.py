"""The stack on which this thread handles signals (sigaltstack)."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator


class _Stack(ctypes.Structure):
    _fields_ = [("place", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Put back, at the end of the block, the signal stack that the thread had before it, if Linux takes it.

    An OpenVINO core gives the thread that it first compiles in another one, which it puts back and frees at its end. Of two cores that
    end in the order they came, the second puts back the first one's, which is freed: the next signal, such as Ctrl-C, was a
    segmentation fault. Linux refuses a stack that is too small for the registers of AMX; then OpenVINO's stays.
    """
    if sys.platform != "linux":
        yield
        return
    set_stack, before = ctypes.CDLL(None).sigaltstack, _Stack()
    set_stack(None, ctypes.byref(before))
    try:
        yield
    finally:
        set_stack(ctypes.byref(before), None)
