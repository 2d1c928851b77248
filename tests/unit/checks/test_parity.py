"""Outputs compared with the reference's, with made-up sessions: figures, limits, and the report that keeps them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from bertopt.checks import parity, probes
from bertopt.checks.parity import DEFAULT_LIMITS, ProbeOutputs
from bertopt.checks.probes import Probe
from bertopt.core import Session, Spec
from bertopt.errors import WrongAnswer
from bertopt.results import Case, Comparison, Latency, Limits, Parity, Ratio, Report, Stage, Worst
from tests.support import measured
from tests.support.compared import probe
from tests.support.specs import VALUES, spec

Array = np.ndarray
NAN = math.nan


TEXT = spec()
TOKEN = spec("token-classification")
SPAN = spec("question-answering")
PLAIN = spec("feature-extraction", outputs=("last_hidden_state",))


class Fake(Session):
    """Answers that depend on the inputs, with `edit` applied to them; the `time` is never looked at."""

    def __init__(self, of: Spec, edit: Callable[[str, Array], None] = lambda name, value: None) -> None:
        self.spec, self.edit = of, edit

    def load(self, inputs: Mapping[str, Array]) -> None:
        self.ids, self.mask = inputs["input_ids"], inputs["attention_mask"]

    def step(self) -> None:
        tokens = np.sin(self.ids[..., None] * [1.0, 2.0, 3.0] + np.arange(self.ids.shape[1])[:, None])
        self.answers: dict[str, Array] = {}
        for number, name in enumerate(self.spec.outputs):
            value = {"token": tokens, "span": tokens[..., number], "text": tokens.sum(axis=1)}[self.spec.granularity]
            self.answers[name] = value.astype(np.float32)
            self.edit(name, self.answers[name])

    def fetch(self) -> dict[str, Array]:
        return self.answers


def compared(of: Spec, at: Probe, edit: Callable[[str, Array], None]) -> Case:
    return parity.compare(at, of, parity.answer(Fake(of, edit), at, of), parity.answer(Fake(of), at, of))


def setting(at: Any, value: float, output: str | None = None) -> Callable[[str, Array], None]:
    def edit(name: str, found: Array) -> None:
        if output is None or name == output:
            found[at] = value

    return edit


def judged(case: Case, limits: Limits | None = None) -> Parity:
    return parity.judge([case], limits or DEFAULT_LIMITS["float32"], None)


def missed(cases: list[Case], limits: Limits) -> list[str]:
    return [failure.text for failure in parity.failures(cases, limits)]


@pytest.mark.parametrize("of", [TEXT, TOKEN, SPAN, PLAIN, spec("fill-mask")], ids=lambda of: of.task)
@pytest.mark.parametrize("padding", probes.PADDINGS)
def test_the_same_answers_pass(of: Spec, padding: str) -> None:
    case = compared(of, probe(of, padding), lambda name, value: None)
    assert (case.max_abs, case.rel_l2, case.label_flips) == (0.0, 0.0, None if of is PLAIN else 0)
    assert case.cosine_min == pytest.approx(1)
    assert case.compared > 0
    assert judged(case).passed


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("of", "output", "at"),
    [(TEXT, None, (0, 1)), (TOKEN, None, (3, 0, 2)), (PLAIN, None, (0, 0, 0)), (SPAN, "end_logits", (1, 0)),
     (SPAN, "start_logits", (1, 0))],
)  # fmt: skip
def test_what_is_not_finite_never_passes(of: Spec, output: str | None, at: Any, bad: float) -> None:
    for padding in ("none", "right"):
        case = compared(of, probe(of, padding), setting(at, bad, output))
        found = judged(case)
        assert not found.passed
        assert not case.finite
        generous = Limits(max_abs=1e30, rel_l2=1e30, cosine_min=-1, label_flips_max=1)
        assert not judged(case, generous).passed


@pytest.mark.parametrize(("of", "at"), [(TEXT, 2), (TOKEN, 2), (SPAN, 2), (PLAIN, 2)])
def test_a_masked_row_is_not_compared_but_must_be_finite(of: Spec, at: int) -> None:
    masked = probe(of, "masked_row")
    assert not masked.rows[at]
    other = compared(of, masked, setting(at, 99.0))
    assert (other.max_abs, other.finite) == (0.0, True)
    assert judged(other).passed
    spoilt = compared(of, masked, setting(at, NAN))
    assert not judged(spoilt).passed
    (found,) = missed([spoilt], DEFAULT_LIMITS["float32"])
    assert found.startswith("outputs that are not compared must be finite (")
    assert found.endswith(", 4 × 6, masked_row)")


@pytest.mark.parametrize(
    ("of", "padding", "at", "where"),
    [
        (TEXT, "none", (3, 1), "logits[3, 1], 4 × 6, none"),
        (TEXT, "masked_row", (3, 1), "logits[3, 1], 4 × 6, masked_row"),
        (TOKEN, "left", (2, 5, 1), "logits[2, 5, 1], 4 × 6, left"),
        (TOKEN, "masked_row", (3, 4, 2), "logits[3, 4, 2], 4 × 6, masked_row"),
        (PLAIN, "right", (0, 5, 0), "last_hidden_state[0, 5, 0], 4 × 6, right"),
        (SPAN, "masked_row", (3, 4), "start_logits[3, 4], 4 × 6, masked_row"),
    ],
)
@pytest.mark.parametrize("value", [50.0, NAN])
def test_the_worst_element_is_named(of: Spec, padding: str, at: Any, where: str, value: float) -> None:
    found = judged(compared(of, probe(of, padding), setting(at, value)))
    assert not found.passed
    assert found.worst.where == where


def test_padding_is_not_compared() -> None:
    right = probe(TOKEN, "right")
    row, token = np.argwhere(~right.compared)[0]
    assert compared(TOKEN, right, setting((row, token), 99.0)).max_abs == 0.0
    # A span's padding never is its best token.
    row, token = np.argwhere(~probe(SPAN, "right").compared)[0]
    case = compared(SPAN, probe(SPAN, "right"), setting((row, token), 99.0))
    assert (case.max_abs, case.label_flips) == (0.0, 0)


def test_compared_counts_texts_or_tokens() -> None:
    counts = {of.task: compared(of, probe(of, "masked_row"), lambda name, value: None).compared for of in
              (TEXT, TOKEN, SPAN)}  # fmt: skip
    assert counts == {"text-classification": 3, "token-classification": 18, "question-answering": 3}


def test_label_flips() -> None:
    at = probe(TEXT, "none")
    label = parity.answer(Fake(TEXT), at, TEXT)[0]["logits"][1].argmax()
    case = compared(TEXT, at, setting((1, (label + 1) % 3), 9.0))
    assert case.label_flips == 1
    assert judged(case, Limits(label_flips_max=0.25)).passed
    found = judged(case, Limits(label_flips_max=0.2))
    assert missed([case], Limits(label_flips_max=0.2)) == ["label_flips_max must be at most 0.2; got 0.25"]
    assert (found.worst.metric, found.worst.value) == ("label_flips_max", 0.25)


def test_flips_of_both_ends_of_a_span_are_counted() -> None:
    at = probe(SPAN, "none")
    kept = parity.answer(Fake(SPAN), at, SPAN)[0]
    flipped = {name: (0, int(value[0].argmin())) for name, value in kept.items()}

    def edit(name: str, value: Array) -> None:
        value[flipped[name]] = 9.0

    assert compared(SPAN, at, edit).label_flips == 2


def test_metrics() -> None:
    at = probe(TEXT, "none", (2, 4))
    answers = ProbeOutputs({"logits": np.array([[1.0, 0.0], [0.0, 2.0]])})
    other = ProbeOutputs({"logits": np.array([[1.0, 0.0], [2.0, 0.0]])})
    case = parity.compare(at, TEXT, other, answers)
    assert (case.max_abs, case.cosine_min, case.cosine_mean, case.label_flips) == (2.0, 0.0, 0.5, 1)
    assert case.rel_l2 == pytest.approx(math.sqrt(8 / 5))


def test_one_bad_row_of_four_does_not_move_the_median_cosine_of_its_batch() -> None:
    """A right static INT8 with sharp attention was refused for one random row of four."""
    at = probe(TEXT, "none", (4, 4))
    right = np.array([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0], [2.0, 1.0]])
    other = right.copy()
    other[1] = (2.0, 0.5)
    case = parity.compare(at, TEXT, ProbeOutputs({"logits": other}), ProbeOutputs({"logits": right}))
    assert case.cosine_mean < 0.91 and case.cosine_median == parity.cosine_median([case]) == pytest.approx(1.0)
    other[:3] = np.nan
    assert math.isnan(parity.cosine_median([parity.compare(at, TEXT, ProbeOutputs({"logits": other}), ProbeOutputs({"logits": right}))]))


@pytest.mark.parametrize(("margin", "wrong", "flips"), [(1e-6, 9.0, 0), (1e-3, 9.0, 1), (1e-6, math.nan, 1)])
def test_a_label_that_ties_with_another_does_not_flip(margin: float, wrong: float, flips: int) -> None:
    """Of many tokens, or of a constant classifier, some have two best labels that are closer than float32 rounds: either is right."""
    at = probe(TEXT, "none", (2, 4))
    right = np.array([[8.0, 8.0 + margin, 0.0], [0.0, 2.0, 1.0]])
    other = right.copy()
    other[0, 0] = wrong
    assert parity.compare(at, TEXT, ProbeOutputs({"logits": other}), ProbeOutputs({"logits": right})).label_flips == flips


@pytest.mark.parametrize(("right", "other", "flips"), [
    ((4.0, 1.0, -2.0), (4.0, -1.0, -2.0), 1), ((4.0, 1.0, -2.0), (1.0, 4.0, -2.0), 0), ((4.0, 1e-6, -2.0), (4.0, -1e-6, -2.0), 0),
    ((4.0, 1.0, -2.0), (4.0, math.nan, -2.0), 1), ((1.0,), (-1.0,), 1), ((1.0,), (2.0,), 0),
])  # fmt: skip
def test_labels_that_a_text_may_have_several_of_flip_at_one_half(right: Any, other: Any, flips: int) -> None:
    """Each is given or not, whatever the best is."""
    several = spec(multi_label=True)
    (a, b), at = (np.array([values, values[::-1]]) for values in (other, right)), probe(several, "none", (2, 4))
    a[1] = b[1]
    assert parity.compare(at, several, ProbeOutputs({"logits": a}), ProbeOutputs({"logits": b})).label_flips == flips


@pytest.mark.parametrize(("margin", "flips"), [(2e-4, 0), (5e-3, 1)])
def test_labels_that_share_a_large_offset_have_an_order(margin: float, flips: int) -> None:
    """At 1,000 float32 has steps of 6e-5; a difference of 5e-3 is 80 of them."""
    at = probe(TEXT, "none", (2, 4))
    right = np.array([[1000.0, 1000.0 + margin, 1000.0], [0.0, 2.0, 1.0]])
    other = right.copy()
    other[0, :2] = right[0, 1::-1]
    assert parity.compare(at, TEXT, ProbeOutputs({"logits": other}), ProbeOutputs({"logits": right})).label_flips == flips


def test_the_largest_output_is_that_of_all_probes() -> None:
    small, large = np.array([[1.0, -2.0]]), np.array([[3.0, -40.0]])
    assert parity.peak([ProbeOutputs({"logits": small}), ProbeOutputs({"logits": large})]) == 40.0
    assert parity.peak([ProbeOutputs({"logits": small[:0]})]) == parity.peak([]) == 0.0


def test_one_number_near_zero_is_held_against_the_usual_size() -> None:
    """A re-ranker's logits range from -11 to 8, and some are near zero: their rounding is that of the others."""
    one = TEXT.model_copy(update={"labels": ("relevance",)})
    at = next(p for p in probes.grid(one, [(1, 8)], None) if p.padding == "none")
    theirs, usual = np.array([[0.9]], np.float32), {"logits": 5.0}

    def passes(error: float) -> bool:
        return judged(parity.compare(at, one, ProbeOutputs({"logits": theirs + np.float32(error)}), ProbeOutputs({"logits": theirs}), usual)).passed

    assert passes(1.2e-5) and not passes(1e-4)


@pytest.mark.parametrize(("wrong", "passes"), [((1.0, 0.0), False), ((0.0, 0.5), True), ((0.0, 5000.0), False), ((0.0, 0.0), True)])
def test_each_of_several_numbers_is_held_to_its_own_size(wrong: tuple[float, float], passes: bool) -> None:
    """A rating without its bias was delivered: beside a price of 200,000 it is five millionths of the output."""
    at = next(p for p in probes.grid(VALUES, [(2, 8)], None) if p.padding == "none")
    right = np.array([[3.0, 2e5], [4.0, 1e5]])
    theirs = ProbeOutputs({"logits": right})
    case = parity.compare(at, VALUES, ProbeOutputs({"logits": right + np.array(wrong)}), theirs, parity.scales([theirs], VALUES))
    assert judged(case, Limits(max_abs=2.0, rel_l2=1e-5)).passed == passes
    assert case.max_abs == max(wrong)


def test_a_lone_logit_near_zero_is_held_against_the_usual_size() -> None:
    at = Probe("1 × 1, none", "none", {}, np.ones((1, 1), bool), np.ones(1, bool))
    at.inputs["input_ids"] = np.ones((1, 1), np.int64)
    big, small = np.array([[3.0, -4.0, 0.0]]), np.array([[1e-3]])
    usual = parity.scales([ProbeOutputs({"logits": big}), ProbeOutputs({"logits": small})], TEXT)
    assert usual == {"logits": pytest.approx(2.5, rel=1e-6)}
    rounded = ProbeOutputs({"logits": small + 2e-7})
    assert parity.compare(at, TEXT, rounded, ProbeOutputs({"logits": small})).rel_l2 == pytest.approx(2e-4)
    assert judged(parity.compare(at, TEXT, rounded, ProbeOutputs({"logits": small}), usual)).passed
    for wrong in (small + 1e-3, small * np.nan):
        assert not judged(parity.compare(at, TEXT, ProbeOutputs({"logits": wrong}), ProbeOutputs({"logits": small}), usual)).passed


def test_the_direction_of_a_vector_near_zero_is_not_compared() -> None:
    """One logit near zero changes its sign in INT8; a larger one must not, nor may one near zero become large."""
    at = next(p for p in probes.grid(TEXT, [(4, 8)], None) if p.padding == "none")
    usual = {"logits": 1.0}

    def cosine(got: float, expected: float) -> float:
        values = ({"logits": np.full((4, 1), value, np.float32)} for value in (got, expected))
        mine, theirs = (ProbeOutputs(one) for one in values)
        return parity.compare(at, TEXT, mine, theirs, usual).cosine_mean

    assert cosine(-0.01, 0.02) == 1.0 and cosine(0.02, -0.02) == 1.0
    assert cosine(-0.2, 0.2) == cosine(-0.5, 0.02) == -1.0
    assert math.isnan(cosine(math.nan, 0.02))


@pytest.mark.parametrize("size", [1e-9, 1e-15])
def test_small_outputs_are_compared_as_others_are(size: float) -> None:
    at = probe(TEXT, "none", (2, 4))
    right = np.array([[1.0, -2.0, 0.5], [0.0, 2.0, 1.0]])
    case = parity.compare(at, TEXT, ProbeOutputs({"logits": right * size * (1 + 1e-7)}), ProbeOutputs({"logits": right * size}))
    assert case.cosine_min == pytest.approx(1.0) and case.rel_l2 == pytest.approx(1e-7, rel=1e-3)
    wrong = parity.compare(at, TEXT, ProbeOutputs({"logits": right[::-1] * size}), ProbeOutputs({"logits": right * size}))
    assert wrong.cosine_min < 0.5 and wrong.rel_l2 > 0.5


def test_zero_vectors() -> None:
    at = probe(PLAIN, "none", (1, 1))
    zero, one = ProbeOutputs({"last_hidden_state": np.zeros((1, 3))}), ProbeOutputs({"last_hidden_state": np.ones((1, 3))})
    assert judged(parity.compare(at, PLAIN, zero, zero)).passed
    assert not judged(parity.compare(at, PLAIN, one, zero)).passed
    assert not judged(parity.compare(at, PLAIN, zero, one)).passed


def test_nothing_to_compare() -> None:
    at = Probe("empty", "none", probe(TOKEN, "none").inputs, np.zeros((4, 6), bool), np.zeros(4, bool))
    case = compared(TOKEN, at, lambda name, value: None)
    assert (case.compared, case.max_abs, case.cosine_min) == (0, 0.0, 1.0)
    assert judged(case).passed


def test_other_shapes_are_an_error() -> None:
    at = probe(TEXT, "none")
    with pytest.raises(WrongAnswer, match=r"logits has shape \[4, 2\], the reference \[4, 3\] \(4 × 6, none\)"):
        parity.compare(at, TEXT, ProbeOutputs({"logits": np.zeros((4, 2))}), ProbeOutputs({"logits": np.zeros((4, 3))}))


@pytest.mark.parametrize(("of", "shape", "expected"), [
    (TEXT, (3,), r"must have shape \[4, …\]; got \[3\]"), (SPAN, (4, 5), r"\[4, 6\]; got \[4, 5\]"),
    (TOKEN, (4, 7, 3), r"\[4, 6, …\]; got \[4, 7, 3\]"),
])  # fmt: skip
def test_answers_of_another_form_are_an_error(of: Spec, shape: tuple[int, ...], expected: str) -> None:
    session = Fake(of)
    session.fetch = lambda: dict.fromkeys(of.outputs, np.zeros(shape, np.float32))  # type: ignore[method-assign]
    with pytest.raises(WrongAnswer, match=expected):
        parity.answer(session, probe(of, "none"), of)


@pytest.mark.parametrize(("factor", "refused"), [(1.0, False), (1.01, False), (0.0, False), (1.03, True), (0.97, True)])
def test_a_normalised_embedding_has_length_1(factor: float, refused: bool) -> None:
    """3 % more is no change of direction, and in INT8 less than rounding; dot products of such embeddings are 6 % off."""
    of = spec("feature-extraction", outputs=("sentence_embedding",), pooling="mean", normalize=True)

    def scale(name: str, found: Array) -> None:
        found *= factor / np.linalg.norm(found, axis=1, keepdims=True)

    with pytest.raises(WrongAnswer, match=r"must have length 1, .*; got (1\.03|0\.97)") if refused else nullcontext():
        parity.answer(Fake(of, scale), probe(of, "none"), of)


def test_a_missing_answer_is_an_error() -> None:
    session = Fake(SPAN)
    session.fetch = lambda: {"start_logits": np.zeros((4, 6), np.float32)}  # type: ignore[method-assign]
    with pytest.raises(WrongAnswer, match="expected outputs start_logits, end_logits; got start_logits"):
        parity.answer(session, probe(SPAN, "none"), SPAN)


@pytest.mark.parametrize(("of", "token"), [(TEXT, None), (TOKEN, 4), (SPAN, 4)], ids=["text", "token", "span"])
def test_a_comparison_names_row_and_token(of: Spec, token: int | None) -> None:
    at = probe(of, "masked_row", (3, 8))

    def spoil(name: str, value: Array) -> None:
        value[2 if of.granularity == "text" else (2, 4)] += 50

    found = compared(of, at, spoil)
    assert (found.probe, found.row, found.token) == (at.name, 2, token)


def case(**changed: Any) -> Case:
    return measured.case(**{"max_abs": 0.0, "rel_l2": 0.0, "cosine_min": 1.0, "cosine_mean": 1.0, **changed})


def test_summary_takes_the_worst_of_all_cases() -> None:
    cases = [case(max_abs=1, cosine_min=0.5, label_flips=1), case(rel_l2=2, cosine_mean=0.9, label_flips=2)]
    assert Comparison.over(cases) == Comparison(
        max_abs=1, rel_l2=2, cosine_min=0.5, cosine_mean=0.9, label_flips=3, compared=20
    )
    assert Comparison.over([case(label_flips=None)]).label_flips is None


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("metric", ["max_abs", "rel_l2", "cosine_min", "cosine_mean"])
def test_nan_in_any_case_wins(metric: str, order: int) -> None:
    cases = [case(), case(**{metric: NAN}, where="here"), case(**{metric: 0.0})][::order]
    assert math.isnan(getattr(Comparison.over(cases), metric))
    found = parity.judge(cases, Limits(**{metric: 1.0}), None)
    assert not found.passed
    assert found.worst.where == "here"
    assert "got nan" in missed(cases, Limits(**{metric: 1.0}))[0]


def test_worst_is_the_metric_that_uses_most_of_its_limit() -> None:
    limits = Limits(max_abs=1.0, rel_l2=0.1, cosine_min=0.9)
    found = parity.judge([case(max_abs=0.5, rel_l2=0.09, cosine_min=0.95)], limits, None)
    assert (found.passed, found.worst.metric, found.worst.value, found.worst.limit) == (True, "rel_l2", 0.09, 0.1)
    cases = [case(max_abs=3.0), case(cosine_min=0.1, where="there")]
    found = parity.judge(cases, limits, None)
    assert (found.passed, found.worst.metric, found.worst.where) == (False, "cosine_min", "there")
    assert [failure.split()[0] for failure in missed(cases, limits)] == ["max_abs", "cosine_min"]


def test_exactly_at_the_limit_passes() -> None:
    limits = Limits(max_abs=0.5, cosine_min=0.5, label_flips_max=0.1)
    assert parity.judge([case(max_abs=0.5, cosine_min=0.5, label_flips=1)], limits, None).passed
    assert parity.judge([case()], Limits(max_abs=0.0, label_flips_max=0.0, cosine_min=1.0), None).passed
    assert not parity.judge([case(max_abs=1e-9)], Limits(max_abs=0.0), None).passed


def test_limits_over() -> None:
    low = Limits(max_abs=1.0, rel_l2=2.0)
    assert Limits(max_abs=0.0, cosine_min=0.5).over(low) == Limits(max_abs=0.0, rel_l2=2.0, cosine_min=0.5)
    assert Limits().over(low) == low
    exact = DEFAULT_LIMITS["float32"]
    assert None not in (exact.max_abs, exact.rel_l2, exact.cosine_min, exact.label_flips_max)
    for precision, limits in DEFAULT_LIMITS.items():
        if precision != "float32":
            assert None not in (limits.error_ratio_max, limits.bias_max, limits.flip_margin_max, limits.cosine_median_min)


# Results


def test_report_survives_json_with_nan() -> None:
    worst = Worst(metric="max_abs", value=NAN, limit=1.0, where="logits[0, 0]")
    cases = [case(max_abs=NAN, cosine_min=-math.inf, rel_l2=math.inf)]
    found = Report(
        bertopt_version="0", recipe={}, environment={}, model={},
        stages=[
            Stage(index=0, name="a", pass_="use_sdpa", status="failed",
                  parity=Parity(passed=False, worst=worst, cases=cases, limits=Limits()),
                  latency=[Latency(kind="mix", batch=None, sequence=None, n=1, p50_ms=NAN, p90_ms=1, p99_ms=None,
                                   texts_per_s=1, vs_reference=Ratio(ratio=2, low=1.9, high=2.1))]),
        ],
    )  # fmt: skip
    text = found.model_dump_json(by_alias=True)
    again = Report.model_validate_json(text)
    assert again.model_dump_json(by_alias=True) == text
    stage = again.stage("a")
    assert stage.parity is not None
    assert stage.latency is not None
    assert math.isnan(stage.parity.worst.value)
    assert math.isnan(stage.parity.cases[0].max_abs)
    assert (stage.parity.cases[0].cosine_min, stage.parity.cases[0].rel_l2) == (-math.inf, math.inf)
    assert stage.latency[0].vs_reference == Ratio(ratio=2, low=1.9, high=2.1)
    assert '"verdict":"FASTER"' in text
    assert '"pass":"use_sdpa"' in text
    assert stage.mix() is stage.latency[0]
