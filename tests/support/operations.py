"""The operations of the tests' workers: bertopt's own, but equal networks are exported once for all processes of a test run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from bertopt.core import Context, Eager, Result
from bertopt.passes import ExportOnnx, registry
from bertopt.workers import operations
from bertopt.workers.build_operations import Reply
from tests.support.exports import FOLDER, Exports


class Ops(operations.Ops):
    """Of one worker, which builds one stage."""

    def op_build(self, *arguments: Any, **named: Any) -> Reply:
        whole, exports = ExportOnnx.__call__, Exports(Path(os.environ[FOLDER]))

        def export(step: ExportOnnx, model: Eager, ctx: Context) -> Result[Any]:
            # Passes of tests may change more of the process than the network.
            own = all(registry.is_own(registry.require(rewrite.name)) for rewrite in model.rewrites)
            return exports.apply(step, model, ctx) if own else whole(step, model, ctx)

        setattr(ExportOnnx, "__call__", export)  # noqa: B010
        try:
            return super().op_build(*arguments, **named)
        finally:
            setattr(ExportOnnx, "__call__", whole)  # noqa: B010
