"""The lock that keeps other processes out of a directory."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import TYPE_CHECKING

from bertopt.errors import UsageError

if TYPE_CHECKING:
    from filelock import FileLock


def take(lock: FileLock) -> None:
    """Take `lock`. Raises filelock's Timeout where another process holds it, UsageError where its file system has no locks."""
    try:
        lock.acquire(timeout=0)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):
            raise
        raise UsageError(
            f"'{Path(lock.lock_file).parent}' is on a file system without locks ({error.strerror}), which keep two runs apart; choose another "
            "directory, or mount it with locks (NFS: with its lock daemon)"
        ) from error
