"""Find the figure of a stage that is nearest to its limit."""

from __future__ import annotations

import math
from collections.abc import Iterator

from bertopt.checks import coverage, padding_patterns, speed_limits
from bertopt.checks.measurements import StageMeasurements
from bertopt.results import Gate, Limits, Margin, Parity
from bertopt.results.fidelity import Rounding


def nearest(measurements: StageMeasurements, parity: Parity | None, size_bytes: int | None, limits: Limits) -> Margin | None:
    """Return the figure that uses up most of its limit, or that is farthest beyond it; None without any.

    Checks without a figure (effects, certificate) have no margin.
    """
    found = (each for each in _margins(measurements, parity, size_bytes, limits) if each is not None)
    return max(found, key=lambda each: each.used, default=None)


def _margins(
    measurements: StageMeasurements, parity: Parity | None, size_bytes: int | None, limits: Limits
) -> Iterator[Margin | None]:
    if parity is not None:
        worst = parity.worst
        yield _margin("parity", worst.metric, worst.value, worst.limit, worst.where)
    for held in padding_patterns.held(measurements.cases, limits):
        yield _margin("coverage", held.name, held.value, held.limit, "random tokens")
    rounding, found = measurements.rounding, measurements.coverage
    for name in Rounding.model_fields if rounding else ():
        yield _margin("rounding", f"{name}_max", getattr(rounding, name), getattr(limits, f"{name}_max", None), "real texts")
    for name, output in found.outputs.items() if found else ():
        for held in coverage.held(name, output, limits, rounding.error if rounding else None):
            yield _margin("coverage", held.name, held.value, held.limit, output.where)
    if measurements.invariance:
        yield _margin("invariance", "invariance_max", measurements.invariance.max_abs, limits.invariance_max, measurements.invariance.where)
    if quality := measurements.quality:
        drop = quality.change if math.isnan(quality.change) else max(-quality.change, 0.0)
        yield _margin("quality", "metric_drop_max", drop, limits.metric_drop_max, f"{quality.metric}, {quality.n} texts")
    if ranking := measurements.ranking:
        yield _margin("ranking", "spearman_min", ranking.spearman, limits.spearman_min, f"{ranking.n} texts")
        yield _margin("ranking", "top_k_overlap_min", ranking.top_k_overlap, limits.top_k_overlap_min, f"{ranking.n} texts")
    for metric, gate, value in speed_limits.measured(measurements, size_bytes):
        yield _margin(gate, metric, value, getattr(limits, metric), "")


def _margin(gate: Gate, metric: str, value: float | None, limit: float | None, where: str) -> Margin | None:
    return None if value is None or limit is None else Margin(gate=gate, metric=metric, value=value, limit=limit, where=where)
