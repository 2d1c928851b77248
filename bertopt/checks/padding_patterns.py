"""Rows with padding on the left and with holes, which no text has: callers with arrays of their own send them.

In reduced precision they are held to the rows that are padded as texts are: rounding costs them about as much, and the cosine limit let
logits differ by a quarter that were read from the wrong columns. In float32 the limits of parity hold for all rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from bertopt.checks.coverage import LARGER, NEAR, Held
from bertopt.checks.probes import Probe, inputs_of, mask_of, probe_of
from bertopt.core import Spec
from bertopt.results import Case, Failure, Limits

#: Tokens of each row.
LENGTH = 16
#: What rows without text are held to, and what they are called.
USUAL, PATTERNS = ("none", "right"), {"left": "padding on the left", "holes": "holes in their mask"}
#: Vectors of a pattern that it takes: of ModernBERT's rows with padding on the left only whole ones have an answer, and single ones vary.
FEWEST = 16


def probes(spec: Spec, batch: int, seed: int = 0) -> Iterator[Probe]:
    """Yield batches [batch, S] of each pattern of which no row is whole: the number of tokens is not the last one's place."""
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
    """What rows of each pattern may differ by in reduced precision, where a recipe does not state `rel_l2` for all rows."""
    usual = _typical(cases, USUAL)
    if limits.rel_l2 is not None or usual is None:
        return
    allowed = max(LARGER * usual, NEAR)
    for padding, what in PATTERNS.items():
        if (value := _typical(cases, (padding,))) is not None:
            text = f"rows with {what} may differ by {LARGER:g} times as much as others, {usual:.3g}, or by {NEAR:g}; got {value:.4g}"
            yield Held(f"rows with {what}", value, allowed, text)


def failures(cases: Sequence[Case], limits: Limits) -> list[Failure]:
    """Return the patterns that miss what is `held` of them."""
    return [Failure.of_figure("coverage", "rel_l2", each.value, each.text) for each in held(cases, limits) if not each.value <= each.limit]


def _typical(cases: Sequence[Case], paddings: Sequence[str]) -> float | None:
    """Return the median relative difference of what was compared of these patterns; None of fewer vectors than `FEWEST`, NaN where one is."""
    some = [case for case in cases if case.padding in paddings and case.compared]
    values = np.repeat([case.rel_l2 for case in some], [case.compared for case in some])
    return float(np.median(values)) if len(values) >= FEWEST else None
