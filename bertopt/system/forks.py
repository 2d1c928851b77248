"""Protect forks from models that their parent has open: the threads of the runtimes are missing in a fork."""

from __future__ import annotations

import ctypes
import functools
import os
import weakref

from bertopt.errors import UsageError

_open: weakref.WeakSet[object] = weakref.WeakSet()
_torch: dict[str, bool] = {"ran here": False, "ran before the fork": False}


def keep(model: object, torch_threads: int = 0) -> None:
    """Never free `model` in forks of this process. `torch_threads` is the number of threads on which torch ran it, 0 if torch did not."""
    _watch()
    _open.add(model)
    _torch["ran here"] |= torch_threads > 1


def refuse_torch(what: str) -> None:
    """Raise UsageError in a fork of a process that ran torch on several threads: its OpenMP would wait for them forever."""
    if _torch["ran before the fork"]:
        raise UsageError(
            f"{what} runs in torch, which cannot run in this process: it is a fork of one that has run torch on several threads; start processes "
            "with multiprocessing's 'spawn', or load no artefact that runs in torch before the fork"
        )


def _in_child() -> None:
    _torch["ran before the fork"] |= _torch["ran here"]
    for model in _open:
        # Freeing it, or ending the interpreter with it, would wait for ever for threads that only the parent has.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(model))


@functools.cache
def _watch() -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_in_child)
