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
    """Restore the thread's signal stack at the end of the block, if Linux accepts it.

    An OpenVINO core sets another signal stack in the thread in which it first compiles, and at its end restores the previous one and frees its
    own. If the first of two cores ends first, the second restores the stack that the first has freed, and the next signal, such as Ctrl-C,
    is a segmentation fault. Linux refuses a stack that is too small for the registers of AMX; then OpenVINO's stays.
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
