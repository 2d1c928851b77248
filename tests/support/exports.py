"""Exports that all processes of one test run share, workers included: an export takes seconds, and many tests need the same graph."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from filelock import FileLock

from bertopt.core import Context, Eager, Onnx, Pass, Result
from bertopt.passes import ExportOnnx
from bertopt.quantization import onnx_files
from bertopt.stages.fingerprint import fingerprint

#: The environment variable that names the folder of this run's exports.
FOLDER = "BERTOPT_TEST_EXPORTS"


class Exports:
    """Applies `ExportOnnx` once to equal networks and copies the graph after that. Not for tests of the export itself."""

    def __init__(self, folder: Path, export: Callable[..., Result[Any]] = ExportOnnx.__call__) -> None:
        self.folder, self.export = folder, export

    def __call__(self, model: Eager, ctx: Context, opset: int = 23) -> Onnx:
        """Return the graph of `model`, written to `ctx.workdir` as `ExportOnnx(opset=opset)` does."""
        exported: Onnx = self.apply(ExportOnnx(opset=opset), model, ctx).model
        return exported

    def apply(self, step: Pass[Any, Any], model: Any, ctx: Context) -> Result[Any]:
        """Apply any pass; an export only where no test of this run has exported an equal network."""
        if not isinstance(step, ExportOnnx):
            return step(model, ctx)
        names = [rewrite.name for rewrite in model.rewrites]
        key = hashlib.sha256(f"{fingerprint(model)} {model.spec!r} {model.precision} {names} {step!r}".encode()).hexdigest()
        kept, out = self.folder / key, ctx.workdir / "onnx"
        with FileLock(f"{kept}.lock"):
            if not (kept / "changes.json").exists():
                shutil.rmtree(kept, ignore_errors=True)  # of an export that failed
                kept.mkdir()
                changes = self.export(step, model, replace(ctx, workdir=kept)).changes
                (kept / "changes.json").write_text(json.dumps(changes))
        shutil.copytree(kept / "onnx", out, dirs_exist_ok=True)
        return Result(Onnx(model.spec, model.precision, out / onnx_files.MODEL), json.loads((kept / "changes.json").read_text()))
