"""Record the source of passes that are not part of bertopt and the files that they read, and check that these are unchanged when a stage is opened."""

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

#: Prefix of the entries of files that a pass read; their paths are relative to the pass's own file.
_READ = "file of pass"


def record(passes: Iterable[str]) -> dict[str, str]:
    """Return hashes of the files that define these passes (except bertopt's own), of everything that those files import, also inside functions,
    and of all loaded modules that are not part of a library, which the passes may have imported by other means."""
    found = {
        f"module {name}": sha256(file) for name, module in list(sys.modules.items())
        if (file := _file(getattr(module, "__file__", None))) and "__main__" not in name and "bertopt_main" not in name
    }  # fmt: skip
    for name in passes:
        found |= _pass(name) | _imported(name)
    return found


@contextlib.contextmanager
def reading(by: AnyPass, inside: Sequence[Path], found: dict[str, str] | None = None, recorded: Mapping[str, str] | None = None) -> Iterator[None]:
    """Watch which files a pass that is not part of bertopt reads while the block runs, except compiled code and files in the directories
    `inside`. Source files count too: the pass may execute them without importing them.

    Add their hashes to `found`; raise IntegrityError where a file is not the one `recorded` under its name.
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
        # Compared by file name: the folders above may have other names on this machine.
        of_name = {hashed for other, hashes in known if other == Path(name).name for hashed in hashes.split()}
        if of_name and value not in of_name:
            raise IntegrityError(f"pass '{by.name()}' reads '{name}', which is not the file that this stage was built and checked with; restore it, or export again")


def without_folders(recorded: Mapping[str, str] | None) -> dict[str, str] | None:
    """Return the entries for an artefact, in which files that a pass read have no folders, since these mean nothing on another machine. Files
    with the same name share an entry with all their hashes."""
    if recorded is None:
        return None
    found = dict[str, str]()
    for key, value in recorded.items():
        name = f"{key.partition(': ')[0]}: {Path(_named(key)).name}" if key.startswith(_READ) else key
        found[name] = " ".join(sorted({*found.get(name, "").split(), value})) if name in found else value
    return found


def check_here(recorded: Mapping[str, str] | None) -> None:
    """Raise IntegrityError where a file that a pass read, or a module that it used, changed since a stage was built on this machine.

    A stage's key does not cover these files: the stage must be built again.
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

    Stages of early versions of bertopt record no sources and are not checked.
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
            # A file that is missing here cannot be imported, so some files of one name may be missing. Early versions recorded none.
            if key in recorded and not {*hashes.split()} <= {*recorded[key].split()}:
                _compare(recorded, {key: hashes})


def _compare(recorded: Mapping[str, str], found: Mapping[str, str]) -> None:
    for key, value in found.items():
        if recorded.get(key) != value:
            raise IntegrityError(
                f"the source of {key} is not the one that this stage was built and checked with; restore it, or export again"
            )


def _pass(name: str) -> dict[str, str]:
    """Return the entry of one pass; none for bertopt's own passes, which its version identifies."""
    cls = registry.require(name)
    if registry.is_own(cls):
        return {}
    file = registry.source_file(cls)
    return {f"pass {name}": "" if file is None else sha256(file)}


def _imported(name: str) -> dict[str, str]:
    """Return an entry for each file that the file of a pass imports, also inside functions that run later."""
    cls = registry.require(name)
    file = None if registry.is_own(cls) else registry.source_file(cls)
    if file is None:
        return {}
    found: dict[str, list[str]] = {}
    for path in source_hash.closure([file], bertopts=False) - {file.resolve()}:
        # The folders above may have other names on another machine.
        own = f"{path.parent.name}/{path.name}" if path.name == "__init__.py" else path.name
        found.setdefault(f"import of pass {name}: {own}", []).append(sha256(path))
    return {key: " ".join(sorted(hashes)) for key, hashes in found.items()}


def _file(name: str | None) -> Path | None:
    """Return a module's file if it is Python source and not part of a library."""
    path = Path(name) if name else None
    return path if path is not None and path.suffix == ".py" and path.is_file() and not is_library(path) else None
