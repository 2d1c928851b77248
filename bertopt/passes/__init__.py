"""The passes, by name. Adding one: a file, a line here, a test, a recipe line. Outside code calls `register`."""

from __future__ import annotations

import importlib
from typing import Any

from bertopt.core import RESERVED_KEYS, Pass
from bertopt.errors import UsageError
from bertopt.passes.build_tensorrt import BuildTensorrt
from bertopt.passes.cast_half import CastHalf
from bertopt.passes.cast_onnx_half import CastOnnxHalf
from bertopt.passes.compile_torch import CompileTorch
from bertopt.passes.export_onnx import ExportOnnx
from bertopt.passes.fuse_ort import FuseOrt
from bertopt.passes.quantize_int8 import QuantizeInt8
from bertopt.passes.use_better_transformer import UseBetterTransformer
from bertopt.passes.use_sdpa import UseSdpa

__all__ = [
    "BuildTensorrt",
    "CastHalf",
    "CastOnnxHalf",
    "CompileTorch",
    "ExportOnnx",
    "FuseOrt",
    "QuantizeInt8",
    "UseBetterTransformer",
    "UseSdpa",
    "find",
    "known",
    "register",
]

AnyPass = Pass[Any, Any]

_BUILT_IN: tuple[type[AnyPass], ...] = (
    UseSdpa, UseBetterTransformer, CastHalf, CompileTorch, ExportOnnx, FuseOrt, CastOnnxHalf, QuantizeInt8, BuildTensorrt,
)  # fmt: skip
_known: dict[str, type[AnyPass]] = {cls.name(): cls for cls in _BUILT_IN}

#: Installed packages offer passes under this entry-point group.
ENTRY_POINTS = "bertopt.passes"


def register(cls: type[AnyPass]) -> type[AnyPass]:
    """Make a pass known to recipes under its snake-case name; usable as a decorator.

    Raises UsageError for a class that is no pass, or a name that another class has taken.
    """
    if not (isinstance(cls, type) and issubclass(cls, Pass)):
        raise UsageError(f"register takes a subclass of bertopt.Pass; got {cls!r}")
    cls.forms()
    clash = set(cls.model_fields) & set(RESERVED_KEYS)
    if clash:
        raise UsageError(f"pass '{cls.name()}': option '{min(clash)}' is a key of every step; rename it")
    taken = _known.get(cls.name())
    if taken is not None and (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
        raise UsageError(
            f"a pass named '{cls.name()}' is registered already ({taken.__module__}.{taken.__qualname__}); rename the class"
        )
    _known[cls.name()] = cls
    return cls


def known() -> dict[str, type[AnyPass]]:
    """Every registered pass by name, those of installed packages included."""
    from importlib.metadata import entry_points

    for point in entry_points(group=ENTRY_POINTS):
        if point.name not in _known:
            register(point.load())
    return dict(_known)


def find(name: str) -> type[AnyPass] | None:
    """The pass of that name, or None. Installed packages are asked only where bertopt has none."""
    return _known.get(name) or known().get(name)


def by_target(target: str) -> type[AnyPass]:
    """The pass class at `module:qualname`, as a stage's rewrites record it.

    Raises UsageError where it cannot be imported.
    """
    module, _, qualname = target.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in qualname.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"pass '{target}' cannot be imported ({error}); it must live in an installed module"
        ) from error
    return register(found)
