"""Record which files this process opens: files that a user's code reads besides a model are part of what was checked."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

#: Where files are that any process reads: the system's, temporary ones of libraries, and code, which is hashed elsewhere.
_SYSTEM, _CACHES = ("/proc", "/sys", "/dev", "/etc", "/usr", "/lib", "/run"), ("bertopt-", "torchinductor_", "tmp")
CODE, COMPILED = (".py", ".pyc", ".so"), (".pyc", ".so")
#: bertopt's folder, which in a checkout is not where packages are.
_OWN = Path(__file__).absolute().parents[1]
#: Sets that the names of files are put into as they are opened.
_watching: list[set[str]] = []


@contextlib.contextmanager
def noting() -> Iterator[set[str]]:
    """Give a set of the names of all files that any thread opens inside the context to read them, from Python or through safetensors, which opens files in
    Rust. What other libraries in C open is not seen."""
    import safetensors  # what is imported later gets the class that is put in place here

    _hook()
    opened = set[str]()
    _watching.append(opened)
    modules = [safetensors, *(sys.modules[name] for name in ("safetensors.numpy", "safetensors.torch") if name in sys.modules)]
    before = [vars(module)["safe_open"] for module in modules]
    for module in modules:
        vars(module)["safe_open"] = _safe_open()
    try:
        yield opened
    finally:
        # Not `remove`: sets are equal by what they hold.
        _watching[:] = [one for one in _watching if one is not opened]
        for module, whole in zip(modules, before, strict=True):
            vars(module)["safe_open"] = whole


def elsewhere(opened: Iterable[str], inside: Collection[Path], code: tuple[str, ...] = CODE) -> list[Path]:
    """Return the `opened` files that are neither in one of the directories `inside` nor `code`, by their suffixes, the system's, bertopt's, or caches
    of compilers."""
    # Not Path.home, which raises for a user without a home.
    ours = [*inside, _OWN, Path(os.path.expanduser("~/.cache")), *map(Path, (sys.prefix, sys.base_prefix, *_SYSTEM))]  # noqa: PTH111
    temporary, outside = Path(tempfile.gettempdir()), []
    for path in sorted(Path(name).absolute() for name in opened):
        known = any(path.is_relative_to(root) for root in ours)
        cached = path.is_relative_to(temporary) and path.relative_to(temporary).parts[0].startswith(_CACHES)
        # What pip wrote about an installed package, which may lie in a checkout.
        described = path.parent.suffix in (".dist-info", ".egg-info")
        if not (known or cached or described) and path.suffix not in code and path.is_file():
            outside.append(path)
    return outside


@functools.cache
def _hook() -> None:
    """Install a hook that records files that Python opens, only once, since a hook cannot be removed."""

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and _watching and isinstance(arguments[0], str | bytes) and not _writes(arguments[2]):
            _note(arguments[0])

    sys.addaudithook(note)


def _writes(flags: Any) -> bool:
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR))


def _note(name: Any) -> None:
    for opened in _watching:
        opened.add(os.fsdecode(name))


@functools.cache
def _safe_open() -> Any:
    import safetensors

    whole: Any = safetensors.safe_open

    class SafeOpen:
        def __new__(cls, filename: Any, *arguments: Any, **named: Any) -> Any:
            _note(filename)
            return whole(filename, *arguments, **named)

    return SafeOpen
