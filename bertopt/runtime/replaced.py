"""What code of a user's has put in place of libraries' own: other models in the process would run it too.

Looked at are functions and classes of modules of bertopt, the interpreter and installed packages, what hangs on their classes, and
torch's default dtype. Not seen: what is kept in other objects, code that was made from a string, other settings, and what is
replaced later.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bertopt.stages.source_hash import is_library


def replaced() -> list[str]:
    """Return the names of what libraries hold whose source is a file of none of them, and torch's default dtype where it is another."""
    torch: Any = sys.modules.get("torch")
    found = [] if torch is None or torch.get_default_dtype() == torch.float32 else ["torch's default dtype"]
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not is_library(Path(file)):
            continue
        for key, value in list(vars(module).items()):
            if _foreign(value):
                found.append(f"{name}.{key}")
            elif isinstance(value, type) and value.__module__ == name:
                found += [f"{name}.{key}.{inner}" for inner, held in list(vars(value).items()) if _foreign(held)]
    return found


def _foreign(value: Any) -> bool:
    """Whether the source of a function or class is a file that is no library's."""
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
