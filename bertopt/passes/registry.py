"""The registered passes by name: built in, offered by installed packages, or registered by the caller's code."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import json
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast, get_args

from bertopt.core import RESERVED_KEYS, HalfRounding, Int8Rounding, Pass, Rewrite
from bertopt.errors import BertoptError, PassFailed, UsageError

AnyPass = Pass[Any, Any]

_registered: dict[str, type[AnyPass]] = {}

#: Installed packages offer passes under this entry-point group.
ENTRY_POINTS = "bertopt.passes"


def register(cls: type[AnyPass]) -> type[AnyPass]:
    """Make a pass known to recipes under its snake-case name; usable as a decorator.

    Raises UsageError for a class that is no pass or lacks what every pass has, or a name that another class has taken.
    """
    if not (isinstance(cls, type) and issubclass(cls, Pass)):
        raise UsageError(f"register takes a subclass of bertopt.Pass; got {cls!r}")
    if missing := _missing(cls):
        raise UsageError(f"pass '{cls.name()}' ({cls.__module__}.{cls.__qualname__}) must {missing}")
    clash = set(cls.model_fields) & set(RESERVED_KEYS)
    if clash:
        raise UsageError(f"pass '{cls.name()}': option '{min(clash)}' is a key of every step; rename it")
    taken = _registered.get(cls.name())
    if taken is not None and (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
        raise UsageError(
            f"a pass named '{cls.name()}' is registered already ({taken.__module__}.{taken.__qualname__}); rename the class"
        )
    _registered[cls.name()] = cls
    return cls


def _missing(cls: type[AnyPass]) -> str | None:
    """Return what a class must do before it is a pass that recipes can use, or None."""
    try:
        cls.forms()
    except TypeError as error:
        return str(error).split(" must ", 1)[-1]
    if cls.__init__ is not Pass.__init__:
        return "define no __init__: its options are fields, such as `keep: int = 1`, which are checked when a recipe is read"
    if cls.__call__ is Pass.__call__:
        return "define __call__(self, model, ctx), which returns a bertopt.Result; of an eager network that is model.rewritten(self)"
    return None


def is_own(cls: type[AnyPass]) -> bool:
    """Whether a pass is part of bertopt."""
    return cls.__module__.startswith("bertopt.passes.")


def source_file(cls: type[AnyPass]) -> Path | None:
    """Return the file that defines a pass; None for one from an interactive session."""
    try:
        return Path(inspect.getfile(cls))
    except (OSError, TypeError):
        return None


@contextlib.contextmanager
def at_work(apply: AnyPass) -> Iterator[None]:
    """While a pass works: have an error of one that is not part of bertopt say so, and where it was raised."""
    try:
        yield
    except BertoptError:
        raise
    except (Exception, SystemExit) as error:
        if is_own(type(apply)):
            raise
        file = source_file(type(apply))
        frames = traceback.extract_tb(error.__traceback__)
        place = next((frame for frame in reversed(frames) if Path(frame.filename) == file), frames[-1])
        raise PassFailed(
            f"pass '{apply.name()}', which is not part of bertopt, raised {type(error).__name__}: {error} "
            f"({place.filename}:{place.lineno}, in {place.name}); mend the pass: the report shows the traceback"
        ) from error


def int8_rounding(by: AnyPass) -> Int8Rounding | None:
    """Return what a pass says of the INT8 products that it writes. Raises PassFailed where one that is not part of bertopt cannot."""
    with at_work(by):
        how: Any = by.int8_rounding()
    if how is not None and not isinstance(how, Int8Rounding):
        raise PassFailed(f"pass '{by.name()}' must return a bertopt.core.Int8Rounding or None from int8_rounding; got {type(how).__name__}")
    return how


def half_rounding(by: AnyPass) -> HalfRounding:
    """Return what a pass says of half precision. Raises PassFailed where one that is not part of bertopt cannot."""
    with at_work(by):
        how: Any = by.half_rounding()
    if how not in (known := get_args(HalfRounding)):
        raise PassFailed(f"pass '{by.name()}' must return {', '.join(map(repr, known))} from half_rounding; got {how!r}")
    return cast(HalfRounding, how)


def all_passes() -> dict[str, type[AnyPass]]:
    """Every registered pass by name, those of installed packages included. Raises UsageError for a package whose pass cannot be imported."""
    from importlib.metadata import entry_points

    for point in entry_points(group=ENTRY_POINTS):
        if point.name not in _registered:
            try:
                found = point.load()
            except Exception as error:
                package = point.dist.name if point.dist is not None else "an installed package"
                raise UsageError(
                    f"pass '{point.name}' ({point.value}), which {package} offers, cannot be imported: {type(error).__name__}: {error}; mend or uninstall it"
                ) from error
            register(found)
    return dict(_registered)


def get(name: str) -> type[AnyPass] | None:
    """The pass of that name, or None. Packages' entry points are read only where no pass of that name is registered."""
    return _registered.get(name) or all_passes().get(name)


def require(name: str) -> type[AnyPass]:
    """The pass of that name, which a stage was built with.

    Nothing a stage says is imported: raises UsageError unless the pass is registered here.
    """
    cls = get(name) or _from_caller(name)
    if cls is None:
        raise UsageError(f"pass '{name}' is not registered here; import the module that registers it, then try again")
    return cls


def restore(record: Rewrite) -> AnyPass:
    """Return the pass that a stage records, built once in a process. Raises UsageError where it is not registered here."""
    return _restored(require(record.name), json.dumps(record.options, sort_keys=True))


@functools.cache
def _restored(cls: type[AnyPass], options: str) -> AnyPass:
    return cls.model_validate(json.loads(options))


#: Passes registered in the process that started this worker: name to (module, qualified name, script).
_importable: dict[str, tuple[str, str, str | None]] = {}


def importable_passes() -> dict[str, tuple[str, str, str | None]]:
    """What a worker needs to import the passes registered here by hand."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    return {
        name: (cls.__module__, cls.__qualname__, str(Path(script).resolve()) if script else None)
        for name, cls in _registered.items()
        if not is_own(cls)
    }


def add_importable(origins: dict[str, tuple[str, str, str | None]]) -> None:
    """In a worker: import these passes when a recipe or a stage needs them."""
    _importable.update(origins)


def _from_caller(name: str) -> type[AnyPass] | None:
    if name not in _importable:
        return None
    module, qualname, script = _importable[name]
    if module != "__main__":
        found: Any = importlib.import_module(module)
    elif script is None:
        raise UsageError(
            f"pass '{name}' is defined in an interactive session; put it in a file, so that workers can import it"
        )
    else:
        # The user's script, under another name: what stands below its __main__ guard is not run.
        spec = importlib.util.spec_from_file_location("__bertopt_main__", script)
        assert spec is not None and spec.loader is not None
        found = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
    for part in qualname.split("."):
        found = getattr(found, part)
    return register(found)
