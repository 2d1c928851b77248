"""Run the coverage sweeps of one model: on every stage as they are, on the reference each distinct row once, each in its worker."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bertopt import stages
from bertopt.checks import coverage, row_differences, suspects, sweep_plan
from bertopt.checks.framing import Frame
from bertopt.checks.probes import Probe
from bertopt.checks.reference_rows import ReferenceRows
from bertopt.core import Device, ShapeLimits, Spec
from bertopt.results.coverage import Coverage
from bertopt.runtime.batch_limits import most_tokens
from bertopt.workers import protocol
from bertopt.workers.client import Worker

if TYPE_CHECKING:
    from bertopt.core import Array

    #: Vectors by probe name and output, and whether all outputs of a probe were finite.
    Ran = tuple[dict[str, dict[str, Array]], dict[str, bool]]


class Sweeps:
    """The sweeps of one model, and the reference's vectors, computed when first needed."""

    def __init__(self, spec: Spec, reference: str, device: Device, by_row: bool = True, frame: Frame | None = None) -> None:
        """`by_row`: the reference is a checkpoint in float32, whose rows do not depend on their batch. `frame`: see `framing`."""
        # Each checkpoint has other rows and lengths, but always the same ones.
        seed = int(hashlib.sha256(reference.encode()).hexdigest()[:8], 16)
        self.spec, self.plan = spec, sweep_plan.plan(spec, seed, most_tokens(spec, device == "cuda"), frame)
        self.by_row, self._reference = by_row, ReferenceRows(spec)
        self._whole: dict[str, dict[str, Array]] = {}
        #: Results of the sweeps that every stage runs: the stage to deliver then runs only the others.
        self._early: dict[Path, Ran] = {}

    def measure(
        self, directory: Path, worker: Worker, reference: Worker, ran: Sequence[Probe], every: bool
    ) -> Coverage:
        """Compare the stage in `directory`, open in `worker`, with the reference, in `every` sweep or only those that all stages run.

        `ran` are the parity probes that it has run, which count in the shares.
        """
        assert worker.shapes is not None, "open comes first"
        reduced = stages.read_manifest(directory).precision != "float32"
        sweeps = self.plan.of(reduced, worker.shapes, every, worker.packed)
        expected = self._expected(reference, sweeps)
        before, finite_before = self._early.pop(directory, ({}, {})) if every else ({}, {})
        vectors, finite = self._run(worker, [probe for probe in sweeps if probe.name not in before])
        if not every:
            self._early[directory] = vectors, finite
        vectors, finite = before | vectors, finite_before | finite
        # In reduced precision one wrong score among many may be hidden by rounding; float32 has a limit of 1e-5 over all.
        scores = row_differences.score_units(expected.values(), self.spec) if reduced else None
        compared = row_differences.Comparer(row_differences.usual_sizes(expected.values(), self.spec.gives_numbers), scores)
        for probe in sweeps:
            compared.add(probe, vectors[probe.name], finite[probe.name], expected[probe.name])
        if reduced:
            suspects.settle(
                compared, self.spec, self.plan.seed,
                lambda probes: (self._run(worker, probes)[0], self._expected(reference, probes)),
                self.plan.frame,
            )  # fmt: skip
        tokens = sum(probe.compared.size for probe in sweeps)
        return compared.result(self.plan.seed, coverage.shares(self.spec, [*ran, *sweeps]), tokens)

    @contextlib.contextmanager
    def ahead(self, reference: Worker) -> Iterator[None]:
        """Run rows of the sweeps on the reference while the block runs, which must not be timed or use that worker.

        On one thread: builders mostly leave one core idle.
        """
        ended, errors = threading.Event(), list[BaseException]()

        def run() -> None:
            try:
                reference.call("torch_threads", threads=1)
                sweeps = self.plan.of(True, ShapeLimits(longest=self.spec.max_length))
                for rows in self._reference.missing(sweeps):
                    if ended.is_set():
                        return
                    self._reference.keep(rows, self._run(reference, [rows.probe])[0][rows.probe.name])
            except BaseException as error:  # raised below, in the thread that has a handler
                errors.append(error)

        thread = threading.Thread(target=run, name="bertopt-sweeps", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            if reference.alive:
                reference.call("torch_threads", threads=None)
        if errors:
            raise errors[0]

    def _expected(self, reference: Worker, sweeps: Sequence[Probe]) -> dict[str, dict[str, Array]]:
        """Return the reference's vectors by probe and output, each distinct row run once, or whole sweeps if rows depend on their batch."""
        if not self.by_row:
            self._whole.update(self._run(reference, [probe for probe in sweeps if probe.name not in self._whole])[0])
            return {probe.name: self._whole[probe.name] for probe in sweeps}
        missing = self._reference.missing(sweeps)
        found, _ = self._run(reference, [rows.probe for rows in missing])
        for rows in missing:
            self._reference.keep(rows, found[rows.probe.name])
        return {probe.name: self._reference.vectors(probe) for probe in sweeps}

    def _run(self, worker: Worker, sweeps: Sequence[Probe]) -> Ran:
        """Return a model's vectors by probe and output, and whether all outputs of a probe were finite."""
        arrays = protocol.numbered({**probe.inputs, "compared": probe.compared} for probe in sweeps)
        names = [{"name": probe.name, "padding": probe.padding} for probe in sweeps]
        finite, vectors = worker.exchange("cover", arrays, probes=names, seed=self.plan.seed)
        of_probe = protocol.by_number(vectors, len(sweeps))
        probes = [probe.name for probe in sweeps]
        return dict(zip(probes, of_probe, strict=True)), dict(zip(probes, finite, strict=True))
