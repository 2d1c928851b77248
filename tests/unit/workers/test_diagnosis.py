"""What is kept of a worker's log."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bertopt.errors import ResourceError
from bertopt.system import limits
from bertopt.workers import diagnosis
from bertopt.workers.client import Workers

_CRASH = """
import ctypes, faulthandler
faulthandler.enable()
def deep(calls):
    return deep(calls - 1) if calls else ctypes.string_at(0)
deep(60)
"""


def test_the_call_that_crashed_is_kept_however_deep_it_was(tmp_path: Path) -> None:
    """faulthandler writes the innermost call first: of a compiler's hundred calls the last lines are those that started it."""
    log = tmp_path / "0.log"
    with log.open("w") as file:
        file.write("a warning\n" * 40 + "what a library says of it\n")
        file.flush()
        subprocess.run([sys.executable, "-c", _CRASH], stdout=file, stderr=file, check=False)
    kept = diagnosis.tail(log)
    assert "what a library says of it\nFatal Python error: Segmentation fault" in kept and "string_at" in kept
    assert len(kept.splitlines()) == diagnosis.LOG_TAIL


def test_otherwise_the_last_lines_are_kept(tmp_path: Path) -> None:
    (tmp_path / "0.log").write_text("\n".join(map(str, range(50))))
    assert diagnosis.tail(tmp_path / "0.log").splitlines() == [str(number) for number in range(20, 50)]
    assert diagnosis.tail(tmp_path / "none.log") == ""


def test_cpu_time_that_ran_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a soft limit (ulimit -S -t) it was a bug with an empty message, at a hard one it was memory."""
    for error in (diagnosis.server_ended(-signal.SIGXCPU, ""), diagnosis.worker_ended("open", -signal.SIGXCPU, [], "")):
        assert isinstance(error, ResourceError) and "used up its CPU time" in str(error) and "raise the limit (ulimit -t)" in str(error)
    for limited, said in ((True, "when memory or CPU time (ulimit -t) runs out"), (False, "when memory runs out")):
        monkeypatch.setattr(limits, "has_cpu_time_limit", lambda limited=limited: limited)
        for error in (diagnosis.server_ended(-signal.SIGKILL, ""), diagnosis.worker_ended("open", -signal.SIGKILL, [], "")):
            assert isinstance(error, ResourceError) and said in str(error)
    assert str(diagnosis.server_ended(-signal.SIGTERM, "")).startswith("the server of the workers ended with signal SIGTERM")


def test_no_room_for_a_worker_s_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker ended with exit code 1, as for a bug, where a file system for temporary files had no inode left."""
    with Workers() as workers:

        def full(path: Path, mode: int = 0o666, exist_ok: bool = True) -> None:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

        monkeypatch.setattr(Path, "touch", full)
        with pytest.raises(OSError, match=r"No space left on device: '.*0\.log'"):
            workers.start()


@pytest.mark.parametrize(("limit", "said"), [(250 << 20, "raise the container's memory limit (250 MiB)"), (3 << 30, "raise the container's memory limit (3.0 GiB)"), (None, "free memory")])
def test_memory_of_a_container_that_ran_out(monkeypatch: pytest.MonkeyPatch, limit: int | None, said: str) -> None:
    """Nothing said that the container's limit was why, nor how high it is."""
    monkeypatch.setattr(limits, "cgroup_memory_bytes", lambda: limit)
    monkeypatch.setattr(limits, "host_memory_bytes", lambda: 16 << 30)
    for error in (diagnosis.server_ended(-signal.SIGKILL, ""), diagnosis.worker_ended("open", -signal.SIGKILL, [], "")):
        assert isinstance(error, ResourceError) and f"; {said}, or" in str(error).replace("use a smaller batch, ", "")


def test_a_little_memory_is_told_in_mib(monkeypatch: pytest.MonkeyPatch) -> None:
    """It read: took 0.3 GiB, and may take 0.3 GiB."""
    monkeypatch.setattr(limits, "cgroup_memory_bytes", lambda: 350 << 20)
    said = str(diagnosis.took_too_much("open", 330 << 20, 315 << 20, [], ""))
    assert "took 330 MiB of memory" in said and "may take 315 MiB here" in said and said.endswith("or raise the container's memory limit (350 MiB)")
