"""What tests of whole runs share: workers that outlive one run, from a server that outlives one file of tests."""

from __future__ import annotations

import atexit
import os
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

    #: The last one, and the variables that its server was started with, which every worker inherits.
    _last: SharedWorkers | None = None
    _variables: dict[str, str]

    @classmethod
    def of_this_process(cls) -> SharedWorkers:
        """Return the workers of the last call, or others where the environment has changed since or their server has ended."""
        variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        last = cls._last
        if last is not None and (last._variables != variables or last._server.poll() is not None):
            Workers.close(last)
            last = None
        if last is None:
            last = cls._last = cls()
            last._variables = variables
        return last

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self._workers.clear()


@atexit.register
def _close(owner: int = os.getpid()) -> None:
    if SharedWorkers._last is not None and os.getpid() == owner:  # not in a fork of this process
        Workers.close(SharedWorkers._last)


@contextmanager
def cheap_workers(*modules: str, new_interpreter: bool = False) -> Iterator[SharedWorkers]:
    """One server for all runs of `bertopt.<module>`, and timing that takes no time.

    Unless `new_interpreter`, a delivered copy answers in a worker, not in an interpreter that has to import torch first.
    """
    with pytest.MonkeyPatch.context() as patch:
        example_passes.make_cheap(patch)
        shared = SharedWorkers.of_this_process()
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
            shared.close()
