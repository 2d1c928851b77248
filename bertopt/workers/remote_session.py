"""A session that is open in a worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from bertopt.core import Session
from bertopt.workers import protocol
from bertopt.workers.client import Worker

if TYPE_CHECKING:
    from bertopt.core import Array


class RemoteSession(Session):
    """The session open in a worker."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def load(self, inputs: Mapping[str, Array]) -> None:
        self.worker.call("load", inputs)

    def step(self) -> None:
        self.worker.call("step")

    def fetch(self) -> dict[str, Array]:
        return self.worker.exchange("fetch")[1]

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return self.worker.exchange("run", inputs)[1]

    def sampled(self) -> list[tuple[dict[str, Array], dict[str, Array]]]:
        """Return inputs and outputs of the timed runs that were sampled since the last call."""
        count, arrays = self.worker.exchange("sampled")
        parts = protocol.by_number(arrays, 2 * count)
        return list(zip(parts[::2], parts[1::2], strict=True))
