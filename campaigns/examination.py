"""Build the stages of a recipe once and examine each with the probes of several seeds and texts of several draws, untimed.

A run measures one seed and one choice of texts. Here each stage is opened once: probes of all seeds, sweeps and texts go through
the same checks, and every pair of a seed and a draw is judged by itself, with the limits that a run would take. What is not looked
at: timing and outputs under the clock, delivery, and accuracy on labelled texts.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bertopt import stages
from bertopt.checks import coverage, gates, padding_patterns, probes
from bertopt.checks.framing import Frame
from bertopt.checks.measurements import StageMeasurements
from bertopt.checks.probes import Probe
from bertopt.core import Spec
from bertopt.errors import BertoptError, Unsupported
from bertopt.pipeline.examiner import Examiner
from bertopt.pipeline.measurement_plan import OWN_TEXTS, MeasurementPlan
from bertopt.pipeline.race import Budget
from bertopt.pipeline.store import Store
from bertopt.pipeline.sweeps import Sweeps
from bertopt.pipeline.twins import Twins
from bertopt.recipe import parser
from bertopt.recipe.parser import Recipe, Step
from bertopt.recipe.steps import REFERENCE
from bertopt.recipe.texts import Texts
from bertopt.results import Limits
from bertopt.results.coverage import Coverage
from bertopt.results.fidelity import Rounding
from bertopt.runtime.batch_limits import MAX_BATCH
from bertopt.spec import Text
from bertopt.workers.client import Worker, Workers


@dataclass(frozen=True)
class StageVerdict:
    """What became of one stage: by number of the pair of a seed and a draw, why it was refused."""

    name: str
    precision: str
    pairs: int
    refused: dict[int, str]
    worst: dict[str, float]
    """The largest of each figure of `Rounding` over the draws."""
    note: str | None = None
    """Why it was not examined."""


class _SeededSweeps(Sweeps):
    """Sweeps of several seeds over one stage; those of all but the first are kept in `found`."""

    def __init__(self, spec: Spec, reference: str, seeds: int, frame: Frame | None) -> None:
        super().__init__(spec, reference, "cpu", frame=frame)
        self._others = [Sweeps(spec, f"{reference} {seed}", "cpu", frame=frame) for seed in range(1, seeds)]
        self.found: list[Coverage] = []

    def measure(
        self, directory: Path, worker: Worker, reference: Worker, ran: Sequence[Probe], every: bool
    ) -> Coverage:
        """Run every sweep over each stage, as each may be the one to deliver."""
        first = super().measure(directory, worker, reference, ran, every=True)
        self.found = [first, *(other.measure(directory, worker, reference, [], every=True) for other in self._others)]
        return first


class _Examiner(Examiner):
    """An examiner whose probes carry the number of their seed or draw."""

    def prepare(self, shapes: Sequence[tuple[int, int]], seeds: int, sweeps: int, draws: Sequence[Sequence[str]]) -> None:
        spec = self.spec
        self.random = [
            [
                _named(probe, f"seed {seed}: ")
                for probe in (*probes.grid(spec, shapes, None, seed), *probes.serving(spec, MAX_BATCH, seed), *padding_patterns.probes(spec, MAX_BATCH, seed))
            ]
            for seed in range(seeds)
        ]
        built_in = self._of_texts("built-in: ", probes.built_in_texts())
        self.drawn = [
            [*built_in, *self._of_texts(f"draw {number}: ", texts[:OWN_TEXTS])] for number, texts in enumerate(draws)
        ] or [built_in]
        every = [probe for some in (*self.random, *self.drawn) for probe in some]
        self.probes = list({probe.name: probe for probe in every}.values())
        frame = self.sweeps.plan.frame
        # New ones: what spans may be of is kept by the probe's name.
        self.twins = Twins(self.workers, self.reference, self.device, spec, self._encode, self.probes, self.on_progress, frame)
        self.sweeps: _SeededSweeps = _SeededSweeps(spec, self.reference.name, sweeps, frame)
        self.roundings: list[Rounding | None] = []
        own = draws[0][:OWN_TEXTS] if draws else ()
        texts: list[str] = [*own, *probes.built_in_texts()]
        every_text: list[Text] = [*texts, *probes.pairs(spec, texts)]
        self.alone = [inputs for text in every_text for inputs in self._encode([text])]
        first = len(texts) if spec.task == "question-answering" else 0
        self.end_to_end.texts = probes.of_all_lengths(every_text[first:], [inputs["input_ids"].shape[1] for inputs in self.alone[first:]])

    def _of_texts(self, tag: str, of: Sequence[str]) -> list[Probe]:
        pairs, mask = probes.pairs(self.spec, of), None
        if self.spec.task == "fill-mask":
            word, mask = self.tokenizer.mask()
            of = probes.masked(of, word)
        found = [*probes.texts(self.spec, self._encode, of, mask_id=mask), *(probes.texts(self.spec, self._encode, pairs, "pair") if pairs else [])]
        return [_named(probe, tag) for probe in found]

    def _rounding(self, name: str, directory: Path, parent: Path) -> Rounding | None:
        every = self.probes
        try:
            self.roundings = []
            for drawn in self.drawn:
                self.probes = drawn
                self.roundings.append(super()._rounding(name, directory, parent))
        finally:
            self.probes = every
        return self.roundings[0]

    def verdict(self, step: Step, recipe: Recipe, measured: StageMeasurements, directory: Path) -> StageVerdict:
        """Judge one stage for every pair of a seed and a draw."""
        manifest = stages.read_manifest(directory)
        precision = gates.judged_precision(manifest.precision, measured.proven)
        limits = gates.effective_limits(precision, step.limits, recipe.limits.get(precision, Limits()), peak=measured.peak, sparse=manifest.spec.sparse)
        pairs = max(len(self.random), len(self.drawn))
        refused = {}
        for pair in range(pairs):
            seed, draw = pair % len(self.random), pair % len(self.drawn)
            names = {probe.name for probe in (*self.random[seed], *self.drawn[draw])}
            first = measured.coverage
            assert first is not None
            covered = self.sweeps.found[pair % len(self.sweeps.found)]
            whole = {name: output for name, output in first.outputs.items() if name not in covered.outputs}
            part = measured.model_copy(update={
                "cases": [case for case in measured.cases if case.probe in names],
                "coverage": covered.model_copy(update={"outputs": {**covered.outputs, **whole}}),
                "rounding": self.roundings[draw] if self.roundings else None,
            })  # fmt: skip
            outcome = gates.judge(
                step.name, part, limits, changes=manifest.changes, today=datetime.date.today(), allow_noop=step.allow_noop
            )
            if outcome.status != "ok":
                refused[pair] = outcome.reason or outcome.status
        worst = _worst(self.roundings)
        if precision != "float32":
            worst |= _worst_of_sweeps(self.sweeps.found, [one.error for one in self.roundings if one is not None])
        return StageVerdict(step.name, precision, pairs, refused, worst)


def _worst(roundings: Sequence[Rounding | None]) -> dict[str, float]:
    """The largest of each figure."""
    figures = [one.model_dump(exclude={"vectors", "error"}) for one in roundings if one is not None]
    known = {key: [one[key] for one in figures if one[key] is not None] for key in (figures[0] if figures else ())}
    return {key: round(max(values), 3) for key, values in known.items() if values}


def _worst_of_sweeps(found: Sequence[Coverage], text_errors: Sequence[float]) -> dict[str, float]:
    """The largest of each figure of the sweeps in reduced precision, in units of what its limit is a multiple of."""
    swept = [output for coverage_of in found for output in coverage_of.outputs.values()]
    single = [output for coverage_of in found for name, output in coverage_of.outputs.items() if name != coverage.END_TO_END and output.median > 0]
    text_error = max(min(text_errors, default=math.inf), coverage.NEAR / coverage.TEXT_ERRORS)
    figures = {
        # One row, relative to the most that the median alone would allow it.
        "row": [output.worst / coverage.allowed_row(output.median, 0.0, output.one_number) for output in single],
        "median": [output.median / text_error for output in swept],
        "p90": [output.p90 / max(output.median, coverage.NEAR / coverage.SPREAD) for output in swept if output.p90 is not None],
        "lengths": [max(output.lengths.values()) / max(output.median, coverage.NEAR / coverage.LARGER) for output in swept if output.lengths],
        "padded": [
            output.padded_rows / (max(output.short_rows, coverage.NEAR / coverage.PADDED) * (coverage.ONE_NUMBER if output.one_number else 1))
            for output in swept
            if output.padded_rows is not None and output.short_rows is not None
        ],
        "large_batches": [output.large_batches / output.small_batches for output in swept if output.large_batches and output.small_batches],
    }
    return {name: round(max(values), 3) for name, values in figures.items() if values}


def examine(
    recipe: Mapping[str, Any], out: Path, workers: Workers, seeds: int, sweeps: int, draws: Sequence[Sequence[str]] = (),
    only: Collection[str] = (),
) -> Iterator[StageVerdict]:  # fmt: skip
    """Build and examine every step of `recipe` that this machine can, or those in `only` and build the rest; yield verdicts as they come.

    `seeds` are of random probes, `sweeps` of coverage sweeps, which cost most of a real model's time.
    """
    read = parser.from_dict(dict(recipe))
    build_texts = Texts(tuple(draws[0]), source="draw 0") if draws else Texts(tuple(probes.built_in_texts()))
    with Store(out, False, lambda _: None) as store:
        with workers.start() as worker:
            reference = store.reference(worker, read.model, read.task, read.revision, "cpu")
        # No shapes and no texts to time.
        plan = MeasurementPlan(reference.manifest.spec, (), Texts(("a",)), (), Budget())
        examiner = _Examiner(workers, reference.path, "cpu", plan, out / "none", {}, lambda _: None)
        try:
            shapes = [shape for shape in read.inputs.shapes if shape[1] <= reference.manifest.spec.max_length]
            examiner.prepare(shapes, seeds, sweeps, draws)
            done = {REFERENCE: reference.path}
            for step in read.steps:
                parent = done.get(step.after or REFERENCE)
                if parent is None:
                    yield StageVerdict(step.name, "", 0, {}, {}, "its parent was not built")
                    continue
                try:
                    with workers.start() as worker:
                        stage = store.build(worker, step, parent, "cpu", read.inputs.shapes, build_texts)
                    done[step.name] = stage.path
                    if only and step.name not in only:
                        continue
                    examiner.roundings = []
                    measured = examiner._measure(step.name, stage.path, parent)
                except Unsupported as error:
                    taken, given = step.pass_.forms()
                    if taken is given:
                        # What others do without, such as use_sdpa: those behind it start from its parent.
                        done.setdefault(step.name, parent)
                    yield StageVerdict(step.name, "", 0, {}, {}, str(error))
                    continue
                except BertoptError as error:
                    yield StageVerdict(step.name, "", 1, {0: f"{type(error).__name__}: {error}"}, {})
                    continue
                yield examiner.verdict(step, read, measured, stage.path)
        finally:
            examiner.close()


def _named(probe: Probe, tag: str) -> Probe:
    return replace(probe, name=tag + probe.name)
