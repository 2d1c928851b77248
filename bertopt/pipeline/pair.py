"""Measure two committed stages or artefacts side by side: the second against the first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bertopt import stages
from bertopt.checks.measurements import StageMeasurements
from bertopt.errors import UsageError
from bertopt.pipeline.examiner import Examiner
from bertopt.pipeline.measurement_plan import MeasurementPlan
from bertopt.pipeline.progress import ProgressCallback
from bertopt.pipeline.race import Budget
from bertopt.recipe.texts import Texts
from bertopt.workers.client import Workers

#: [B, S] where a manifest names none: a stage directory's.
SHAPES = ((1, 16), (8, 128))


def measure(
    workers: Workers, first: Path, second: Path, texts: Texts, shapes: Sequence[tuple[int, int]], records: Path,
    on_progress: ProgressCallback,
) -> tuple[StageMeasurements, StageMeasurements, Examiner]:
    """Return measurements of both, the second's against the first, and the examiner that can show its worst case.

    Raises UsageError where they are no models of one kind, Unsupported where this machine cannot open one.
    """
    ours, theirs = stages.read_manifest(first), stages.read_manifest(second)
    spec, other = ours.spec, theirs.spec
    if (spec.task, spec.inputs, spec.outputs, spec.embedding_size) != (other.task, other.inputs, other.outputs, other.embedding_size):
        raise UsageError(
            f"'{first}' is another kind of model ({spec.family}, {spec.task}, {', '.join(spec.inputs)}) than "
            f"'{second}' ({other.family}, {other.task}, {', '.join(other.inputs)}); compare models of one checkpoint"
        )
    if ours.device != theirs.device:
        raise UsageError(
            f"one is for {ours.device}, the other for {theirs.device}; compare models for one device"
        )
    texts.check_labels(spec)
    plan = MeasurementPlan.of(spec, shapes, texts, Budget())
    examiner = Examiner(workers, first.resolve(), theirs.device, plan, records, {}, on_progress)
    try:
        baseline = examiner.measure(name(ours), first.resolve(), None)
        return baseline, examiner.sweep(name(theirs), second.resolve(), first.resolve()), examiner
    finally:
        examiner.close()


def name(manifest: stages.Manifest) -> str:
    """The name of the stage that an artefact was made of, or of a stage itself."""
    return str(manifest.stage or manifest.name)


def shapes(manifest: stages.Manifest) -> list[tuple[int, int]]:
    """The [B, S] grid that an artefact was checked on."""
    recipe = manifest.recipe or {}
    return [(batch, sequence) for batch, sequence in recipe.get("inputs", {}).get("shapes", SHAPES)]
