"""Directories on file systems without locks, such as NFS without its lock daemon."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest
from filelock import FileLock, Timeout

from bertopt.errors import UsageError
from bertopt.system import directory_lock


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """It was a bug of bertopt: a traceback and exit code 1."""

    def without(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", without)
    with pytest.raises(UsageError, match=f"'{tmp_path}' is on a file system without locks.*choose another directory"):
        directory_lock.take(FileLock(tmp_path / ".lock"))


def test_a_lock_that_is_taken_and_other_errors_stay_what_they_are(tmp_path: Path) -> None:
    first = FileLock(tmp_path / ".lock", is_singleton=False)
    directory_lock.take(first)
    with pytest.raises(Timeout):
        directory_lock.take(FileLock(tmp_path / ".lock", is_singleton=False))
    first.release()
    with pytest.raises(OSError, match="too long"):
        directory_lock.take(FileLock(tmp_path / "none" / "there" / ".." / ".." / ("x" * 300)))
