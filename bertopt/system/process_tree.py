"""List the descendants of a process, and end them all."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterable

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
#: On this signal a worker writes the stack of its main thread to its log.
WHERE_SIGNAL = signal.SIGUSR1
#: Seconds that killed processes may take to end. Only a stuck driver takes longer.
END_S = 3.0


def adopt_orphans() -> None:
    """Make descendants whose parent ends children of this process instead of init's, so that none is lost."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(signal_: signal.Signals) -> None:
    """Receive this signal when the parent's thread that started this process ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal_)


def descendants(pid: int, spared: Iterable[int] = ()) -> list[int]:
    """Return the ids of all descendants of `pid`, zombies too, without the processes `spared` and their descendants."""
    everyone = _below(pid)
    # Looked up last, so that a process which a spared one starts in between is in neither list.
    kept = {each for parent in spared for each in (parent, *_below(parent))}
    return [each for each in everyone if each not in kept]


def _below(pid: int) -> list[int]:
    import psutil

    with contextlib.suppress(psutil.Error):
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return []


def end_descendants(spared: Iterable[int] = ()) -> list[int]:
    """Kill and collect all descendants but `spared` and theirs. Return the ids of those that did not die.

    A process forks only until it is killed, so that looking again until nothing is found misses none.
    """
    deadline = time.monotonic() + END_S
    while left := descendants(os.getpid(), spared):
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for pid in left:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > deadline:
            break
        time.sleep(0.002)
    return left


def runs(pid: int) -> bool:
    """Return whether a process is alive and not a zombie."""
    import psutil

    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process, shared memory included; 0 where there is no such process."""
    import psutil

    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def ends(pid: int, seconds: float) -> bool:
    """Wait for a process to end and return whether it did."""
    deadline = time.monotonic() + seconds
    while (alive := runs(pid)) and time.monotonic() < deadline:
        time.sleep(0.005)
    return not alive
