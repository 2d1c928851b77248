"""The directory of the workers' logs, which is removed with them, and by the next run where they were killed."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from bertopt.system import process_tree


def make() -> tempfile.TemporaryDirectory[str]:
    """Return a new directory named after this process, after removing those of processes that are gone."""
    for path in Path(tempfile.gettempdir()).glob("bertopt-*-*"):
        owner = path.name.split("-")[1]
        mine = path.is_dir() and not path.is_symlink() and path.stat().st_uid == os.geteuid()
        if mine and owner.isdecimal() and not process_tree.runs(int(owner)):
            shutil.rmtree(path, ignore_errors=True)
    return tempfile.TemporaryDirectory(prefix=f"bertopt-{os.getpid()}-")
