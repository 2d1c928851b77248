"""The passes, by name. Adding one: a file, a line here, a test, a recipe line. Outside code calls `register`."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from bertopt.core import RESERVED_KEYS, Pass, Rewrite
from bertopt.errors import UsageError
from bertopt.passes.build_tensorrt import BuildTensorrt
from bertopt.passes.cast_half import CastHalf
from bertopt.passes.cast_onnx_half import CastOnnxHalf
from bertopt.passes.compile_torch import CompileTorch
from bertopt.passes.convert_openvino import ConvertOpenvino
from bertopt.passes.export_onnx import ExportOnnx
from bertopt.passes.fuse_ort import FuseOrt
from bertopt.passes.keep_cls_only import KeepClsOnly
from bertopt.passes.merge_qkv import MergeQkv
from bertopt.passes.pack_sequences import PackSequences
from bertopt.passes.quantize_int8 import QuantizeInt8
from bertopt.passes.use_better_transformer import UseBetterTransformer
from bertopt.passes.use_sdpa import UseSdpa

__all__ = [
    "BuildTensorrt",
    "CastHalf",
    "CastOnnxHalf",
    "CompileTorch",
    "ConvertOpenvino",
    "ExportOnnx",
    "FuseOrt",
    "KeepClsOnly",
    "MergeQkv",
    "PackSequences",
    "QuantizeInt8",
    "UseBetterTransformer",
    "UseSdpa",
    "find",
    "known",
    "register",
]

AnyPass = Pass[Any, Any]

_BUILT_IN: tuple[type[AnyPass], ...] = (
    UseSdpa, UseBetterTransformer, KeepClsOnly, MergeQkv, PackSequences, CastHalf, CompileTorch, ExportOnnx, FuseOrt, CastOnnxHalf, QuantizeInt8, ConvertOpenvino, BuildTensorrt,
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


def need(name: str) -> type[AnyPass]:
    """The pass of that name, which a stage was built with.

    Nothing a stage says is imported: raises UsageError unless the pass is registered here.
    """
    found = find(name) or _offered(name)
    if found is None:
        raise UsageError(f"pass '{name}' is not registered here; import the module that registers it, then try again")
    return found


def restore(record: Rewrite) -> AnyPass:
    """Return the pass that a stage records, built once in a process. Raises UsageError where it is not registered here."""
    return _restored(need(record.name), json.dumps(record.options, sort_keys=True))


@functools.cache
def _restored(cls: type[AnyPass], options: str) -> AnyPass:
    return cls.model_validate(json.loads(options))


#: Passes registered in the process that started this worker: name to (module, qualified name, script).
_offers: dict[str, tuple[str, str, str | None]] = {}


def offers() -> dict[str, tuple[str, str, str | None]]:
    """What a worker needs to import the passes registered here by hand."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    return {
        name: (cls.__module__, cls.__qualname__, str(Path(script).resolve()) if script else None)
        for name, cls in _known.items()
        if cls not in _BUILT_IN
    }


def accept(offered: dict[str, tuple[str, str, str | None]]) -> None:
    """In a worker: import these passes when a recipe or a stage needs them."""
    _offers.update(offered)


def _offered(name: str) -> type[AnyPass] | None:
    if name not in _offers:
        return None
    module, qualname, script = _offers[name]
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
