"""Accuracy on labelled texts, with closed-form 95 % intervals. See `task_metrics` for the other metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from bertopt.results import Quality


def measure(mine: Sequence[bool], reference: Sequence[bool] | None) -> Quality:
    """Return accuracy and its change from the reference's on the same texts; None for the reference itself."""
    value = sum(mine) / len(mine)
    low, high = wilson(sum(mine), len(mine))
    alone = Quality(metric="accuracy", value=value, reference=value, change=0.0, n=len(mine), low=low, high=high)
    if reference is None:
        return alone
    base = sum(reference) / len(reference)
    change_low, change_high = paired(mine, reference)
    return alone.model_copy(
        update={"reference": base, "change": value - base, "change_low": change_low, "change_high": change_high}
    )


def wilson(successes: int, n: int) -> tuple[float, float]:
    """Return the 95 % score interval of a proportion (Wilson 1927): never empty, never beyond 0 and 1."""
    from scipy.stats import binomtest

    found = binomtest(successes, n).proportion_ci(0.95, "wilson")
    # Rounding could leave 0 or 1 itself outside.
    return min(successes / n, float(found.low)), max(successes / n, float(found.high))


def paired(mine: Sequence[bool], reference: Sequence[bool]) -> tuple[float, float]:
    """Return the 95 % interval of the difference of two accuracies on the same texts.

    Newcombe's hybrid score interval for paired data (1998, method 10). Unlike a bootstrap's it has a width where no answer differs, which
    proves little with few texts.
    """
    a, b = np.asarray(mine, bool), np.asarray(reference, bool)
    n = len(a)
    if len(b) != n:
        raise ValueError(f"expected one output of the reference for each of {n} texts; got {len(b)}")
    p1, p2 = float(a.mean()), float(b.mean())
    (l1, u1), (l2, u2) = wilson(int(a.sum()), n), wilson(int(b.sum()), n)
    both, neither = int((a & b).sum()), int((~a & ~b).sum())
    only, other = int((a & ~b).sum()), int((~a & b).sum())
    spread = math.sqrt((both + only) * (other + neither) * (both + other) * (only + neither))
    agreement = float(both * neither - only * other)
    if agreement > 0:
        agreement = max(0.0, agreement - n / 2)
    phi = agreement / spread if spread else 0.0
    change = p1 - p2
    below = (p1 - l1) ** 2 - 2 * phi * (p1 - l1) * (u2 - p2) + (u2 - p2) ** 2
    above = (p2 - l2) ** 2 - 2 * phi * (p2 - l2) * (u1 - p1) + (u1 - p1) ** 2
    return change - math.sqrt(max(0.0, below)), change + math.sqrt(max(0.0, above))
