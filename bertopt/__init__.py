"""bertopt: a BERT-family checkpoint to the fastest artefact that is provably still the same model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bertopt._version import __version__

if TYPE_CHECKING:
    from bertopt.commands.export import run
    from bertopt.commands.optimize import optimize
    from bertopt.core import (
        Compiled,
        Context,
        Eager,
        Engine,
        Model,
        Native,
        Onnx,
        OpenVino,
        Packaged,
        Pass,
        Result,
        Session,
    )
    from bertopt.errors import BertoptError, Unsupported
    from bertopt.passes import register
    from bertopt.results import Report
    from bertopt.runtime.load import load
    from bertopt.runtime.predictor import Predictor

#: Where each public name lives. They are imported when first used, so that `import bertopt` stays instant.
_HOMES = {
    **dict.fromkeys(
        ("Compiled", "Context", "Eager", "Engine", "Model", "Native", "Onnx", "OpenVino", "Packaged", "Pass", "Result", "Session"),
        "bertopt.core",
    ),
    **dict.fromkeys(("BertoptError", "Unsupported"), "bertopt.errors"),
    "Predictor": "bertopt.runtime.predictor",
    "Report": "bertopt.results",
    "load": "bertopt.runtime.load",
    "optimize": "bertopt.commands.optimize",
    "register": "bertopt.passes",
    "run": "bertopt.commands.export",
}

__all__ = [
    "BertoptError",
    "Compiled",
    "Context",
    "Eager",
    "Engine",
    "Model",
    "Native",
    "Onnx",
    "OpenVino",
    "Packaged",
    "Pass",
    "Predictor",
    "Report",
    "Result",
    "Session",
    "Unsupported",
    "__version__",
    "load",
    "optimize",
    "register",
    "run",
]


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module 'bertopt' has no attribute '{name}'")
    if name in ("Report", "optimize", "run"):
        importlib.import_module("bertopt.report.notebook").register()
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
