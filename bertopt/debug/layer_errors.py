"""The error of each layer: what it adds to the reference's values, and what has accumulated in the stage's own run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bertopt.checks.probes import Probe
from bertopt.debug.findings import DebugFindings, Row
from bertopt.debug.tensor_difference import differ, first_jump
from bertopt.debug.trace_points import Point, checkpoints
from bertopt.results import nan_as_inf

if TYPE_CHECKING:
    from bertopt.core import Array

#: Runs the stage on a probe with the points `given` replaced by the reference's; the points wanted, by index.
Runner = Callable[[Probe, Sequence[int], Mapping[int, "Array"]], Mapping[int, "Array"]]


@dataclass(frozen=True)
class AlignedTraces:
    """The reference's traces by probe, and how the stage is run beside them."""

    probes: Sequence[Probe]
    points: Sequence[Point]
    #: What the points are in the reference, by probe.
    reference: Mapping[str, Sequence[Array]]
    answers: Sequence[str]
    #: Points the stage has too, by index, and what it calls them.
    names: Mapping[int, str]
    #: Names to show for these points, where the tensor has several names.
    shown: Mapping[int, str]
    run: Runner
    token: Callable[[int], str | None]


def compare(traces: AlignedTraces, stage: str, form: str) -> DebugFindings:
    """Every layer, then every tensor inside the first whose error jumps."""
    shapes = [value.shape for value in traces.reference[traces.probes[0].name]]
    coarse = [(i, label) for i, label in checkpoints(traces.points, shapes, traces.answers) if i in traces.names]
    found = DebugFindings(
        stage=stage, form=form, probes=[probe.name for probe in traces.probes], layers=_rows(traces, coarse, [])
    )
    found.first_layer = first_jump(found.layers)
    if found.first_layer is None:
        return found
    at = found.layers.index(found.first_layer)
    after, until = (coarse[at - 1][0] if at else -1), coarse[at][0]
    inner = [(i, traces.points[i].label) for i in sorted(traces.names) if after < i <= until]
    found.tensors = _rows(traces, inner, [i for i, _ in coarse if i <= after])
    # Fed with the reference before every tensor, errors that only add up traces out nowhere: name the largest then.
    found.first_tensor = first_jump(found.tensors) or max(found.tensors, key=lambda row: nan_as_inf(row.own), default=None)
    return found


def _rows(traces: AlignedTraces, wanted: Sequence[tuple[int, str]], held: Sequence[int]) -> list[Row]:
    """A row for each point wanted, at the probe where it adds most. `held` points are fed, but not looked at."""
    indices = [index for index, _ in wanted]
    worst: dict[int, Row] = {}
    totals: dict[int, float] = dict.fromkeys(indices, 0.0)
    for probe in traces.probes:
        reference = traces.reference[probe.name]
        free = traces.run(probe, indices, {})
        given = {index: reference[index] for index in (*held, *indices)}
        fed = traces.run(probe, indices, given)
        for index, label in wanted:
            totals[index] = max(totals[index], differ(free[index], reference[index], probe).rel_l2, key=nan_as_inf)
            row = _row(traces, probe, index, label, fed[index], reference[index])
            if index not in worst or nan_as_inf(row.own) > nan_as_inf(worst[index].own):
                worst[index] = row
    rows = []
    before: float | None = None
    for index in indices:
        total = totals[index]
        growth = total / before if before else None
        rows.append(worst[index].model_copy(update={"total": total, "growth": growth}))
        before = total
    return rows


def _row(traces: AlignedTraces, probe: Probe, index: int, label: str, got: Array, reference: Array) -> Row:
    point = traces.points[index]
    difference = differ(got, reference, probe)
    token = difference.token
    text = traces.token(int(probe.inputs["input_ids"][difference.row, token])) if token is not None else None
    return Row(
        label=label, tensor=traces.shown[index], layer=point.layer, own=difference.rel_l2, total=0.0,
        max_abs=difference.max_abs, growth=None, peak=float(np.abs(reference).max(initial=0.0)), probe=probe.name,
        row=difference.row, token=token, token_text=text, element=difference.element,
    )  # fmt: skip
