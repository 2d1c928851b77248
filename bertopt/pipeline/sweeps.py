"""Run the coverage sweeps of one model: on the reference once, on every stage, each in its worker."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bertopt import stages
from bertopt.checks import coverage, row_differences, suspects
from bertopt.checks.probes import Probe
from bertopt.core import Device, Spec
from bertopt.runtime.batch_limits import LAUNCHED_BATCH_TOKENS, MAX_BATCH_TOKENS
from bertopt.spec import Coverage
from bertopt.workers.client import Worker

if TYPE_CHECKING:
    from bertopt.core import Array


class Sweeps:
    """The sweeps over one reference, and its vectors as far as a stage needed them."""

    def __init__(self, spec: Spec, reference: str, device: Device) -> None:
        # Other lengths and rows for every checkpoint; the same ones whenever that is measured.
        seed = int(hashlib.sha256(reference.encode()).hexdigest()[:8], 16)
        most_tokens = LAUNCHED_BATCH_TOKENS if device == "cuda" else MAX_BATCH_TOKENS
        self.spec, self.plan = spec, coverage.plan(spec, seed, most_tokens)
        self._reference: dict[str, dict[str, Array]] = {}

    def measure(
        self, directory: Path, worker: Worker, reference: Worker, ran: Sequence[Probe], timeout: float, every: bool
    ) -> Coverage:
        """Compare the stage in `directory`, open in `worker`, with the reference, in `every` sweep or those of all stages.

        `ran` are the probes that it ran before.
        """
        assert worker.shapes is not None, "open comes first"
        reduced = stages.read_manifest(directory).precision != "float32"
        sweeps = self.plan.of(reduced, worker.shapes, every)
        missing = [probe for probe in sweeps if probe.name not in self._reference]
        self._reference.update(self._run(reference, missing, timeout)[0])
        vectors, finite = self._run(worker, sweeps, timeout)
        compared = row_differences.Comparer(row_differences.usual(self._reference[probe.name] for probe in sweeps))
        for probe in sweeps:
            compared.add(probe, vectors[probe.name], finite[probe.name], self._reference[probe.name])
        if reduced:
            suspects.settle(
                compared, self.spec, self.plan.seed,
                lambda probes: (self._run(worker, probes, timeout)[0], self._run(reference, probes, timeout)[0]),
            )  # fmt: skip
        tokens = sum(probe.compared.size for probe in sweeps)
        return compared.result(self.plan.seed, coverage.shares(self.spec, [*ran, *sweeps]), tokens)

    def _run(
        self, worker: Worker, sweeps: Sequence[Probe], timeout: float
    ) -> tuple[dict[str, dict[str, Array]], dict[str, bool]]:
        """Return a stage's vectors by probe and output, and whether every output of a probe was finite."""
        arrays = {
            f"{number}/{key}": array
            for number, probe in enumerate(sweeps)
            for key, array in {**probe.inputs, "compared": probe.compared}.items()
        }
        names = [{"name": probe.name, "padding": probe.padding} for probe in sweeps]
        finite, vectors = worker.exchange("cover", arrays, timeout, probes=names, seed=self.plan.seed)
        by_probe: dict[str, dict[str, Array]] = {probe.name: {} for probe in sweeps}
        for key, value in vectors.items():
            number, output = key.split("/", 1)
            by_probe[sweeps[int(number)].name][output] = value
        return by_probe, {probe.name: whole for probe, whole in zip(sweeps, finite, strict=True)}
