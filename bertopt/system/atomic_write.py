"""Writing a file: whole or not at all, also where the power is cut."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from bertopt.errors import UsageError


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a file to write beside `path`. It takes the place of `path` at the end, and goes where an error is raised."""
    new = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield new
        with new.open("rb") as file:
            os.fsync(file.fileno())  # else a power cut may leave an empty file under the name
        new.replace(path)
    finally:
        if new.parent.is_dir():
            new.unlink(missing_ok=True)


def write(path: Path, text: str) -> None:
    """Write `text` as UTF-8 in one exchange. Raises UsageError where the place cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as new:
            new.write_text(text, "utf-8", "backslashreplace")
    except (FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
        raise UsageError(
            f"'{path}' cannot be written ({error.strerror}); give a file in a directory of yours"
        ) from error
