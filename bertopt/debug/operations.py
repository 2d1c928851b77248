"""What a worker does for `bertopt debug` and `profile`, besides what every worker does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bertopt import stages
from bertopt.core import Device
from bertopt.workers import operations
from bertopt.workers.build_operations import Reply


class Ops(operations.Ops):
    """The requests by name. Holds at most one stage that is looked into."""

    def __init__(self) -> None:
        super().__init__()
        self.inspector: Any = None

    def op_debug(self, arrays: Any, do: str, ask: dict[str, Any]) -> Reply:
        """`open` a stage beside the reference, then call a method of `StageInspector`."""
        from bertopt.debug.inspector import StageInspector

        if do == "open":
            self.inspector = StageInspector(**ask)
            return None, {}
        return getattr(self.inspector, do)(**ask), {}

    def op_profile(
        self, arrays: Any, directory: str, device: Device, shape: list[int] | None, texts: list[Any], scratch: str
    ) -> Reply:
        """Profile one call of a stage: see `bertopt.debug.profiler`."""
        from bertopt.debug.profiler import profile

        path = Path(directory)
        model = stages.open_stage(path, stages.verify(path))
        size = (shape[0], shape[1]) if shape else None
        return profile(model, path, device, size, texts, Path(scratch)).model_dump(), {}

    def op_attention(self, arrays: Any, source: str, task: str, text: str) -> Reply:
        """Return the attention of a checkpoint in fp32 for one text."""
        from bertopt.debug.attention_maps import attention
        from bertopt.modeling import checkpoint

        return attention(checkpoint.load(source, task), Path(source), text).model_dump(), {}
