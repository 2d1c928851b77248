"""The source of a recipe's own passes: what a stage records of it, and whether the code that replays it is the same."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from bertopt.errors import IntegrityError
from bertopt.modeling.source import sha256
from bertopt.passes import registry
from bertopt.stages import source_hash
from bertopt.stages.source_hash import is_library


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
