"""Two committed stages or artefacts examined side by side: the second against the first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bertopt import stages
from bertopt.core import Spec
from bertopt.errors import UsageError
from bertopt.pipeline.examiner import Examiner
from bertopt.pipeline.race import Budget
from bertopt.recipe.texts import Texts
from bertopt.results import Limits, Stage
from bertopt.workers.client import Workers

#: [B, S] where a manifest names none: a stage directory's.
SHAPES = ((1, 16), (8, 128))


def examine(
    workers: Workers, first: Path, second: Path, texts: Texts, shapes: Sequence[tuple[int, int]], limits: Limits,
    records: Path,
) -> tuple[Stage, Stage]:  # fmt: skip
    """Rows of both: parity of the second against the first, and an interleaved race of the two.

    Raises UsageError where they are no models of one kind, Unsupported where this machine cannot open one.
    """
    ours, theirs = stages.read_manifest(first), stages.read_manifest(second)
    spec, other = Spec.model_validate(ours["spec"]), Spec.model_validate(theirs["spec"])
    if (spec.task, spec.inputs, spec.outputs, spec.hidden) != (other.task, other.inputs, other.outputs, other.hidden):
        raise UsageError(
            f"'{first}' is another kind of model ({spec.family}, {spec.task}, {', '.join(spec.inputs)}) than "
            f"'{second}' ({other.family}, {other.task}, {', '.join(other.inputs)}); compare models of one checkpoint"
        )
    if ours["device"] != theirs["device"]:
        raise UsageError(
            f"one is for {ours['device']}, the other for {theirs['device']}; compare models for one device"
        )
    texts.check_labels(spec)
    examiner = Examiner(workers, first.resolve(), spec, theirs["device"], shapes, texts, records, {}, Budget(), lambda _: None)
    rows = _row(0, ours), _row(1, theirs)
    try:
        examiner.examine(rows[0], first.resolve(), None, Limits(), None)
        if first.resolve() != second.resolve():
            examiner.examine(rows[1], second.resolve(), first.resolve(), limits, None)
    finally:
        examiner.close()
    return rows


def shapes(manifest: Mapping[str, Any]) -> list[tuple[int, int]]:
    """The [B, S] grid that an artefact was checked on."""
    recipe = manifest.get("recipe") or {}
    return [(batch, sequence) for batch, sequence in recipe.get("inputs", {}).get("shapes", SHAPES)]


def _row(index: int, manifest: Mapping[str, Any]) -> Stage:
    return Stage(
        index=index, name=manifest.get("stage") or manifest["name"], status="ok", form=manifest["form"],
        precision=manifest["precision"], size_bytes=stages.size_bytes(dict(manifest)),
    )  # fmt: skip
