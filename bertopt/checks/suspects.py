"""Distinguish faults from unlucky rounding: rows that stand out in reduced precision are run again with other ids.

In INT8 the errors of rows of few random ids have a long tail: correct forms of a classifier had rows 5.5 to 6.6 times the median. A wrong
embedding is wrong next to any other ids, so each id of such a short row is run again among other ids. A wrong batch size, length or
row is wrong whatever the ids, so a batch with such a row is run again with other ids; the original ids are in short rows too.
Not seen: a fault of reduced precision that needs one particular pair of ids, or that occurs in fewer than half of the runs.
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

#: Most rows that are run again: if more stand out, the rest of them fail without a second run.
MOST = 64
#: Most batches that are run again.
MOST_BATCHES = 8
#: How many times each id or batch is run again; the median counts.
TIMES = 5


def settle(compared: Comparer, spec: Spec, seed: int, run: RunBoth, frame: Frame | None = None) -> None:
    """Replace the errors of rows that stand out by those of running them again with other ids between the same special tokens (`frame`)."""
    rng = np.random.default_rng([seed, 20])
    # Both are chosen before either changes the median.
    rows, batches = _standing_out(compared, ("ids", SHORT_ROWS)), _standing_out(compared, WHOLE)
    if rows:
        _settle_ids(compared, rows[:MOST], spec, rng, run)
    if batches:
        _settle_batches(compared, batches, spec, rng, run, frame)


def _settle_ids(compared: Comparer, rows: Sequence[tuple[Probe, int]], spec: Spec, rng: np.random.Generator, run: RunBoth) -> None:
    """Replace the error of each short row by that of its worst id: the median over `TIMES` rows with other ids."""
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
    """Replace the error of each row by its median over `TIMES` runs of its batch and the probes before it, with the same lengths, pairs and
    copies but other ids."""
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
    """Return another id for each id [V], never the padding's; those `kept` stay. It is a permutation, so that equal tokens and rows stay equal."""
    other = np.arange(max(spec.vocabulary, spec.pad_id + 1))
    ids = np.flatnonzero(~np.isin(other, (spec.pad_id, *kept)))[: spec.vocabulary]
    other[ids], other[spec.pad_id] = rng.permutation(ids), rng.choice(ids)
    return other


def _standing_out(compared: Comparer, paddings: Sequence[str]) -> list[tuple[Probe, int]]:
    """Return probe and row of all rows whose error is beyond what `coverage.allowed_row` allows without a limit, the worst first. Errors are
    divided by what each figure allows, since the largest error of many scores exceeds that of a whole row."""
    found = list[tuple[float, str, int]]()
    for output, errors in compared.errors.items():
        most = coverage.allowed_row(float(np.median(np.concatenate(list(errors.values())))), 0.0, compared.one_number(output))
        for name, of_rows in errors.items():
            if compared.probes[name].padding in paddings:
                found += [(float(of_rows[row]) / max(most, 1e-12), name, int(row)) for row in np.flatnonzero(of_rows > most)]
    places = dict.fromkeys((name, row) for _, name, row in sorted(found, reverse=True))
    return [(compared.probes[name], row) for name, row in places]
