"""Each figure of a stage that has a limit, as a distance from perfect that a logarithmic scale can show."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bertopt.report import formatting
from bertopt.results import TIMED, Stage, nan_max, nan_min


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
    # What was sampled under the clock is held to gross faults alone.
    cases = [case for case in stage.parity.cases if case.padding != TIMED] or stage.parity.cases
    limits = stage.parity.limits
    flips = [case.label_flips for case in cases if case.label_flips is not None]
    compared = max(1, sum(case.compared for case in cases))
    ranking, quality, worst = stage.ranking, stage.quality, stage.parity.worst
    upper = {
        "max_abs": (nan_max(case.max_abs for case in cases), limits.max_abs),
        "rel_l2": (nan_max(case.rel_l2 for case in cases), limits.rel_l2),
        "label flips": (sum(flips) / compared if flips else None, limits.label_flips_max),
        "invariance": (stage.invariance.max_abs if stage.invariance else None, limits.invariance_max),
        **{name: (value, limit) for name, _, value, limit in rounding(stage)},
        "metric drop": (max(-quality.change, 0.0) if quality else None, limits.metric_drop_max),
    }
    lower = {
        "1 − cosine_min": (nan_min(case.cosine_min for case in cases), limits.cosine_min),
        "1 − cosine_median": (worst.value if worst.metric == "cosine_median_min" else None, limits.cosine_median_min),
        "1 − cosine_mean": (nan_min(case.cosine_mean for case in cases), limits.cosine_mean),
        "1 − spearman": (ranking.spearman if ranking else None, limits.spearman_min),
        "1 − top_k": (ranking.top_k_overlap if ranking else None, limits.top_k_overlap_min),
    }
    found = [
        Mark(key, value, limit, limit is None or value <= limit) for key, (value, limit) in upper.items() if value is not None
    ] + [
        Mark(key, min(1 - value, 2.0) if value < 1 else value - value, None if limit is None else 1 - limit, limit is None or value >= limit)
        for key, (value, limit) in lower.items()
        if value is not None
    ]  # fmt: skip
    limited = [mark for mark in found if mark.limit is not None]
    return limited or [mark for mark in found if mark.metric in ("max_abs", "rel_l2", "1 − cosine_min")]
