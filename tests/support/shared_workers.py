"""What tests of whole runs share: workers that outlive one run, from a server that outlives one file of tests."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from bertopt.core import Device
from bertopt.workers.client import OPERATIONS, Worker, Workers
from tests.support import example_passes
from tests.support.exports import FOLDER


class SharedWorkers(Workers):
    """Workers whose server serves many runs: starting it takes longer than most of them."""

    SERVER: ClassVar[str] = "tests.support.preloaded_server"
    #: All whose server was started and not closed.
    _kept: ClassVar[list[SharedWorkers]] = []

    def __init__(self, variables: Mapping[str, str]) -> None:
        super().__init__()
        #: The environment of the server, which every worker inherits.
        self.variables = dict(variables)
        #: Contexts of `cheap_workers` that these serve; one may lie in another, with other variables.
        self.uses = 0
        self._kept.append(self)

    @classmethod
    def of_this_process(cls) -> SharedWorkers:
        """Return workers with the variables of now, those of an earlier call if their server lives. Others that nobody uses are closed."""
        variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        for one in [one for one in cls._kept if not one.uses and (one.variables != variables or one._server.poll() is not None)]:
            cls._kept.remove(one)
            Workers.close(one)
        found = (one for one in cls._kept if one.variables == variables and one._server.poll() is None)
        return next(found, None) or cls(variables)

    def start(self, operations: str = OPERATIONS) -> Worker:
        # Campaigns are no test run, and share no exports.
        shared = operations == OPERATIONS and FOLDER in os.environ
        return super().start("tests.support.operations" if shared else operations)

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self._workers.clear()


@atexit.register
def _close(owner: int = os.getpid()) -> None:
    for one in SharedWorkers._kept if os.getpid() == owner else ():  # not in a fork of this process
        Workers.close(one)


@contextmanager
def cheap_workers(*modules: str, new_interpreter: bool = False) -> Iterator[SharedWorkers]:
    """One server for all runs of `bertopt.<module>`, and timing that takes no time.

    Unless `new_interpreter`, a delivered copy answers in a worker, not in an interpreter that has to import torch first.
    """
    with pytest.MonkeyPatch.context() as patch:
        example_passes.make_cheap(patch)
        shared = SharedWorkers.of_this_process()
        shared.uses += 1
        for module in modules:
            patch.setattr(f"bertopt.{module}.Workers", lambda: shared)

        def answers(directory: Path, device: Device, compiled: bool, weights: Any = None) -> tuple[Any, list[str]]:
            with shared.calls_within(60), shared.start() as worker:
                worker.open(directory, device)
                return {"a worker": worker.call("replay")}, []

        if not new_interpreter:
            patch.setattr("bertopt.pipeline.clean_run.answers", answers)
        try:
            yield shared
        finally:
            shared.uses -= 1
            if not shared.uses:
                shared.close()
