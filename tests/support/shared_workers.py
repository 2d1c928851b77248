"""What tests of whole runs share: workers that outlive one run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bertopt.core import Device
from bertopt.workers.client import Workers
from tests.support import example_passes


class SharedWorkers(Workers):
    """Workers whose server serves many runs: starting it takes longer than most of them."""

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self._workers.clear()


@contextmanager
def cheap_workers(*modules: str, new_interpreter: bool = False) -> Iterator[SharedWorkers]:
    """One server for all runs of `bertopt.<module>`, and timing that takes no time.

    Unless `new_interpreter`, a delivered copy answers in a worker, not in an interpreter that has to import torch first.
    """
    with pytest.MonkeyPatch.context() as patch:
        example_passes.make_cheap(patch)
        shared = SharedWorkers()
        for module in modules:
            patch.setattr(f"bertopt.{module}.Workers", lambda: shared)

        def answers(directory: Path, device: Device, compiled: bool, weights: Any = None) -> tuple[Any, list[str]]:
            with shared.start() as worker:
                worker.open(directory, device, 60)
                return {"a worker": worker.call("replay", timeout=60)}, []

        if not new_interpreter:
            patch.setattr("bertopt.pipeline.clean_run.answers", answers)
        try:
            yield shared
        finally:
            Workers.close(shared)
