"""Tell faults from unlucky rounding: what stands out in reduced precision is run again with other ids.

In INT8 the error of a row of few random ids has a long tail: right forms of a classifier had rows 5.5 to 6.6 times the median off. A
wrong embedding is wrong beside any others, and so each id of such a short row is run again. A batch size, a length or a row that is
wrong is wrong whatever its ids, and so a batch with such a row is run again with others; its own ids stand in short rows as well.
What is no longer seen: a fault of reduced precision that needs one pair of ids, or that hits less than every second time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from bertopt.checks import coverage, near_copies, sweep_plan
from bertopt.checks.framing import Frame
from bertopt.checks.probes import Probe
from bertopt.checks.row_differences import Comparer
from bertopt.checks.sweep_plan import ID_LENGTH, ID_ROWS, SHORT_ROWS, WHOLE
from bertopt.core import Spec

if TYPE_CHECKING:
    from bertopt.core import Array

    Vectors = Mapping[str, Mapping[str, Array]]
    #: Run probes on the stage and on the reference; return the vectors of each by probe and output.
    RunBoth = Callable[[Sequence[Probe]], tuple[Vectors, Vectors]]

#: Most rows that are run again; beyond, rows stand out that need no second look.
MOST = 64
#: Most batches that are run again.
MOST_BATCHES = 8
#: Rows in which each id is run again, or times a batch is, and whose median counts.
TIMES = 5


def settle(compared: Comparer, spec: Spec, seed: int, run: RunBoth, frame: Frame | None = None) -> None:
    """Replace the errors of suspect rows by what running them again with other ids gives, in batches within the same `frame`."""
    rng = np.random.default_rng([seed, 20])
    # Both are chosen before either changes the median.
    rows, batches = _standing_out(compared, ("ids", SHORT_ROWS)), _standing_out(compared, WHOLE)
    if rows:
        _settle_ids(compared, rows[:MOST], spec, rng, run)
    if batches:
        _settle_batches(compared, batches, spec, rng, run, frame)


def _settle_ids(compared: Comparer, rows: Sequence[tuple[Probe, int]], spec: Spec, rng: np.random.Generator, run: RunBoth) -> None:
    """Replace the error of each short row by that of its worst id: the median over `TIMES` rows beside other ids."""
    ids = [probe.inputs["input_ids"][row][probe.inputs["attention_mask"][row] == 1] for probe, row in rows]
    repeated = np.repeat(np.concatenate(ids), TIMES)
    beside = spec.random_ids((len(repeated), min(ID_LENGTH, spec.max_length)), rng)
    beside[np.arange(len(beside)), rng.integers(beside.shape[1], size=len(beside))] = repeated
    parts = np.array_split(beside, -(-len(beside) // ID_ROWS))  # none of one row, of which some sessions give fewer outputs
    probes = [sweep_plan.make_probe(spec, "suspects", i, np.ones_like(part), part.ravel(), rng) for i, part in enumerate(parts)]
    got, reference = run(probes)
    of = np.repeat(np.arange(len(rows)), [len(each) for each in ids])
    for name, errors in compared.errors.items():
        again = np.concatenate([compared.row_errors(probe, got[probe.name], reference[probe.name], name) for probe in probes])
        worst = np.zeros(len(rows))
        np.maximum.at(worst, of, np.median(again.reshape(-1, TIMES), axis=1))
        for (probe, row), error in zip(rows, worst, strict=True):
            if probe.name in errors:
                errors[probe.name][row] = error


def _settle_batches(
    compared: Comparer, rows: Sequence[tuple[Probe, int]], spec: Spec, rng: np.random.Generator, run: RunBoth, frame: Frame | None = None
) -> None:
    """Replace the error of each row by its median over `TIMES` runs of its batch, and of what is run before it: the same lengths, pairs,
    copies and row, other ids."""
    batches = {probe.name: probe for probe, _ in rows}
    for probe in list(batches.values())[:MOST_BATCHES]:
        others = [_other_ids(spec, rng, frame or ()) for _ in range(TIMES)]
        runs = [near_copies.again(probe, other) for other in others]
        asked = [replace(each, name=f"{each.name}, again {time}") for time, each in enumerate(chain(*runs))]
        again = asked[len(probe.before) :: len(probe.before) + 1]
        got, reference = run(asked)
        of_batch = [row for other, row in rows if other.name == probe.name]
        for name, errors in compared.errors.items():
            if probe.name in errors:
                every = [compared.row_errors(each, got[each.name], reference[each.name], name) for each in again]
                errors[probe.name][of_batch] = np.median(every, axis=0)[of_batch]


def _other_ids(spec: Spec, rng: np.random.Generator, kept: Sequence[int] = ()) -> Array:
    """Return another id for each id [V], never the padding's; the same for those `kept`. Ids that are equal stay equal: tokens that
    stand twice, and rows."""
    other = np.arange(max(spec.vocabulary, spec.pad_id + 1))
    ids = np.flatnonzero(~np.isin(other, (spec.pad_id, *kept)))[: spec.vocabulary]
    other[ids], other[spec.pad_id] = rng.permutation(ids), rng.choice(ids)
    return other


def _standing_out(compared: Comparer, paddings: Sequence[str]) -> list[tuple[Probe, int]]:
    """Return the rows, worst first, that differ by more than any row may whose limits say nothing: probe and row. The worst by what their
    figure allows: the largest of many scores is further off than a row."""
    found = list[tuple[float, str, int]]()
    for output, errors in compared.errors.items():
        most = coverage.allowed_row(float(np.median(np.concatenate(list(errors.values())))), 0.0, compared.one_number(output))
        for name, of_rows in errors.items():
            if compared.probes[name].padding in paddings:
                found += [(float(of_rows[row]) / max(most, 1e-12), name, int(row)) for row in np.flatnonzero(of_rows > most)]
    places = dict.fromkeys((name, row) for _, name, row in sorted(found, reverse=True))
    return [(compared.probes[name], row) for name, row in places]
