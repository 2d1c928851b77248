"""Workers that have a stage open, one for each stage."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path

from bertopt.core import Device
from bertopt.workers.client import Worker, Workers


class OpenStages:
    """Opens committed stages in fresh workers, and keeps them open until they are closed here."""

    def __init__(self, workers: Workers, device: Device) -> None:
        self.workers, self.device = workers, device
        self._open: dict[Path, Worker] = {}

    def worker(self, directory: Path) -> Worker:
        """Return the worker of a stage, a new one if it has none or that one ended. Raises Unsupported where this machine cannot open it."""
        found = self.running(directory)
        if found is None:
            found = self._open[directory] = self._start(directory)
        return found

    def running(self, directory: Path) -> Worker | None:
        """Return the worker of a stage if it is open."""
        found = self._open.get(directory)
        return found if found is not None and found.alive else None

    def close_others(self, needed: Container[Path | None]) -> None:
        """Close the workers of stages that are not `needed`: each holds a model in memory."""
        for path in [path for path in self._open if path not in needed]:
            self._open.pop(path).close()

    def close(self) -> None:
        self.close_others(())

    def _start(self, directory: Path) -> Worker:
        worker = self.workers.start()
        try:
            worker.open(directory, self.device)
        except BaseException:
            worker.kill()
            raise
        return worker
