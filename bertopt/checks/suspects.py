"""Tell wrong ids from unlucky rounding: the ids of short rows that stand out are run again, each beside other ids.

In INT8 the error of a row of 4 random ids has a long tail: right forms of a classifier had rows 5.5 to 6.6 times the median off. A
wrong embedding is wrong beside any others. What is no longer seen: a fault of reduced precision that needs one pair of ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from bertopt.checks import coverage
from bertopt.checks.coverage import ID_LENGTH, ID_ROWS, SHORT_ROWS, Comparer
from bertopt.checks.probes import Probe
from bertopt.core import Spec

if TYPE_CHECKING:
    from bertopt.core import Array

    Vectors = Mapping[str, Mapping[str, Array]]
    #: Run probes on the stage and on the reference; return the vectors of each by probe and output.
    RunBoth = Callable[[Sequence[Probe]], tuple[Vectors, Vectors]]

#: Most rows that are run again; beyond, rows stand out that need no second look.
MOST = 64
#: Rows in which each id is run again, and whose median counts.
TIMES = 5


def settle(compared: Comparer, spec: Spec, seed: int, run: RunBoth) -> None:
    """Replace the error of each suspect row by that of its worst id: the median over `TIMES` rows beside other ids."""
    rows = _standing_out(compared)
    if not rows:
        return
    rng = np.random.default_rng([seed, 20])
    ids = [probe.inputs["input_ids"][row][probe.inputs["attention_mask"][row] == 1] for probe, row in rows]
    repeated = np.repeat(np.concatenate(ids), TIMES)
    beside = rng.integers(0, spec.vocabulary - (spec.pad_id < spec.vocabulary), (len(repeated), min(ID_LENGTH, spec.max_length)))
    beside += beside >= spec.pad_id
    beside[np.arange(len(beside)), rng.integers(beside.shape[1], size=len(beside))] = repeated
    parts = [beside[start : start + ID_ROWS] for start in range(0, len(beside), ID_ROWS)]
    probes = [coverage.make_probe(spec, "suspects", i, np.ones_like(part), part.ravel(), rng) for i, part in enumerate(parts)]
    got, reference = run(probes)
    of = np.repeat(np.arange(len(rows)), [len(each) for each in ids])
    for name in compared.errors:
        again = np.concatenate([compared.rows(probe, got[probe.name][name], reference[probe.name][name], name) for probe in probes])
        worst = np.zeros(len(rows))
        np.maximum.at(worst, of, np.median(again.reshape(-1, TIMES), axis=1))
        for (probe, row), error in zip(rows, worst, strict=True):
            number = next(i for i, one in enumerate(compared.probes[name]) if one is probe)
            compared.errors[name][number][row] = error


def _standing_out(compared: Comparer) -> list[tuple[Probe, int]]:
    """Return the short rows, at most `MOST`, that differ by more than any row may whose limits say nothing."""
    found = list[tuple[float, int, int]]()
    probes: Sequence[Probe] = ()
    for name, errors in compared.errors.items():
        probes = compared.probes[name]
        most = coverage.allowed_row(float(np.median(np.concatenate(errors))), 0.0)
        for number, (probe, of_rows) in enumerate(zip(probes, errors, strict=True)):
            if probe.padding in ("ids", SHORT_ROWS):
                found += [(float(of_rows[row]), number, int(row)) for row in np.flatnonzero(of_rows > most)]
    places = dict.fromkeys((number, row) for _, number, row in sorted(found, reverse=True))
    return [(probes[number], row) for number, row in list(places)[:MOST]]
