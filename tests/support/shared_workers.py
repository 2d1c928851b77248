"""What tests of whole runs share: workers that outlive one run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bertopt.workers.client import Workers
from tests.support import example_passes


class SharedWorkers(Workers):
    """Workers whose server serves many runs: starting it takes longer than most of them."""

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self._workers.clear()


@contextmanager
def cheap_workers(*modules: str) -> Iterator[SharedWorkers]:
    """One server for all runs of `bertopt.<module>`, and timing that takes no time."""
    with pytest.MonkeyPatch.context() as patch:
        example_passes.make_cheap(patch)
        shared = SharedWorkers()
        for module in modules:
            patch.setattr(f"bertopt.{module}.Workers", lambda: shared)
        try:
            yield shared
        finally:
            Workers.close(shared)
