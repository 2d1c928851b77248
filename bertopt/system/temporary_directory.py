"""Temporary directories that are removed with their owner, and by the next run where that was killed."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from pathlib import Path

from bertopt.system import process_tree

#: Those of this process. In a container the next process may have the same id.
_made: set[str] = set()


def make() -> tempfile.TemporaryDirectory[str]:
    """Return a new directory named after this process, after removing those of processes that are gone."""
    for path in Path(tempfile.gettempdir()).glob("bertopt-*-*"):
        owner = path.name.split("-")[1]
        try:
            found = path.lstat()
        except FileNotFoundError:  # its owner has ended since
            continue
        mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
        lives = path.name in _made if owner == str(os.getpid()) else owner.isdecimal() and process_tree.runs(int(owner))
        if mine and owner.isdecimal() and not lives:
            shutil.rmtree(path, ignore_errors=True)
    made = tempfile.TemporaryDirectory(prefix=f"bertopt-{os.getpid()}-")
    _made.add(Path(made.name).name)
    return made
