"""What a stage fails: limits, waivers, no-ops and blame, from made-up measurements."""

from __future__ import annotations

import datetime
import math
from typing import Any

import pytest

from bertopt.checks import gates
from bertopt.checks.gates import GateOutcome
from bertopt.checks.measurements import StageMeasurements
from bertopt.checks.parity import DEFAULT_LIMITS
from bertopt.errors import StepTimeout
from bertopt.pipeline import rows
from bertopt.results import TIMED, Invariance, Limits, Quality, Ranking, Waiver
from tests.support.measured import case, measured, swept

TODAY = datetime.date(2026, 6, 1)
LIMITS = Limits(rel_l2=0.06)


def judge(measurements: StageMeasurements, limits: Limits = LIMITS, stage: str = "bf16", **given: Any) -> GateOutcome:
    return gates.judge(stage, measurements, limits, **{"changes": {"tensors": 3}, "today": TODAY, **given})


def waiver(**changed: Any) -> Waiver:
    fields = {"stage": "bf16", "metric": "rel_l2", "reason": "issue 12", "expires": datetime.date(2999, 1, 1)}
    return Waiver.model_validate(fields | changed)


def test_a_stage_within_its_limits_passes() -> None:
    outcome = judge(measured())
    assert (outcome.status, outcome.reason, outcome.exit_code) == ("ok", None, 0)
    assert not outcome.failures and outcome.parity is not None and outcome.parity.passed


@pytest.mark.parametrize(
    ("limits", "fields", "gate", "text"),
    [
        ({"rel_l2": 0.06}, {"rel_l2": 0.07}, "parity", "rel_l2 must be at most 0.06; got 0.07"),
        ({"cosine_min": 0.9}, {"cosine_min": 0.8}, "parity", "cosine_min must be at least 0.9; got 0.8"),
        ({"metric_drop_max": 0.01}, {"quality": Quality(metric="accuracy", value=0.8, reference=0.9, change=-0.1, n=9)},
         "quality", "accuracy may drop by at most 0.01; got -0.1000"),
        ({"invariance_max": 1e-3}, {"invariance": Invariance(max_abs=0.1, cosine_min=1, texts=3, where="text 1")},
         "invariance", "a text's output may change by at most 0.001 when batched with other texts; got 0.1 (text 1)"),
        ({"spearman_min": 0.9}, {"ranking": Ranking(spearman=0.8, top_k_overlap=1.0, k=3, n=9)}, "ranking",
         "spearman must be at least 0.9; got 0.8"),
        ({}, {"effects": {"nodes": (12, 3)}}, "effects", "the committed model must show 12 nodes; got 3"),
        ({}, {"placed": {"nodes on the GPU": (4, 3)}}, "effects", "the committed model must show 4 nodes on the GPU; got 3"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)  # fmt: skip
def test_every_gate_fails_what_misses_its_limit(limits: Any, fields: Any, gate: str, text: str) -> None:
    outcome = judge(measured(**fields), Limits(**{"max_abs": 1.0, **limits}))
    assert (outcome.status, outcome.exit_code) == ("failed", 3)
    assert [(failure.gate, failure.text) for failure in outcome.failures] == [(gate, text)]
    assert (outcome.reason or "").startswith(text)


def test_a_metric_that_improves_does_not_fail() -> None:
    better = Quality(metric="accuracy", value=0.95, reference=0.9, change=0.05, n=9)
    assert judge(measured(quality=better), Limits(max_abs=1.0, metric_drop_max=0.0)).status == "ok"


def test_limits_of_a_step_count_before_the_recipe_s_and_the_defaults() -> None:
    found = gates.effective_limits("int8", Limits(rel_l2=0.1), Limits(rel_l2=0.2, cosine_min=0.5))
    assert (found.rel_l2, found.cosine_min) == (0.1, 0.5)
    assert found.label_flips_max == DEFAULT_LIMITS["int8"].label_flips_max


def test_default_limits_of_absolute_differences_grow_with_outputs_of_many_digits_and_stated_ones_do_not() -> None:
    """Right float32 forms of a classifier with logits of 1,000 differed by 1.2e-4: two units of a float32's last digit."""
    usual, large = (gates.effective_limits("float32", peak=peak) for peak in (8.0, 1000.0))
    assert usual == DEFAULT_LIMITS["float32"] == gates.effective_limits("float32")
    assert (large.max_abs, large.invariance_max, large.rel_l2) == (pytest.approx(1e-2), pytest.approx(1e-2), usual.rel_l2)
    assert gates.effective_limits("float32", Limits(max_abs=1e-4), peak=1000.0).max_abs == 1e-4
    assert gates.effective_limits("int8", peak=1000.0) == DEFAULT_LIMITS["int8"]
    sparse = gates.effective_limits("float32", sparse=True)
    assert sparse == usual.model_copy(update={"rel_l2": gates.SPARSE_ROOM * 1e-5})
    assert gates.effective_limits("float32", Limits(rel_l2=1e-6), sparse=True).rel_l2 == 1e-6
    assert gates.effective_limits("bfloat16", sparse=True) == DEFAULT_LIMITS["bfloat16"]
    for unknown in (math.nan, math.inf):
        assert gates.effective_limits("float32", peak=unknown) == usual


@pytest.mark.parametrize(("day", "holds"), [(31, True), (30, False)])
def test_a_waiver_holds_through_its_last_day(day: int, holds: bool) -> None:
    limits = Limits(rel_l2=0.06, label_flips_max=0.0)
    known, today = [waiver(expires=datetime.date(2026, 5, day))], datetime.date(2026, 5, 31)
    outcome = judge(measured(rel_l2=0.07), limits, waivers=known, today=today)
    if holds:
        assert (outcome.status, outcome.reason) == ("ok", None)
        assert outcome.waived == ("rel_l2 must be at most 0.06; got 0.07, waived until 2026-05-31: issue 12",)
    else:
        assert outcome.waived == () and outcome.status == "failed"
        assert "got 0.07 (its waiver expired on 2026-05-30: issue 12) at logits[0, 1]" in (outcome.reason or "")
    assert "waiver" not in (judge(measured(rel_l2=0.07), limits, "fp16", waivers=known, today=today).reason or "waiver")


def test_a_waiver_with_a_limit_covers_no_more_than_that() -> None:
    """A waiver of rel_l2, written for a miss of a few per cent, covered a later fault of any size."""
    known = [waiver(limit=0.1)]
    outcome = judge(measured(rel_l2=0.07), waivers=known)
    assert outcome.waived == ("rel_l2 must be at most 0.06; got 0.07, waived to 0.1 until 2999-01-01: issue 12",)
    outcome = judge(measured(rel_l2=0.2), waivers=known)
    assert (outcome.status, outcome.waived) == ("failed", ())
    assert (outcome.reason or "").startswith("rel_l2 must be at most 0.06; got 0.2 (its waiver's limit is 0.1: issue 12)")
    assert judge(measured(rel_l2=0.2), waivers=[waiver()]).status == "ok"
    low = [waiver(metric="cosine_min", limit=0.7)]
    found = [judge(measured(cosine_min=least), Limits(cosine_min=0.9), waivers=low).status for least in (0.8, 0.6)]
    assert found == ["ok", "failed"]


def test_a_waiver_s_limit_holds_for_what_coverage_sweeps_run() -> None:
    """Every gate that misses `rel_l2` is covered, a wrong id among the sweeps' too."""
    known, limits = [waiver(limit=1e-4)], DEFAULT_LIMITS["float32"]
    fine = {"max_abs": 1e-5, "cosine_min": 1.0, "cosine_mean": 1.0}
    for worst, status in ((6e-5, "ok"), (1.1, "failed")):
        outcome = judge(measured(rel_l2=2e-5, coverage=swept(worst=worst), **fine), limits, waivers=known)
        assert (outcome.status, len(outcome.failures)) == (status, 2), outcome


def test_nan_values_that_are_not_finite_and_missing_effects_cannot_be_waived() -> None:
    def reason(**fields: Any) -> str:
        return judge(measured(**fields), waivers=[waiver()]).reason or ""

    assert reason(rel_l2=0.07) == ""
    assert "got nan" in reason(rel_l2=math.nan)
    assert "got inf" in reason(rel_l2=math.inf)
    assert "must be finite" in reason(finite=False)
    assert reason(effects={"heads": (12, 0), "nodes": (1, 1)}) == "the committed model must show 12 heads; got 0"


def test_values_that_are_not_finite_are_not_said_to_be_where_the_largest_error_is() -> None:
    """A masked row that was NaN was said to be in another row, and introduced by the pass before."""
    outcome = judge(measured(finite=False), ancestors={"use_sdpa": 0.5})
    assert outcome.failures[0].metric is None and (outcome.reason or "") == outcome.failures[0].text


def test_a_waiver_that_is_not_needed_is_named() -> None:
    for rel_l2, count in ((0.07, 0), (0.01, 1)):
        outcome = judge(measured(rel_l2=rel_l2), waivers=[waiver()])
        row = rows.make(1, "bf16", outcome)
        assert len(gates.unused_waivers([waiver()], [row])) == count
    row.status = "skipped"
    assert gates.unused_waivers([waiver()], [row]) == []


@pytest.mark.parametrize(
    ("changes", "fields", "status", "words"),
    [
        ({"things": 0}, {}, "noop", "the pass changed nothing"),
        ({}, {}, "noop", "the pass changed nothing"),
        ({"things": 3}, {"changed": False}, "noop", "claims 3 changes, but the committed model is its parent's"),
        ({"things": 3}, {"effects": {"calls": (2, 0)}}, "noop", "shows none of them: expected 2 calls, got 0"),
        ({"things": 3}, {"effects": {"calls": (2, 1)}}, "failed", "must show 2 calls; got 1"),
        ({"things": 3}, {"effects": {"left over": (0, 0)}}, "ok", ""),
        ({"things": 3}, {"changed": None}, "ok", ""),
    ],
)
def test_a_pass_that_did_nothing_is_a_noop(changes: Any, fields: Any, status: str, words: str) -> None:
    outcome = judge(measured(**fields), changes=changes)
    assert outcome.status == status and words in (outcome.reason or "") and outcome.exit_code == (3 if status != "ok" else 0)
    allowed = judge(measured(**fields), changes=changes, allow_noop=True)
    assert allowed.status == ("failed" if status == "failed" else "ok")


def test_counts_of_nothing_need_no_measurement() -> None:
    assert "changed nothing" in (gates.noop_reason({"things": 0}) or "")
    assert gates.noop_reason({"things": 1}) is None


def test_blame_names_the_stage_that_added_most() -> None:
    outcome = judge(measured(0.03, rel_l2=0.07), stage="onnx", ancestors={"sdpa": 1e-6, "half": 0.05})
    assert outcome.parity is not None and outcome.parity.blame is not None
    blame = outcome.parity.blame
    assert (blame.stage, blame.rel_l2, blame.total) == ("half", 0.05, 0.07)
    assert (outcome.reason or "").endswith("1 × 8, none, introduced by 'half'")
    own = judge(measured(0.05, rel_l2=0.07), stage="half", ancestors={"sdpa": 1e-6})
    assert own.parity is not None and own.parity.blame is not None and own.parity.blame.stage == "half"
    assert (own.reason or "").endswith("1 × 8, none")
    first = gates.blame({"sdpa": math.nan, "half": math.nan}, math.nan)
    assert first is not None and first.stage == "sdpa" and math.isnan(first.total)
    assert gates.blame({}, 0.0) is None


def test_the_place_stands_beside_the_limit_it_is_of() -> None:
    ranking = Ranking(spearman=0.8, top_k_overlap=1.0, k=3, n=9)
    outcome = judge(measured(rel_l2=0.07, ranking=ranking), Limits(max_abs=1.0, rel_l2=0.06, spearman_min=0.9))
    assert outcome.reason == (
        "rel_l2 must be at most 0.06; got 0.07 at logits[0, 1], 1 × 8, none; spearman must be at least 0.9; got 0.8"
    )


def test_what_was_sampled_under_the_clock_names_its_own_place() -> None:
    """The place of the worst probe stood behind it, beside its own."""
    sampled = case(rel_l2=0.8).model_copy(update={"padding": TIMED, "where": "logits[2, 0], 8 × 16, under the clock"})
    outcome = judge(measured(cases=[case(rel_l2=0.07), sampled]), Limits(max_abs=1.0, rel_l2=0.06))
    assert outcome.reason == (
        "rel_l2 of outputs computed under the clock must be at most 0.6; got 0.8 (logits[2, 0], 8 × 16, under the clock); "
        "rel_l2 must be at most 0.06; got 0.07 at logits[0, 1], 1 × 8, none"
    )


def test_a_broken_stage_keeps_its_exit_code_and_last_words() -> None:
    error = StepTimeout("took too long")
    error.log = "last words"
    outcome = GateOutcome.of_error(error)
    assert (outcome.status, outcome.reason, outcome.exit_code) == ("failed", "took too long", 7)
    assert rows.make(1, "x", outcome).facts == {"log": "last words"}
