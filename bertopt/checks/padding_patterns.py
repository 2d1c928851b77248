"""Rows padded on the left or with holes in their mask, which texts never give but callers with their own arrays do.

In reduced precision their errors are compared with those of right-padded rows, since rounding costs both about the same; the cosine limit
alone let pass logits that were read from the wrong columns and differed by a quarter. In float32 the limits of parity hold for all rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from bertopt.checks.coverage import LARGER, NEAR, Held
from bertopt.checks.probes import Probe, inputs_of, mask_of, probe_of
from bertopt.core import Spec
from bertopt.results import Case, Failure, Limits, nan_max

#: Tokens of each row.
LENGTH = 16
#: The patterns that serve as the standard, and those that are compared with them, with their names in messages.
USUAL, PATTERNS = ("none", "right"), {"left": "padding on the left", "holes": "holes in their mask"}
#: The same, for the tokens beside it.
BESIDE = {"right": "padding on the right", "left": "padding on the left", "holes": "holes in the mask"}
#: Fewest vectors of a pattern: few vary too much. (ModernBERT's left-padded rows are compared only where they are whole.)
FEWEST = 16


def probes(spec: Spec, batch: int, seed: int = 0) -> Iterator[Probe]:
    """Yield a batch [batch, S] of each pattern in which every row has padding."""
    shape = (batch, min(LENGTH, spec.max_length))
    for padding in ("right", *PATTERNS):
        rng = np.random.default_rng([seed, *shape, 26])
        mask = mask_of(padding, *shape, rng)
        if mask is None or shape[1] < 3:
            continue
        # Rows of one valid token keep it.
        mask[:, {"right": shape[1] - 1, "left": 0, "holes": shape[1] // 2}[padding]] = 0
        yield probe_of(spec, padding, inputs_of(spec, mask, padding, rng), f"{shape[0]} × {shape[1]}, {padding}, no row is whole")


def held(cases: Sequence[Case], limits: Limits) -> Iterator[Held]:
    """Yield how far rows of each pattern, and the tokens beside padding, differ in reduced precision, with the limit; nothing where a recipe
    limits `rel_l2` of all rows."""
    usual = _typical(cases, USUAL)
    if limits.rel_l2 is not None or usual is None:
        return
    found = [(f"rows with {what}", _typical(cases, (padding,))) for padding, what in PATTERNS.items()]
    found += [(f"tokens beside {what}", _beside(cases, padding)) for padding, what in BESIDE.items()]
    for what, value in found:
        if value is not None:
            text = f"{what} may differ by {LARGER:g} times as much as others, {usual:.3g}, or by {NEAR:g}; got {value:.4g}"
            yield Held(what, value, max(LARGER * usual, NEAR), text)


def failures(cases: Sequence[Case], limits: Limits) -> list[Failure]:
    """Return a failure for each pattern that misses its limit in `held`."""
    return [Failure.of_figure("coverage", "rel_l2", each.value, each.text) for each in held(cases, limits) if not each.value <= each.limit]


def _typical(cases: Sequence[Case], paddings: Sequence[str]) -> float | None:
    """Return the median relative difference of all vectors of these patterns; None below `FEWEST` vectors, NaN where one is NaN."""
    some = [case for case in cases if case.padding in paddings and case.compared]
    values = np.repeat([case.rel_l2 for case in some], [case.compared for case in some])
    return float(np.median(values)) if len(values) >= FEWEST else None


def _beside(cases: Sequence[Case], padding: str) -> float | None:
    """Return the largest difference of tokens beside padding in batches of this pattern; None where none was measured."""
    found = [case.beside_padding for case in cases if case.padding == padding and case.beside_padding is not None]
    return nan_max(found) if found else None
