"""Who descends from whom, read from /proc, and how to end all of it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
#: A worker that gets this writes to its log where its main thread is.
WHERE_SIGNAL = signal.SIGUSR1
#: How long killed processes may take to go. Only a driver that is stuck takes longer.
END_S = 3.0


def adopt_orphans() -> None:
    """Descendants whose parent ends become children of this process, not of init: none can leave the family."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(signal_: signal.Signals) -> None:
    """Be sent this signal when the parent's thread that started this process ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal_)


def descendants(pid: int, spared: Iterable[int] = ()) -> list[int]:
    """Process ids of all that descends from `pid`, zombies too, without the processes `spared` and their descendants."""
    children: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # The name in brackets may hold anything; state and parent follow it.
                parent = int(Path(entry.path, "stat").read_text("utf-8", "replace").rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    skipped, found, new = set(spared), [], [pid]
    while new:
        new = [child for parent in new for child in children.get(parent, []) if child not in skipped]
        found += new
    return found


def end_descendants(spared: Iterable[int] = ()) -> list[int]:
    """Kill and collect all descendants but `spared` and theirs; the process ids of those that would not die.

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
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def ends(pid: int, seconds: float) -> bool:
    """Wait for a process to end; whether it did."""
    deadline = time.monotonic() + seconds
    while (alive := runs(pid)) and time.monotonic() < deadline:
        time.sleep(0.005)
    return not alive
