"""Outputs of the reference for the rows of the sweeps: each distinct row is run once, in a batch of rows of similar length.

The reference's output depends neither on the batch nor on padding, as the invariance check verifies. So a row that several sweeps
share is run once, in batches of the size at which torch is fastest. A stage runs the sweeps as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bertopt.checks.probes import Probe
from bertopt.core import Spec

if TYPE_CHECKING:
    from bertopt.core import Array

#: Most tokens of a batch. With MiniLM on 2 cores, torch runs 5,600 tokens a second this way, 4,300 in the largest batch, 5,000 in single rows.
BATCH_TOKENS, LEAST_TOKENS = 1024, 128
#: Floating-point operations of a batch of a larger model: less than a second, which others may have to wait.
BATCH_OPERATIONS = 2.5e10


@dataclass(frozen=True)
class Rows:
    """A batch of rows to run, and the key of each."""

    probe: Probe
    keys: tuple[bytes, ...]


class ReferenceRows:
    """The reference's vectors for the rows of sweeps, whose padding is on the right."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.batch_tokens = min(BATCH_TOKENS, max(LEAST_TOKENS, int(BATCH_OPERATIONS / (24 * spec.layers * spec.hidden**2))))
        self._kept: dict[bytes, dict[str, Array]] = {}
        #: For question answering, the outputs that have a score for each token.
        self._scores: set[str] = set()

    def missing(self, sweeps: Sequence[Probe]) -> list[Rows]:
        """Return the rows of `sweeps` that were not run yet, in batches, the shortest rows first."""
        rows = {
            key: (probe, row, length) for probe in sweeps for row, length, key in self._rows(probe) if key not in self._kept
        }  # fmt: skip
        batches: list[list[bytes]] = [[]]
        for key in sorted(rows, key=lambda key: rows[key][2]):
            if batches[-1] and (len(batches[-1]) + 1) * rows[key][2] > self.batch_tokens:
                batches.append([])
            batches[-1].append(key)
        return [self._batch(number, {key: rows[key] for key in keys}) for number, keys in enumerate(batches) if keys]

    def keep(self, batch: Rows, vectors: Mapping[str, Array]) -> None:
        """Take the vectors [N, D] that the reference gave for a batch, by output."""
        compared = batch.probe.compared
        for name, value in vectors.items():
            if self.spec.granularity == "span" and value.shape == compared.shape:
                self._scores.add(name)
            ends = range(1, len(value)) if len(value) == len(compared) else np.cumsum(compared.sum(axis=1))[:-1]
            for key, of_row in zip(batch.keys, np.split(value, ends), strict=True):
                self._kept.setdefault(key, {})[name] = of_row

    def vectors(self, sweep: Probe) -> dict[str, Array]:
        """Return the vectors [N, D] of a sweep whose rows were all run, by output."""
        rows = [self._kept[key] for _, _, key in self._rows(sweep)]
        return {name: np.concatenate([self._as_wide(name, row[name], sweep.shape[1]) for row in rows]) for name in rows[0]}

    def _rows(self, probe: Probe) -> Iterator[tuple[int, int, bytes]]:
        """Yield the number of each row, how many valid tokens it has, and a key of its contents."""
        for row, length in enumerate(probe.inputs["attention_mask"].sum(axis=1).tolist()):
            arrays = [*(probe.inputs[name] for name in self.spec.inputs), probe.compared]
            yield row, length, b"".join(array[row, :length].tobytes() for array in arrays)

    def _batch(self, number: int, rows: Mapping[bytes, tuple[Probe, int, int]]) -> Rows:
        shape = len(rows), max(length for _, _, length in rows.values())
        inputs = {name: np.full(shape, self.spec.pad_id if name == "input_ids" else 0, np.int64) for name in self.spec.inputs}
        compared = np.zeros(shape, bool)
        for place, (probe, row, length) in enumerate(rows.values()):
            for name, array in inputs.items():
                array[place, :length] = probe.inputs[name][row, :length]
            compared[place, :length] = probe.compared[row, :length]
        return Rows(Probe(f"reference {number}", "batch sizes", inputs, compared, np.ones(len(rows), bool)), tuple(rows))

    def _as_wide(self, name: str, vectors: Array, sequence: int) -> Array:
        """Return a row's vectors as they are, or a span's scores [1, S] as wide as its sweep: 0 where nothing is compared."""
        if name not in self._scores:
            return vectors
        return np.pad(vectors[:, :sequence], ((0, 0), (0, max(0, sequence - vectors.shape[1]))))
