"""Look up paths: from Python 3.14 on, pathlib says of a path that may not be looked up that nothing is there."""

from __future__ import annotations

from pathlib import Path


def mode(path: Path) -> int:
    """Return the mode of what is at `path`, as in `os.stat`, or 0 if nothing is. Raises OSError where it cannot be looked up."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: no file has a NUL in its name
        return 0
