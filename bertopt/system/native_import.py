"""bertopt-native, an optional distribution, imported where it is needed, and its errors as bertopt's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bertopt.errors import IntegrityError, Unsupported, missing_library

#: The first bytes of a packed file: eight that name it, and its layout version in four.
_VERSION = slice(8, 12)


def native() -> Any:
    """The `bertopt_native` package. Raises Unsupported with the install line where it is missing or cannot be loaded."""
    try:
        import bertopt_native as module
    except ImportError as error:
        raise missing_library(f"the native encoder needs bertopt-native ({error})", "'bertopt[native]'", "in a clone with a C++ compiler pip install ./native") from error
    return module


@contextlib.contextmanager
def native_errors(module: Any) -> Iterator[None]:
    """Turn what `module` raises over a CPU, a network or a file into Unsupported and IntegrityError."""
    try:
        yield
    except module.BadFile as error:
        raise IntegrityError(f"{error}; export again") from error
    except module.Unsupported as error:
        raise Unsupported(str(error)) from error


def check_layout(module: Any, path: Path) -> None:
    """Raise Unsupported where a packed file has a layout that the installed bertopt-native does not read."""
    with path.open("rb") as file:
        head = file.read(_VERSION.stop)
    version = int.from_bytes(head[_VERSION], "little")
    if len(head) == _VERSION.stop and not 1 <= version <= module.LAYOUT_VERSION:
        raise Unsupported(
            f"bertopt-native {module.__version__} reads packed weights of layouts 1 to {module.LAYOUT_VERSION}; '{path.name}' has "
            f"layout {version}: export again, or install the bertopt-native that it was exported with"
        )
