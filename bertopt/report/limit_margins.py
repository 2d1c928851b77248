"""The figures of a stage that have limits, as distances from the perfect value, for a logarithmic scale."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from bertopt.report import formatting
from bertopt.results import TIMED, Parity, Stage, nan_max, nan_min


@dataclass(frozen=True)
class Mark:
    """One figure that has a limit, as a distance: 0 is perfect, so that a cosine is drawn as 1 − cosine."""

    metric: str
    value: float
    limit: float | None
    held: bool

    @property
    def room(self) -> str:
        if self.limit is None:
            return "no limit"
        if self.held:
            return f"{formatting.times(self.limit / self.value)} room" if self.value > 0 and self.limit else "exact"
        return f"{formatting.times(self.value / self.limit)} over" if 0 < self.value < math.inf and self.limit else "over"


#: What each figure of `Rounding` says.
_ROUNDING = {
    "error_ratio": "mean error on real texts", "worst_ratio": "largest error of one text or token", "parent_ratio": "mean difference from the parent",
    "slope_error": "error of the outputs' scale", "bias": "largest mean shift of a class or dimension",
    "column_ratio": "largest deviation of the errors of a class or dimension",
    "flip_margin": "largest margin of a label that changed", "rank_ratio": "loss of rank correlation",
}  # fmt: skip
#: Figures that are shown for a stage without limits.
_COMPARED = ("max_abs", "rel_l2", "1 − cosine_min")


def rounding(stage: Stage) -> list[tuple[str, str, float, float | None]]:
    """Name, meaning, value and limit of each figure of reduced precision that was measured."""
    if stage.rounding is None or stage.parity is None:
        return []
    found = [(name, what, getattr(stage.rounding, name)) for name, what in _ROUNDING.items()]
    return [(name, what, value, getattr(stage.parity.limits, f"{name}_max")) for name, what, value in found if value is not None]


def marks(stage: Stage) -> list[Mark]:
    """Every figure of a stage that has a limit; without any limit, what was compared."""
    if stage.parity is None or not stage.parity.cases:
        return []
    found = list(_measured(stage, stage.parity))
    return [mark for mark in found if mark.limit is not None] or [mark for mark in found if mark.metric in _COMPARED]


def _measured(stage: Stage, parity: Parity) -> Iterator[Mark]:
    """A mark for each figure of a stage that was measured, with or without a limit."""
    limits, worst, quality, ranking = parity.limits, parity.worst, stage.quality, stage.ranking
    # What was sampled under the clock is held to gross faults alone.
    cases = [case for case in parity.cases if case.padding != TIMED] or parity.cases
    flips = [case.label_flips for case in cases if case.label_flips is not None]
    compared = max(1, sum(case.compared for case in cases))
    yield from _at_most("max_abs", nan_max(case.max_abs for case in cases), limits.max_abs)
    yield from _at_most("rel_l2", nan_max(case.rel_l2 for case in cases), limits.rel_l2)
    yield from _at_most("label flips", sum(flips) / compared if flips else None, limits.label_flips_max)
    yield from _at_most("invariance", stage.invariance.max_abs if stage.invariance else None, limits.invariance_max)
    for name, _, value, limit in rounding(stage):
        yield from _at_most(name, value, limit)
    yield from _at_most("metric drop", max(-quality.change, 0.0) if quality else None, limits.metric_drop_max)
    yield from _at_least("cosine_min", nan_min(case.cosine_min for case in cases), limits.cosine_min)
    yield from _at_least("cosine_median", worst.value if worst.metric == "cosine_median_min" else None, limits.cosine_median_min)
    yield from _at_least("cosine_mean", nan_min(case.cosine_mean for case in cases), limits.cosine_mean)
    yield from _at_least("spearman", ranking.spearman if ranking else None, limits.spearman_min)
    yield from _at_least("top_k", ranking.top_k_overlap if ranking else None, limits.top_k_overlap_min)


def _at_most(metric: str, value: float | None, limit: float | None) -> Iterator[Mark]:
    """The mark of a figure that is 0 where all is right; none where it was not measured."""
    if value is not None:
        yield Mark(metric, value, limit, limit is None or value <= limit)


def _at_least(metric: str, value: float | None, limit: float | None) -> Iterator[Mark]:
    """The mark of a figure that is 1 where all is right: how far it is from that."""
    if value is not None:
        distance = min(1 - value, 2.0) if value < 1 else value - value  # 0, and NaN where it is none
        yield Mark(f"1 − {metric}", distance, None if limit is None else 1 - limit, limit is None or value >= limit)
