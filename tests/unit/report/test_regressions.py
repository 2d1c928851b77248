"""Baselines: what of a report counts as a regression against an earlier one."""

from __future__ import annotations

import datetime
import json
import math
from pathlib import Path
from typing import Any

import pytest

from bertopt.commands import compare
from bertopt.errors import UsageError
from bertopt.report import diff, diff_table
from bertopt.report.diff import Change, Tolerances
from bertopt.results import Invariance, Limits, Quality, Ranking, Ratio, Report, Stage, Waiver
from tests.support.judged import BF16, HERE, report, row, timed


def regressions(before: Stage, after: Stage, **stated: Any) -> list[tuple[str, str]]:
    changes = diff.reports(report(before), report(after), Tolerances(**stated))
    return [(change.gate, change.what) for change in changes if change.regression]


def test_a_report_against_itself() -> None:
    found = diff.conclude(("a", "b"), [], Tolerances(), diff.reports(report(row()), report(row()), Tolerances()))
    assert found.exit_code == 0 and not found.regressions() and "no regression" in found.reason
    assert {change.gate for change in found.changes} == {"status", "parity", "quality", "latency", "size", "memory"}


@pytest.mark.parametrize(
    ("change", "gate", "what"),
    [
        ({"latency": [timed(1.85), timed(2.0, None)]}, "latency", "8 × 128"),
        ({"latency": [timed(2.0), timed(1.0, None)]}, "latency", "end to end"),
        ({"latency": [timed(2.0)]}, "latency", "end to end"),
        ({"latency": [timed(math.nan), timed(2.0, None)]}, "latency", "8 × 128"),
        ({"size_bytes": 111 * 2**20}, "size", "size_bytes"),
        ({"peak_rss_bytes": 2**30 * 2}, "memory", "peak_rss_bytes"),
        ({"quality": Quality(metric="accuracy", value=0.89, reference=0.9, change=-0.01, n=100)}, "quality", "accuracy"),
        ({"quality": Quality(metric="accuracy", value=math.nan, reference=1, change=0, n=100)}, "quality", "accuracy"),
        ({"quality": Quality(metric="accuracy", value=0.9, reference=0.9, change=0, n=50)}, "quality", "accuracy"),
        ({"quality": None}, "quality", "accuracy"),
        ({"status": "failed", "reason": "it broke"}, "status", "failed"),
        ({"status": "unverified", "reason": "no GPU"}, "status", "unverified"),
    ],
    ids=[
        "slower shape", "slower texts", "texts not timed", "shape is NaN", "size", "memory", "accuracy", "accuracy is NaN", "fewer texts",
        "no accuracy", "failed", "unverified",
    ],
)  # fmt: skip
def test_what_is_a_regression(change: dict[str, Any], gate: str, what: str) -> None:
    after = row().model_copy(update=change)
    assert regressions(row(), after) == [(gate, what)]
    if gate != "status":
        assert regressions(after, row()) == [] or gate == "quality" or "nan" in str(change)


@pytest.mark.parametrize(
    "change",
    [
        {"latency": [timed(1.92), timed(2.0, None)]},  # 4 % slower, intervals apart
        {"latency": [timed(1.8, spread=0.3), timed(2.0, None)]},  # 10 % slower, intervals overlap
        {"size_bytes": 109 * 2**20},
        {"quality": Quality(metric="accuracy", value=0.896, reference=0.9, change=-0.004, n=100)},
    ],
    ids=["within 5 %", "overlap", "size", "quality"],
)
def test_what_is_tolerated(change: dict[str, Any]) -> None:
    after = row().model_copy(update=change)
    assert regressions(row(), after) == []
    strict = regressions(row(), after, slower=0.0, bigger=0.0, quality_drop=0.0)
    assert len(strict) == (
        0 if "spread" in str(change) or change.get("latency", [timed(1)])[0].vs_reference.high > 2 else 1
    )


@pytest.mark.parametrize("value", [0.07, math.nan], ids=str)
def test_parity_is_held_to_the_baseline_s_limits(value: float) -> None:
    """A candidate whose recipe allows more than the baseline's did is found, though it calls itself ok."""
    loose = Limits(rel_l2=9.0, cosine_min=0.9)
    after = row(limits=loose, rel_l2=value).model_copy(update={"status": "ok"})
    assert regressions(row(), after) == [("parity", "rel_l2")]
    assert regressions(row(), row(rel_l2=0.05)) == []
    assert regressions(row(), row(rel_l2=0.05), limits=Limits(rel_l2=0.04)) == [("parity", "rel_l2")]
    # What the baseline missed too is one only where it got worse.
    assert regressions(row(rel_l2=0.08), row(rel_l2=0.07)) == []
    assert regressions(row(rel_l2=0.08), row(rel_l2=0.09)) == [("parity", "rel_l2")]


def test_invariance_and_ranking_count_where_they_have_limits() -> None:
    limits = Limits(rel_l2=1.0, invariance_max=1e-3, spearman_min=0.99)
    good, bad = row(limits=limits), row(limits=limits)
    for found, (far, rank) in ((good, (1e-4, 0.999)), (bad, (1e-2, 0.9))):
        found.invariance = Invariance(max_abs=far, cosine_min=1, texts=3, where="text 1")
        found.ranking = Ranking(spearman=rank, top_k_overlap=rank, k=3, n=9)
    assert regressions(good, good) == []
    assert regressions(good, bad) == [("invariance", "invariance_max"), ("ranking", "spearman_min")]
    bad.invariance = None
    assert regressions(good, bad) == [("invariance", "invariance_max"), ("ranking", "spearman_min")]


def test_a_waived_miss_is_no_regression_unless_stated() -> None:
    known = Waiver(stage="bf16", metric="rel_l2", reason="issue 12", expires=datetime.date(2026, 7, 1))
    after = row(limits=Limits(rel_l2=0.06), rel_l2=0.07, waivers=[known])
    assert after.status == "ok"
    assert regressions(row(), after) == []
    (change,) = (c for c in diff.reports(report(row()), report(after), Tolerances()) if c.what == "rel_l2")
    assert change.note == "limit 0.06, waived until 2026-07-01: issue 12"
    assert regressions(row(), after, limits=Limits(rel_l2=0.06)) == [("parity", "rel_l2")]


def test_stages_that_come_and_go() -> None:
    changes = diff.reports(report(row("a"), row("b")), report(row("b"), row("c")), Tolerances())
    assert [(c.stage, c.regression) for c in changes if c.regression] == [("a", "the stage is missing; the baseline has it")]  # fmt: skip
    assert [c.note for c in changes if c.stage == "c"] == ["new: the baseline does not have it"]


def test_milliseconds_of_other_hardware_are_not_comparable(tmp_path: Path) -> None:
    there = {**HERE, "cpu": "another", "packages": {"torch": "2.14", "onnx": "1"}}
    slow = row().model_copy(update={"latency": [timed(2.0, ms=99.0), timed(2.0, None)]})
    (tmp_path / "a.json").write_text(report(row()).model_dump_json(by_alias=True))
    (tmp_path / "b.json").write_text(report(slow, environment=there).model_dump_json(by_alias=True))
    found = compare.compare(tmp_path / "a.json", tmp_path / "b.json", Tolerances())
    assert found.exit_code == 0
    assert found.environment == ["cpu: a CPU → another", "onnx: none → 1", "torch: 2.13 → 2.14"]
    assert {change.note for change in found.changes if change.unit == "ms"} == {"other hardware: not comparable"}


def test_reports_of_other_shapes(tmp_path: Path) -> None:
    """What only one of them was timed on is named, and no regression; with no shape in common the two do not go together."""

    def written(name: str, *batches: int) -> Path:
        timings = [*(timed(2.0, batch) for batch in batches), timed(2.0, None)]
        (tmp_path / name).write_text(report(row(latency=timings)).model_dump_json(by_alias=True))
        return tmp_path / name

    first, second, other = written("a.json", 1, 8), written("b.json", 8, 32), written("c.json", 2)
    found = compare.compare(first, second, Tolerances())
    assert found.exit_code == 0, found.reason
    assert found.environment == ["shapes: 1 × 128 only in the baseline, 32 × 128 only in the candidate; they are not compared"]
    assert {change.what for change in found.changes if change.gate == "latency"} == {"8 × 128", "end to end"}
    with pytest.raises(UsageError, match=r"timed shapes in common; got 1 × 128, 8 × 128 in .*a.json', 2 × 128 in .*c.json'; .* same inputs.shapes"):
        compare.compare(first, other, Tolerances())
    # Nothing timed is another matter: a stage that failed has no figures.
    (tmp_path / "d.json").write_text(report(row().model_copy(update={"status": "failed", "latency": None})).model_dump_json(by_alias=True))
    assert compare.compare(first, tmp_path / "d.json", Tolerances()).exit_code == 3


def test_an_interval_that_says_nothing_is_no_result() -> None:
    nothing = "no result (the interval is too wide)"
    noisy = Ratio(ratio=1.4, low=1e-9, high=2012723481.63)
    unsure = row(latency=[timed(2.0).model_copy(update={"vs_reference": noisy}), timed(2.0, None)])
    for before, after, note in ((row(), unsure, f"[1.98, 2.02] → {nothing}"), (unsure, row(), f"{nothing} → [1.98, 2.02]")):
        changes = diff.reports(report(before), report(after), Tolerances())
        (shape,) = (change for change in changes if change.unit == "x" and change.what == "8 × 128")
        assert shape.regression is None and shape.note == note and None in (shape.before, shape.after)
    (against,) = (
        change for change in diff.artefacts(row(), unsure, Tolerances(), BF16) if change.unit == "x" and change.what == "8 × 128"
    )
    assert (against.note, against.after, against.regression) == (nothing, None, None)


def test_reports_that_do_not_go_together(tmp_path: Path) -> None:
    model = {"source": "x", "family": "roberta", "task": "text-classification"}
    (tmp_path / "a.json").write_text(report().model_dump_json(by_alias=True))
    (tmp_path / "b.json").write_text(report(model=model).model_dump_json(by_alias=True))
    (tmp_path / "c.json").write_text('{"stages": 3}')
    for other, words in (
        ("b", "different models: family bert and roberta"),
        ("c", "is not a report"),
        ("d", "cannot be read"),
    ):
        with pytest.raises(UsageError, match=words):
            compare.compare(tmp_path / "a.json", tmp_path / f"{other}.json", Tolerances())
    with pytest.raises(UsageError, match="--texts goes with two artefacts"):
        compare.compare(tmp_path / "a.json", tmp_path / "a.json", Tolerances(), tmp_path / "t.txt")


def test_stated_limits() -> None:
    assert compare.limits(["rel_l2=0.01", "cosine_min=0.9"]) == Limits(rel_l2=0.01, cosine_min=0.9)
    with pytest.raises(UsageError) as caught:
        compare.limits(["rel_l2", "rel_l3=1", "cosine_min=7"])
    assert len(caught.value.problems) == 3 and "did you mean 'rel_l2'?" in caught.value.problems[1]


def test_old_reports_still_load() -> None:
    old = json.loads(report(row(rel_l2=0.07)).model_dump_json(by_alias=True))
    for gone in ("failures", "waived", "effects"):
        del old["stages"][1][gone]
    del old["stages"][1]["parity"]["blame"]
    old["stages"][1]["parity"] |= {"failures": ["rel_l2 must be at most 0.06; got 0.07"], "failed": ["rel_l2"]}
    again = Report.model_validate(old).stages[1]
    assert again.status == "failed" and "got 0.07" in (again.reason or "") and again.parity is not None


def test_units() -> None:
    shown = [
        diff_table.cells(Change(stage="s", gate="g", what="w", unit=unit, before=2**20, after=None))[3:5]
        for unit in ("", "x", "ms", "bytes")
    ]
    assert shown == [["1.04858e+06", "–"], ["1048576.00x", "–"], ["1048576.00 ms", "–"], ["1.0 MB", "–"]]
