"""Hash source files and every module that they import, of bertopt or of the user."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import site
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
_INSTALLED = tuple(
    Path(path).resolve()
    for path in {*map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")), *site.getsitepackages(), site.getusersitepackages()}
)


def of_files(files: Iterable[Path]) -> str:
    """Return one hash over `files` and everything that they import, directly or indirectly."""
    sha = hashlib.sha256()
    for file in sorted(closure(files)):
        sha.update(f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return sha.hexdigest()


def closure(files: Iterable[Path], bertopts: bool = True) -> set[Path]:
    """Return `files` and everything that they import, directly or indirectly, as far as it is found; without `bertopts` nothing of bertopt.

    Imports are read from the source, including those inside functions; nothing is imported. The standard library and installed packages
    are not followed: their versions are part of a stage's key.
    """
    seen, waiting = set[Path](), [file.resolve() for file in files]
    while waiting:
        file = waiting.pop()
        if file in seen or not file.is_file() or (not bertopts and file.is_relative_to(_PACKAGE)):
            continue
        seen.add(file)
        waiting += _imports(file, file.stat().st_mtime_ns)
    return seen


@functools.cache
def is_library(file: Path) -> bool:
    """Return whether `file` belongs to bertopt, the standard library or an installed package."""
    resolved = file.resolve()
    return any(resolved.is_relative_to(place) for place in (_PACKAGE, *_INSTALLED))


def of_package(*parts: str) -> str:
    """Return the hash of `of_files` for modules and folders of bertopt, such as 'checks' or 'pipeline/race.py'."""
    places = [_PACKAGE / part for part in parts]
    return of_files(file for place in places for file in (sorted(place.rglob("*.py")) if place.is_dir() else [place]))


@functools.cache
def _imports(file: Path, modified_ns: int) -> list[Path]:
    """Return the files that `file` imports, except those of installed packages.

    `modified_ns`, when the file was last written, is only part of the cache's key.
    """
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return []
    found: list[Path] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found += located(alias.name)
        elif isinstance(node, ast.ImportFrom):
            found += _imported_from(file, node)
    return found


def _imported_from(file: Path, node: ast.ImportFrom) -> Iterator[Path]:
    """Yield the files of `from module import name, …`: the module, and each name that is a module."""
    parts = node.module.split(".") if node.module else []
    for name in ([], *([alias.name] for alias in node.names)):
        if node.level:
            yield from _inside(file.parents[node.level - 1], [*parts, *name])
        else:
            yield from located(".".join([*parts, *name]))


def located(name: str) -> Iterator[Path]:
    """Yield the file of a module, found without importing its package; none where it is installed or not there."""
    top, *rest = name.split(".")
    if top == "bertopt":
        # bertopt/__init__.py only re-exports names: what is used of them is imported by its own path or hashed with it.
        yield from _inside(_PACKAGE, rest) if rest else ()
        return
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return
    if spec is None or spec.origin in (None, "built-in", "frozen"):
        return
    origin = Path(str(spec.origin)).resolve()
    # By name too: a virtual environment may use the packages of another, whose paths it does not list.
    if {"site-packages", "dist-packages"} & {*origin.parts} or any(origin.is_relative_to(place) for place in _INSTALLED):
        return
    yield from _inside(origin.parent, rest) if spec.submodule_search_locations and rest else [origin]


def _inside(folder: Path, parts: list[str]) -> Iterator[Path]:
    """Yield the file of the module or package `parts` in a folder, if there is one."""
    place = folder.joinpath(*parts)
    if place.with_suffix(".py").is_file():
        yield place.with_suffix(".py").resolve()
    elif (place / "__init__.py").is_file():
        yield (place / "__init__.py").resolve()
