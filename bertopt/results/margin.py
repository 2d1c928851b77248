"""How near a figure is to its limit."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel

Gate = Literal[
    "effects", "certificate", "parity", "coverage", "rounding", "invariance", "ranking", "quality", "latency", "resources"
]  # fmt: skip


def is_least(metric: str) -> bool:
    """Whether the limit of this name, a field of Limits, is the least that passes."""
    return metric.startswith("cosine") or metric.endswith("_min")


def holds(metric: str, value: float, limit: float) -> bool:
    """Return whether a value is within the limit of this name. NaN never is."""
    return value >= limit if is_least(metric) else value <= limit


class Margin(BaseModel, frozen=True, extra="forbid", ser_json_inf_nan="strings"):
    """One figure and its limit."""

    gate: Gate
    metric: str
    """A field of Limits, or for coverage what is compared."""
    value: float
    limit: float
    where: str

    @property
    def least(self) -> bool:
        """Whether the limit is the least that passes."""
        return is_least(self.metric)

    @property
    def used(self) -> float:
        """Share of the limit that is used up: 1 is exactly at it, infinity is NaN or beyond a limit of 0."""
        if math.isnan(self.value):
            return math.inf
        used, allowed = self.value, self.limit
        if self.metric == "speedup_min":
            used, allowed = self.limit, self.value
        elif self.least:
            used, allowed = 1 - self.value, 1 - self.limit
        return used / allowed if allowed > 0 else (0.0 if used <= 0 else math.inf)
