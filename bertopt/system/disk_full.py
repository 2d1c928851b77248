"""Recognise that a disk or a quota is full, and say what to do."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from bertopt.errors import ResourceError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_full(error: BaseException) -> bool:
    """Return whether `error` says that the disk or a quota is full, or that a file has its largest size."""
    return isinstance(error, OSError) and error.errno in _FULL


def said(log: str) -> bool:
    """Return whether the log of a process that ended says so."""
    return any(os.strerror(number) in log for number in _FULL)


def resource_error(error: BaseException) -> ResourceError:
    """Return the error that a user reads in place of one that `is_full`."""
    where = getattr(error, "filename", None) or "while writing"
    return ResourceError(f"no space left on the disk ({where}); free some and run again")


def check_room(folder: str, size: int) -> None:
    """Raise ResourceError where a temporary directory has no room for `size` bytes: after a library failed to write there, whatever it said."""
    if shutil.disk_usage(folder).free < size:
        raise ResourceError(f"no space left on the disk ({Path(folder).parent}, for {size / 1e6:.0f} MB of temporary files); free some, or set TMPDIR, and run again")
