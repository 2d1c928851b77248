"""Find monkey patches: functions and classes of libraries that a user's code has replaced. Other models in the process would run the
replacement too.

Looked at: modules of bertopt, the standard library and installed packages, the attributes of their classes, and torch's default dtype.
Not seen: functions in other objects, code made from a string, other settings, and later replacements.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bertopt.stages.source_hash import is_library


def found() -> list[str]:
    """Return the names in libraries whose source is a file outside all libraries, and torch's default dtype if it was changed."""
    torch: Any = sys.modules.get("torch")
    names = [] if torch is None or torch.get_default_dtype() == torch.float32 else ["torch's default dtype"]
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not is_library(Path(file)):
            continue
        for key, value in list(vars(module).items()):
            if _foreign(value):
                names.append(f"{name}.{key}")
            elif isinstance(value, type) and value.__module__ == name:
                names += [f"{name}.{key}.{inner}" for inner, held in list(vars(value).items()) if _foreign(held)]
    return names


def _foreign(value: Any) -> bool:
    """Return whether the source of a function or class is a file outside all libraries."""
    return any(_elsewhere(file) for file in _files(value))


@functools.cache  # libraries hold tens of thousands of functions, of a few thousand files
def _elsewhere(name: str) -> bool:
    file = Path(name)
    return file.suffix == ".py" and file.is_file() and not is_library(file)


def _files(value: Any) -> Iterator[str]:
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    elif isinstance(value, functools.partial):
        value = value.func
    if inspect.ismethod(value):
        value = value.__func__
    if inspect.isfunction(value):
        yield value.__code__.co_filename
    elif isinstance(value, type):
        file = getattr(sys.modules.get(value.__module__), "__file__", None)
        if isinstance(file, str):
            yield file
