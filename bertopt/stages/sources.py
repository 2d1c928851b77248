"""The source of a recipe's own passes and the files that they read: what a stage records of them, and whether those that replay it are the same."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from bertopt.errors import IntegrityError
from bertopt.modeling.source import sha256
from bertopt.passes import registry
from bertopt.passes.registry import AnyPass
from bertopt.stages import source_hash
from bertopt.stages.source_hash import is_library
from bertopt.system import opened_files

#: What entries of files begin with that a pass read, relative to its own.
_READ = "file of pass"


def record(passes: Iterable[str]) -> dict[str, str]:
    """Return hashes of the files that define these passes, bertopt's own excepted, of all that those import, also later and inside
    functions, and of all modules loaded that are no library: what the passes imported, however they did."""
    found = {
        f"module {name}": sha256(file) for name, module in list(sys.modules.items())
        if (file := _file(getattr(module, "__file__", None))) and "__main__" not in name and "bertopt_main" not in name
    }  # fmt: skip
    for name in passes:
        found |= _pass(name) | _imported(name)
    return found


@contextlib.contextmanager
def reading(by: AnyPass, inside: Sequence[Path], found: dict[str, str] | None = None, recorded: Mapping[str, str] | None = None) -> Iterator[None]:
    """While a pass works that is not bertopt's own: look at the files that it reads and that are neither compiled code nor in directories
    `inside`; source too, which it may run without importing it.

    Puts their hashes into `found`; raises IntegrityError where one is not the file that was `recorded` under its name.
    """
    if registry.is_own(type(by)):
        yield
        return
    with opened_files.noting() as opened:
        yield
    file = registry.source_file(type(by))
    own = Path() if file is None else file.resolve().parent
    read = {os.path.relpath(path.resolve(), own.resolve()): sha256(path) for path in opened_files.elsewhere(opened, inside, opened_files.COMPILED)}
    if found is not None:
        found |= {f"{_READ} {by.name()}: {name}": value for name, value in read.items()}
    known = [(Path(_named(key)).name, value) for key, value in (recorded or {}).items() if key.startswith(f"{_READ} {by.name()}: ")]
    for name, value in read.items():
        # Folders above may be called otherwise elsewhere; which files of one name there are, too.
        of_name = {hashed for other, hashes in known if other == Path(name).name for hashed in hashes.split()}
        if of_name and value not in of_name:
            raise IntegrityError(f"pass '{by.name()}' reads '{name}', which is not the file that this stage was built and checked with; restore it, or export again")


def without_folders(recorded: Mapping[str, str] | None) -> dict[str, str] | None:
    """Return the entries as an artefact has them: files that a pass read by their names, with the hashes of all of one name. Where they
    are says something of this machine, and nothing elsewhere."""
    if recorded is None:
        return None
    found = dict[str, str]()
    for key, value in recorded.items():
        name = f"{key.partition(': ')[0]}: {Path(_named(key)).name}" if key.startswith(_READ) else key
        found[name] = " ".join(sorted({*found.get(name, "").split(), value})) if name in found else value
    return found


def check_here(recorded: Mapping[str, str] | None) -> None:
    """Raise IntegrityError where a file that a pass read, or a module that it used, is another one now than when a stage was built here.

    A stage's key does not know these: who would use it builds it again.
    """
    for key, value in (recorded or {}).items():
        paths = list[Path]()
        if key.startswith(_READ):
            file = registry.source_file(registry.require(key.removeprefix(f"{_READ} ").partition(":")[0]))
            paths = [(Path() if file is None else file.resolve().parent) / _named(key)]
        elif key.startswith("module "):
            paths = list(source_hash.located(key.removeprefix("module ")))
        for path in paths:
            if not path.is_file() or sha256(path) != value:
                raise IntegrityError(f"'{path}', which a pass read, is not the file that the stage was built with")


def _named(key: str) -> str:
    return key.partition(": ")[2]


def check(recorded: Mapping[str, str] | None, passes: Sequence[str]) -> None:
    """Raise IntegrityError where a pass, a loaded module that it used, or a file that it may import is not the one that the stage was
    built with.

    A stage of an earlier bertopt records none, and is not checked.
    """
    if recorded is None:
        return
    for name in passes:
        _compare(recorded, _pass(name))
    for key in recorded:
        module = sys.modules.get(key.removeprefix("module ")) if key.startswith("module ") else None
        if module is not None and (file := _file(getattr(module, "__file__", None))):
            _compare(recorded, {key: sha256(file)})
    for name in passes:
        for key, hashes in _imported(name).items():
            # What is not here cannot be imported, so of files of one name some may lack; a stage of an earlier bertopt records none.
            if key in recorded and not {*hashes.split()} <= {*recorded[key].split()}:
                _compare(recorded, {key: hashes})


def _compare(recorded: Mapping[str, str], found: Mapping[str, str]) -> None:
    for key, value in found.items():
        if recorded.get(key) != value:
            raise IntegrityError(
                f"the source of {key} is not the one that this stage was built and checked with; restore it, or export again"
            )


def _pass(name: str) -> dict[str, str]:
    """Return the entry of one pass; none for bertopt's own, which its version names."""
    cls = registry.require(name)
    if registry.is_own(cls):
        return {}
    file = registry.source_file(cls)
    return {f"pass {name}": "" if file is None else sha256(file)}


def _imported(name: str) -> dict[str, str]:
    """Return an entry for each file that the file of a pass imports, also where it does so only when texts are run."""
    cls = registry.require(name)
    file = None if registry.is_own(cls) else registry.source_file(cls)
    if file is None:
        return {}
    found: dict[str, list[str]] = {}
    for path in source_hash.closure([file], bertopts=False) - {file.resolve()}:
        # Folders above may be called otherwise elsewhere.
        own = f"{path.parent.name}/{path.name}" if path.name == "__init__.py" else path.name
        found.setdefault(f"import of pass {name}: {own}", []).append(sha256(path))
    return {key: " ".join(sorted(hashes)) for key, hashes in found.items()}


def _file(name: str | None) -> Path | None:
    """Return a module's file, where it is Python source and no library's."""
    path = Path(name) if name else None
    return path if path is not None and path.suffix == ".py" and path.is_file() and not is_library(path) else None
