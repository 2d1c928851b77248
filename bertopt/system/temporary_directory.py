"""Temporary directories that are removed with their owner, and by the next run where that was killed."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import tempfile
import weakref
from pathlib import Path
from types import TracebackType

from bertopt.system import process_tree

#: Part of the names of this process's directories: in a container the next process may have the same id.
_RUN = secrets.token_hex(4)


class TemporaryDirectory:
    """Removed by `cleanup`, at the end of a `with`, or with this object; never by a fork of the process that made it.

    tempfile's own is removed by the first fork that ends.
    """

    def __init__(self, prefix: str) -> None:
        self.name = tempfile.mkdtemp(prefix=prefix)
        self._remove = weakref.finalize(self, _remove, self.name, os.getpid())

    def cleanup(self) -> None:
        """Remove it now."""
        self._remove()

    def __enter__(self) -> str:
        return self.name

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.cleanup()


def _remove(name: str, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(name, ignore_errors=True)


def make() -> TemporaryDirectory:
    """Return a new directory named after this process, after removing those of processes that are gone."""
    ours = f"bertopt-{os.getpid()}-{_RUN}-"
    for path in Path(tempfile.gettempdir()).glob("bertopt-*-*"):
        owner = path.name.split("-")[1]
        try:
            found = path.lstat()
        except FileNotFoundError:  # its owner has ended since
            continue
        mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
        lives = path.name.startswith(ours) if owner == str(os.getpid()) else owner.isdecimal() and process_tree.runs(int(owner))
        if mine and owner.isdecimal() and not lives:
            shutil.rmtree(path, ignore_errors=True)
    return TemporaryDirectory(ours)
