"""Which figure of a stage is nearest to its limit, over every check that has limits."""

from __future__ import annotations

import datetime
import math
from typing import Any

import pytest

from bertopt.checks import gates
from bertopt.results import Invariance, Latency, Limits, Margin, Quality, Ranking, Ratio
from bertopt.results.fidelity import Rounding
from tests.support.measured import measured, swept

#: Of every check a figure, none of them near its limit.
LOOSE = Limits(
    rel_l2=1.0, error_ratio_max=10, bias_max=10, metric_drop_max=0.5, invariance_max=1, spearman_min=0.1, top_k_overlap_min=0.1,
    speedup_min=0.5, mix_p50_ms_max=1000, peak_rss_max=10_000, size_max=10_000,
)  # fmt: skip
ROUNDING = Rounding(error=0.1, error_ratio=1.0, slope_error=0.0, bias=1.0, flip_margin=None, rank_ratio=None, parent_ratio=None, vectors=9)
TEXTS = Latency(
    kind="mix", batch=None, sequence=None, n=12, p50_ms=40.0, p90_ms=50.0, p99_ms=None, texts_per_s=300.0,
    vs_reference=Ratio(ratio=2.0, low=1.9, high=2.1),
)  # fmt: skip


def nearest(limits: dict[str, float] | None = None, **fields: Any) -> Margin:
    figures = {
        "rounding": ROUNDING, "latency": [TEXTS], "peak_rss_bytes": 300_000_000, "coverage": swept(),
        "invariance": Invariance(max_abs=0.01, cosine_min=1, texts=3, where="text 1"),
        "ranking": Ranking(spearman=0.99, top_k_overlap=0.99, k=3, n=9),
        "quality": Quality(metric="accuracy", value=0.88, reference=0.9, change=-0.02, n=9),
    }  # fmt: skip
    found = gates.judge(
        "int8", measured(**{**figures, **fields}), LOOSE.model_copy(update=limits or {}), changes={"nodes": 1},
        today=datetime.date(2026, 6, 1), size_bytes=90_000_000,
    )  # fmt: skip
    assert found.nearest is not None
    return found.nearest


@pytest.mark.parametrize(
    ("limits", "gate", "value", "where"),
    [
        ({"rel_l2": 1.1e-3}, "parity", 1e-3, "logits[0, 1]"), ({"cosine_min": 0.9998}, "parity", 0.9999, "logits[0, 1]"),
        ({"error_ratio_max": 1.3}, "rounding", 1.0, "real texts"), ({"bias_max": 1.1}, "rounding", 1.0, "real texts"),
        ({"invariance_max": 0.011}, "invariance", 0.01, "text 1"), ({"metric_drop_max": 0.03}, "quality", 0.02, "accuracy"),
        ({"spearman_min": 0.985}, "ranking", 0.99, "9 texts"), ({"top_k_overlap_min": 0.985}, "ranking", 0.99, "9 texts"),
        ({"speedup_min": 1.8}, "latency", 1.9, ""), ({"mix_p50_ms_max": 41}, "latency", 40.0, ""),
        ({"peak_rss_max": 310}, "resources", 300.0, ""), ({"size_max": 91}, "resources", 90.0, ""),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_it_is_the_limit_that_is_most_used_up(limits: dict[str, float], gate: str, value: float, where: str) -> None:
    found = nearest(limits)
    assert (found.gate, found.metric, found.value, found.limit) == (gate, *limits, value, *limits.values())
    assert found.where.startswith(where) and found.used < 1


def test_a_row_of_the_sweeps_counts() -> None:
    found = nearest(coverage=swept(worst=0.95))
    assert (found.gate, found.metric, found.value, found.limit) == ("coverage", "one row", 0.95, 1.0)
    assert "sweep 2" in found.where


def test_what_is_beyond_its_limit_is_nearest_and_nan_is_beyond_all() -> None:
    found = nearest({"error_ratio_max": 0.9, "bias_max": 0.5})
    assert found.metric == "bias_max" and found.used == pytest.approx(2.0)
    assert nearest({"bias_max": 0.5}, quality=Quality(metric="F1", value=math.nan, reference=0.9, change=math.nan, n=9)).gate == "quality"


def test_a_gain_uses_nothing_up() -> None:
    better = Quality(metric="accuracy", value=0.95, reference=0.9, change=0.05, n=9)
    assert nearest({"metric_drop_max": 0.001}, quality=better).gate != "quality"


@pytest.mark.parametrize("limit", [0.0, 1e-9])
def test_exact_is_far_from_a_limit_of_nothing(limit: float) -> None:
    found = nearest({"invariance_max": limit}, invariance=Invariance(max_abs=0.0, cosine_min=1, texts=3, where=""))
    assert found.gate != "invariance"
