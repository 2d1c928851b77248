"""List the descendants of a process, and end them all."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterable

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
#: A worker that gets this writes to its log where its main thread is.
WHERE_SIGNAL = signal.SIGUSR1
#: How long killed processes may take to go. Only a driver that is stuck takes longer.
END_S = 3.0


def adopt_orphans() -> None:
    """Descendants whose parent ends become children of this process, not of init: none can leave the family."""
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
    """Whether a process is alive and no zombie."""
    import psutil

    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def resident_bytes(pid: int) -> int:
    """Return the memory that a process has in use, 0 where there is none of this id. What it shares counts in full."""
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
