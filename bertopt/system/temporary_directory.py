"""Temporary directories that are removed with their owner, and by the next run where that was killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import stat
import tempfile
import weakref
from pathlib import Path
from types import TracebackType

from bertopt.errors import ResourceError
from bertopt.system import process_tree

#: Part of the names of this process's directories: in a container the next process may have the same id.
_RUN = secrets.token_hex(4)


class TemporaryDirectory:
    """Removed by `cleanup`, at the end of a `with`, or with this object; never by a fork of the process that made it.

    tempfile's own is removed by the first fork that ends.
    """

    def __init__(self, prefix: str) -> None:
        _place()
        self.name = tempfile.mkdtemp(prefix=prefix)
        self._remove = weakref.finalize(self, _remove, self.name, os.getpid(), _held(self.name))

    def cleanup(self) -> None:
        """Remove it now."""
        self._remove()

    def __enter__(self) -> str:
        return self.name

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.cleanup()


def no_place(error: BaseException) -> ResourceError | None:
    """Return what to do where `error` says that tempfile found no directory to write to, else None."""
    if not isinstance(error, FileNotFoundError) or "No usable temporary directory" not in str(error):
        return None
    _, _, tried = str(error).partition(" found in ")
    return ResourceError(f"temporary files need a directory that can be written, with room; tried {tried}: mount one, such as a tmpfs at /tmp, or set TMPDIR")


def _place() -> Path:
    """Return where temporary directories are made. Raises ResourceError where there is none."""
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        raise no_place(error) or error from error


def _held(name: str) -> int | None:
    """Lock a directory for as long as this process and its forks live, and return the open file, or None where its file system has no locks."""
    held = os.open(name, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        os.close(held)
        return None
    return held


def _is_held(name: Path) -> bool:
    """Return whether a process has locked a directory, also one of another container, which has no id here."""
    try:
        file = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no locks there
        return False
    finally:
        os.close(file)
    return False


def _remove(name: str, owner: int, held: int | None) -> None:
    if os.getpid() != owner:
        return
    if held is not None:
        with contextlib.suppress(OSError):  # a program that became a daemon has closed it; the number may be another file's
            if os.path.samestat(os.fstat(held), Path(name).stat()):
                os.close(held)
    shutil.rmtree(name, ignore_errors=True)


def make() -> TemporaryDirectory:
    """Return a new directory named after this process, after removing those of processes that are gone."""
    ours = f"bertopt-{os.getpid()}-{_RUN}-"
    for path in _place().glob("bertopt-*-*"):
        owner = path.name.split("-")[1]
        try:
            found = path.lstat()
        except FileNotFoundError:  # its owner has ended since
            continue
        mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
        lives = path.name.startswith(ours) if owner == str(os.getpid()) else owner.isdecimal() and process_tree.runs(int(owner))
        if mine and owner.isdecimal() and not lives and not _is_held(path):
            shutil.rmtree(path, ignore_errors=True)
    return TemporaryDirectory(ours)
