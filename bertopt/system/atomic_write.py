"""Write files atomically: completely or not at all, even if the power fails."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from bertopt.errors import UsageError

#: Errors of a place where no file can be written.
_PLACES = {
    errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ENOENT, errno.EROFS, errno.ENAMETOOLONG,
}  # fmt: skip


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a new file beside `path` to write to. It replaces `path` on leaving, and is removed if an error is raised."""
    new = _beside(path)
    try:
        yield new
        with new.open("rb") as file:
            os.fsync(file.fileno())  # else a power cut may leave an empty file under the name
        new.replace(path)
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)  # a write that a full disk refuses names none
        raise
    finally:
        if new.parent.is_dir():
            new.unlink(missing_ok=True)


def write(path: Path, text: str) -> None:
    """Write `text` as UTF-8 atomically. Raises UsageError where the place cannot be written."""
    with _refusing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as new:
            new.write_text(text, "utf-8", "backslashreplace")


def check(path: Path) -> None:
    """Raise UsageError where `write` would, before the work whose result is to be written. An existing file stays."""
    with _refusing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        new = _beside(path)
        new.touch()
        new.unlink()


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


@contextlib.contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """Raise UsageError, which names `path` and not the file beside it, where the place cannot be written."""
    try:
        yield
    except OSError as error:
        if error.errno not in _PLACES:
            raise
        raise UsageError(f"'{path}' cannot be written ({error.strerror}); give a file in a directory of yours") from error
