"""Speed, memory and size as gates: missed, undecided, not measured."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from bertopt.checks import gates
from bertopt.checks.gates import GateOutcome
from bertopt.report import junit
from bertopt.results import Latency, Limits, Ratio, Report, Stage
from tests.support.measured import measured

UNDECIDED = ", which does not show it: raise timing.mix_s, or time on a quieter machine"


def texts(low: float | None, high: float = 0.0, warning: str | None = None) -> Latency:
    ratio = None if low is None else Ratio(ratio=(low + high) / 2, low=low, high=high)
    return Latency(
        kind="mix", batch=None, sequence=None, n=12, p50_ms=40.0, p90_ms=50.0, p99_ms=None, texts_per_s=300.0,
        vs_reference=ratio, warning=warning,
    )  # fmt: skip


def judge(limits: dict[str, float], *latency: Latency, peak: int | None = 300_000_000) -> GateOutcome:
    figures = measured(latency=list(latency), peak_rss_bytes=peak)
    return gates.judge(
        "fast", figures, Limits(max_abs=1.0, **limits), changes={"nodes": 1}, today=datetime.date(2026, 6, 1), size_bytes=90_000_000
    )


@pytest.mark.parametrize(
    ("limits", "low", "high", "reason"),
    [
        ({"speedup_min": 1.0}, 0.90, 0.98, "the end-to-end speed-up must be at least 1; got 0.940 [0.900, 0.980]"),
        ({"speedup_min": 1.0}, 0.90, 1.00, f"the end-to-end speed-up must be at least 1; got 0.950 [0.900, 1.000]{UNDECIDED}"),
        ({"speedup_min": 1.0}, 0.97, 1.05, f"the end-to-end speed-up must be at least 1; got 1.010 [0.970, 1.050]{UNDECIDED}"),
        ({"speedup_min": 1.0}, 1.00, 1.20, None),
        ({"speedup_min": 2.0}, 2.10, 2.30, None),
        ({"speedup_min": 2.0}, 1.70, 1.90, "the end-to-end speed-up must be at least 2; got 1.800 [1.700, 1.900]"),
        ({"mix_p50_ms_max": 39.0}, 1, 1, "the median time of the timed texts may be at most 39 ms; got 40 ms"),
        ({"mix_p50_ms_max": 40.0}, 1, 1, None),
        ({"peak_rss_max": 299}, 1, 1, "the peak memory may be at most 299 MB; got 300 MB"),
        ({"size_max": 50}, 1, 1, "the size of the files may be at most 50 MB; got 90 MB"),
        ({"size_max": 90, "peak_rss_max": 300}, 1, 1, None),
    ],
)
def test_a_limit_is_kept_only_where_the_whole_interval_keeps_it(
    limits: dict[str, float], low: float, high: float, reason: str | None
) -> None:
    outcome = judge(limits, texts(low, high))
    assert (outcome.status, outcome.reason, outcome.exit_code) == (("failed", reason, 3) if reason else ("ok", None, 0))


@pytest.mark.parametrize("latency", [[], [texts(None, warning="void: 2 graphs were compiled while the clock ran")]])
def test_what_was_not_measured_keeps_no_limit(latency: list[Latency]) -> None:
    outcome = judge({"speedup_min": 1.0}, *latency)
    assert outcome.status == "failed" and outcome.failures[0].metric is None
    assert ("2 graphs" if latency else "it was not timed") in (outcome.reason or "")
    assert "it was not measured" in (judge({"peak_rss_max": 1.0}, peak=None).reason or "")


@pytest.mark.parametrize(
    ("latency", "outcome"),
    [(texts(0.8, 0.9), "skipped"), (texts(None, warning="void: the device was still busy"), "skipped"), (texts(1.5, 1.6), "passed")],
)
def test_junit_shows_no_passed_case_for_a_slower_or_void_stage(latency: Latency, outcome: str) -> None:
    rows = [Stage(index=index, name=name, status="ok", latency=[latency]) for index, name in enumerate(("reference", "fast"))]
    report = Report(bertopt_version="0", recipe={}, environment={}, model={}, stages=rows)
    cases: dict[tuple[str, str], Any] = {(check.stage, check.gate): check for check in junit.checks(report)}
    assert cases["fast", "latency"].outcome == outcome
    if outcome == "skipped":
        assert "no speedup_min is stated" in cases["fast", "latency"].text
