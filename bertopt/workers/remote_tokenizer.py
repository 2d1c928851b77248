"""A stage's tokenizer in a worker: a tokenizer.json that takes too much time or memory ends only the worker."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bertopt.spec import Text
from bertopt.workers.client import Worker, Workers

if TYPE_CHECKING:
    from bertopt.core import Array

#: Seconds that one batch of texts may take.
BATCH_S = 300.0


class RemoteTokenizer:
    """The tokenizer of the stage in `directory`, which truncates only what is too long for the model."""

    def __init__(self, workers: Workers, directory: Path) -> None:
        self._workers, self._directory = workers, directory
        self._worker: Worker | None = None

    def batch(self, texts: Sequence[Text]) -> dict[str, Array]:
        """Return right-padded arrays [B, S] for every input of the model."""
        return self._opened().exchange("encode", timeout=BATCH_S, texts=list(texts))[1]

    def word(self, token: int) -> str:
        return str(self._opened().call("word", timeout=BATCH_S, token=token))

    def mask(self) -> tuple[str, int]:
        """The mask token's spelling and id, of a model for fill-mask."""
        word, number = self._opened().call("mask", timeout=BATCH_S, directory=str(self._directory))
        return word, number

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()

    def _opened(self) -> Worker:
        if self._worker is None or not self._worker.alive:
            self._worker = self._workers.start()
            self._worker.call("tokenizer", timeout=BATCH_S, directory=str(self._directory))
        return self._worker
