"""Writing a file: whole or not at all, also where the power is cut."""

from __future__ import annotations

import os
from pathlib import Path

from bertopt.errors import UsageError


def write(path: Path, text: str) -> None:
    """Write `text` as UTF-8 in one exchange. Raises UsageError where the place cannot be written."""
    new = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with new.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # else a power cut may leave an empty file under the name
        new.replace(path)
    except (FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
        raise UsageError(
            f"'{path}' cannot be written ({error.strerror}); give a file in a directory of yours"
        ) from error
    finally:
        if new.parent.is_dir():
            new.unlink(missing_ok=True)
