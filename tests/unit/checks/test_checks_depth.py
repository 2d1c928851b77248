"""Invariance, rank agreement, intervals of accuracy, evidence and records, with made-up sessions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertopt.checks import invariance, parity, probes, quality, ranking, worst_case
from bertopt.checks.measurements import StageMeasurements
from bertopt.checks.parity import DEFAULT_LIMITS
from bertopt.core import Profile, Session, ShapeLimits, Spec
from bertopt.pipeline.measurement_cache import Records
from bertopt.results import Case, Comparison, Invariance, Worst
from tests.support.specs import spec

Array = np.ndarray
NAN = math.nan


TEXT, TOKEN, SPAN = spec(), spec("token-classification"), spec("question-answering")
Flaw = Callable[[dict[str, Array], Array], Array]


class Fake(Session):
    """Every token answers by its id and how many valid tokens are before it; `flaw(inputs, tokens [B, S, 3])` spoils it."""

    def __init__(self, of: Spec, flaw: Flaw = lambda inputs, tokens: tokens) -> None:
        self.spec, self.flaw = of, flaw
        self.shapes: list[tuple[int, ...]] = []

    def load(self, inputs: Mapping[str, Array]) -> None:
        self.inputs = dict(inputs)

    def step(self) -> None:
        ids, mask = self.inputs["input_ids"], self.inputs["attention_mask"]
        self.shapes.append(ids.shape)
        position = np.cumsum(mask, axis=1)
        tokens = np.sin(ids[..., None] * [1.0, 2.0, 3.0] + 0.1 * position[..., None])
        self.tokens = self.flaw(self.inputs, tokens)

    def fetch(self) -> dict[str, Array]:
        mask = self.inputs["attention_mask"][..., None]
        text = (self.tokens * mask).sum(axis=1) / np.maximum(mask.sum(axis=1), 1)
        by = {"token": self.tokens, "text": text}
        return {
            name: (by.get(self.spec.granularity, self.tokens[..., i])).astype(np.float32)
            for i, name in enumerate(self.spec.outputs)
        }


def alone(lengths: list[int]) -> list[dict[str, Array]]:
    """Texts [1, S] without padding."""
    rng = np.random.default_rng(1)
    return [
        {"input_ids": rng.integers(4, 40, (1, n)), "attention_mask": np.ones((1, n), np.int64),
         "token_type_ids": np.zeros((1, n), np.int64)}
        for n in lengths
    ]  # fmt: skip


TEXTS = alone([2, 3, 5, 8, 13, 21, 30])


def measured(of: Spec, flaw: Flaw = lambda inputs, tokens: tokens) -> Invariance:
    found = invariance.measure(Fake(of, flaw), of, TEXTS, ShapeLimits(longest=of.max_length))
    assert found is not None
    return found


# Invariance


@pytest.mark.parametrize("of", [TEXT, TOKEN, SPAN], ids=lambda of: of.task)
@pytest.mark.parametrize("left_padding_invariant", [False, True])
def test_a_steady_model_is_steady(of: Spec, left_padding_invariant: bool) -> None:
    found = measured(of.model_copy(update={"left_padding_invariant": left_padding_invariant}))
    assert found.max_abs < 1e-6
    assert found.cosine_min > 0.999999
    assert found.texts == len(TEXTS)


def shifted(inputs: dict[str, Array], tokens: Array) -> Array:
    """As absolute positions do: by column, not by the tokens before."""
    return tokens + np.arange(tokens.shape[1])[:, None]


def batch_scale(inputs: dict[str, Array], tokens: Array) -> Array:
    """As dynamic INT8 does: one scale for the whole batch, padding included."""
    scale = np.abs(inputs["input_ids"]).max() / 7
    return np.asarray(np.round(tokens * scale) / scale)


def neighbour(inputs: dict[str, Array], tokens: Array) -> Array:
    return np.asarray(tokens + tokens[:1] * (len(tokens) > 1))


def no_mask(inputs: dict[str, Array], tokens: Array) -> Array:
    return np.asarray(tokens + 0.01 * tokens.mean(axis=1, keepdims=True))


def copies(inputs: dict[str, Array], tokens: Array) -> Array:
    """As rows that are alike are computed once, and given back in the wrong order."""
    alike = len(tokens) == 2 and bool((inputs["input_ids"][0] == inputs["input_ids"][1]).all())
    return np.asarray(tokens * [[[1.0]], [[0.5]]] if alike else tokens)


@pytest.mark.parametrize("of", [TEXT, TOKEN, SPAN], ids=lambda of: of.task)
@pytest.mark.parametrize(
    ("flaw", "words"), [(copies, "beside its copy"), (batch_scale, "others"), (neighbour, "others"), (no_mask, "padded on the right")]
)
def test_what_depends_on_company_or_padding_is_found(of: Spec, flaw: Flaw, words: str) -> None:
    found = measured(of, flaw)
    assert found.max_abs > 1e-3
    assert words in found.where


def test_left_padding_counts_only_where_positions_allow_it() -> None:
    assert measured(TOKEN, shifted).max_abs < 1e-6
    found = measured(TOKEN.model_copy(update={"left_padding_invariant": True}), shifted)
    assert found.max_abs > 0.5
    assert "padded on the left" in found.where


@pytest.mark.parametrize(("precision", "looked"), [("float32", True), ("bfloat16", False), ("int8", False)])
def test_reduced_precision_is_not_padded_on_the_left(precision: Any, looked: bool) -> None:
    of = TOKEN.model_copy(update={"left_padding_invariant": True})
    found = invariance.measure(Fake(of, shifted), of, TEXTS, ShapeLimits(longest=of.max_length), precision=precision)
    assert found is not None and (found.max_abs > 0.5) == looked


def test_a_text_is_padded_with_the_padding_token_and_its_own_inputs_stay() -> None:
    def check(inputs: dict[str, Array], tokens: Array) -> Array:
        hidden = inputs["attention_mask"] == 0
        assert (inputs["input_ids"][hidden] == TEXT.pad_id).all()
        assert inputs["attention_mask"].sum(axis=1).min() >= 2
        return tokens

    assert measured(TOKEN, check).max_abs == 0


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("bad", [NAN, math.inf])
def test_what_is_not_finite_is_never_steady(bad: float) -> None:
    def spoil(inputs: dict[str, Array], tokens: Array) -> Array:
        return tokens + (bad if len(tokens) == 3 else 0.0)

    found = measured(TOKEN, spoil)
    assert math.isnan(found.max_abs) and math.isnan(found.cosine_min)
    assert not found.max_abs <= 1e30


def test_only_shapes_that_the_form_can_run() -> None:
    session = Fake(TOKEN)
    limits = ShapeLimits(longest=8, profiles=(Profile(opt=(1, 1), max=(2, 8)),))
    found = invariance.measure(session, TOKEN, TEXTS, limits)
    assert found is not None and found.texts == 4
    assert max(batch for batch, _ in session.shapes) == 2
    assert max(width for _, width in session.shapes) == 8
    assert invariance.measure(session, TOKEN, TEXTS, ShapeLimits(longest=1)) is None


def test_no_batch_mixes_the_bounds_of_two_profiles() -> None:
    session = Fake(TOKEN)
    profiles = (Profile(opt=(1, 1), max=(1, 32)), Profile(opt=(1, 1), max=(3, 24)))
    found = invariance.measure(session, TOKEN, TEXTS, ShapeLimits(longest=32, profiles=profiles))
    assert found is not None and found.texts == len(TEXTS)
    assert all(any(profile.accepts(*shape) for profile in profiles) for shape in session.shapes)
    assert {batch for batch, _ in session.shapes} == {1, 2, 3}


def test_float32_is_limited_and_reduced_precision_is_not() -> None:
    limits = {precision: limit.invariance_max for precision, limit in DEFAULT_LIMITS.items()}
    assert limits == {"float32": 1e-4, "float16": None, "bfloat16": None, "float8": None, "int8": None}


# Rank agreement


def embeddings(n: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal((n, 16)).astype(np.float32)


def test_the_same_embeddings_agree_whatever_their_length() -> None:
    of = embeddings(60)
    found = ranking.measure(3.5 * of, of)
    assert found is not None
    assert found.spearman == pytest.approx(1)
    assert (found.top_k_overlap, found.k, found.n) == (1.0, 10, 60)


def test_other_embeddings_do_not_agree() -> None:
    found = ranking.measure(embeddings(60, 1), embeddings(60))
    assert found is not None
    assert abs(found.spearman) < 0.1
    assert found.top_k_overlap < 0.4


def test_spearman_is_pearson_of_ranks_with_ties_averaged() -> None:
    angles = np.deg2rad([0.0, 10.0, 30.0])
    # Similarities of the pairs (0, 1), (0, 2), (1, 2): once ordered 10° > 20° > 30°, once 20° > 10° > 30°.
    of = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    other = np.deg2rad([0.0, 20.0, 30.0])
    found = ranking.measure(np.stack([np.cos(other), np.sin(other)], axis=1), of)
    assert found is not None
    assert found.spearman == pytest.approx(0.5)
    assert found.k == 1
    # The nearest of the first and of the last stay; the middle one's moves from the first to the last.
    assert found.top_k_overlap == pytest.approx(2 / 3)


def test_equal_similarities_share_a_rank() -> None:
    """Ranks of (3, 1, 3, 2) are 3.5, 1, 3.5, 2; against 1, 2, 3, 4 their correlation is −1 / sqrt(4.5 · 5)."""
    found = ranking._spearman(np.array([3.0, 1.0, 3.0, 2.0]), np.arange(4.0))
    assert found == pytest.approx(-1 / math.sqrt(4.5 * 5))
    assert math.isnan(ranking._spearman(np.ones(4), np.arange(4.0)))


@pytest.mark.parametrize("bad", [NAN, math.inf])
def test_embeddings_that_are_not_finite_have_no_rank(bad: float) -> None:
    of = embeddings(12)
    broken = of.copy()
    broken[3, 5] = bad
    for pair in ((broken, of), (of, broken)):
        found = ranking.measure(*pair)
        assert found is not None
        assert math.isnan(found.spearman) and math.isnan(found.top_k_overlap)


def test_collapsed_embeddings_have_no_rank() -> None:
    found = ranking.measure(np.ones((12, 16)), embeddings(12))
    assert found is not None and math.isnan(found.spearman)
    assert ranking.measure(embeddings(12), np.ones((12, 16))) is None, "there is no order to keep"


def test_few_texts() -> None:
    assert ranking.measure(embeddings(2), embeddings(2)) is None
    ks = {n: found.k for n in (3, 9, 10, 49, 50, 200) if (found := ranking.measure(embeddings(n), embeddings(n)))}
    assert ks == {3: 1, 9: 1, 10: 2, 49: 9, 50: 10, 200: 10}


# Quality


def test_wilson_is_the_published_interval() -> None:
    # Newcombe 1998, table I, method 3: 81 of 263, 15 of 148, 0 of 20, 1 of 29.
    for successes, n, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611),
                                    (1, 29, 0.0061, 0.1718)):  # fmt: skip
        assert quality.wilson(successes, n) == pytest.approx((low, high), abs=1e-4)
    assert quality.wilson(20, 20)[1] == 1.0


def answers(both: int, only: int, other: int, neither: int) -> tuple[list[bool], list[bool]]:
    """Right or wrong, of the one and of the other, for so many texts of each kind."""
    mine = [True] * (both + only) + [False] * (other + neither)
    reference = [True] * both + [False] * only + [True] * other + [False] * neither
    return mine, reference


def test_the_paired_interval_is_newcombe_s() -> None:
    # Newcombe 1998 (Statistics in Medicine 17, 2635), table III, method 10: 36, 12, 2, 0 of 50.
    low, high = quality.paired(*answers(36, 12, 2, 0))
    assert (low, high) == pytest.approx((0.0569, 0.3404), abs=2e-4)
    backwards = quality.paired(*reversed(answers(36, 12, 2, 0)))
    assert backwards == pytest.approx((-high, -low))


def test_no_change_in_few_texts_proves_little() -> None:
    few, many = (quality.paired(*answers(n, 0, 0, 0)) for n in (10, 1000))
    assert few[0] < -0.2 and few[1] > 0.2
    assert -0.01 < many[0] < 0 < many[1] < 0.01


def test_quality_of_a_stage_and_of_the_reference() -> None:
    mine, reference = answers(80, 2, 10, 8)
    found = quality.measure(mine, reference)
    assert (found.metric, found.value, found.reference, found.n) == ("accuracy", 0.82, 0.9, 100)
    assert found.change == pytest.approx(-0.08)
    assert found.low is not None and found.high is not None and found.low < 0.82 < found.high
    assert found.change_low is not None and found.change_high is not None
    assert found.change_low < -0.08 < found.change_high < 0
    first = quality.measure(reference, None)
    assert (first.reference, first.change, first.change_low, first.change_high) == (0.9, 0.0, None, None)


def test_the_paired_interval_wants_the_same_texts() -> None:
    with pytest.raises(ValueError, match="one output of the reference for each of 3 texts; got 2"):
        quality.paired([True] * 3, [True] * 2)


# Evidence

WORST = Worst(metric="max_abs", value=1.0, limit=0.1, where="logits[1, 2, 0]")


def case(**fields: Any) -> Case:
    given = {"batch": 2, "sequence": 6, "padding": "none", "max_abs": 1.0, "rel_l2": 0.0, "cosine_min": 1.0,
             "cosine_mean": 1.0, "label_flips": 0, "compared": 2, "where": "logits[1, 2, 0]"}  # fmt: skip
    return Case.model_validate(given | fields)


def text_probes(of: Spec, texts: list[Any], ids: list[int]) -> list[probes.Probe]:
    row = np.array([ids] * len(texts))
    inputs = {"input_ids": row, "attention_mask": (row != of.pad_id).astype(np.int64), "token_type_ids": row * 0}
    return list(probes.texts(of, lambda batch: [inputs], texts))


def word(token: int) -> str:
    return f"w{token}"


def test_the_worst_text_is_shown_with_its_tokens() -> None:
    found = text_probes(TOKEN, ["one", "three"], [5, 6, 7, 8, 3, 3])
    shown = worst_case.show(WORST, case(probe="texts 0, 1", row=1, token=2), found, word)
    assert (shown.text, shown.tokens, shown.token) == ("three", ["w5", "w6", "w7", "w8"], 2)
    assert shown.where == WORST.where


def test_pairs_are_shown_whole_and_long_texts_cut() -> None:
    found = text_probes(TEXT, [("a query", "x" * 2000)], [5, 6])
    shown = worst_case.show(WORST, case(probe="texts 0", row=0), found, word)
    assert shown.text is not None and shown.token is None
    assert shown.text.startswith("a query ‖ xxx") and len(shown.text) == worst_case.LONGEST_TEXT + 1


def test_random_probes_show_ids_and_what_the_mask_hides() -> None:
    found = list(probes.grid(TOKEN, [(2, 8)], None))
    at = next(p for p in found if p.padding == "holes" and p.shape == (2, 8))
    shown = worst_case.show(WORST, case(probe=at.name, row=1, token=0), found, word)
    assert shown.text is None and shown.tokens is not None and shown.token == 0
    ids, mask = at.inputs["input_ids"][1], at.inputs["attention_mask"][1]
    last = int(np.flatnonzero(mask)[-1])
    assert shown.tokens == [str(i) if valid else f"({i})" for i, valid in zip(ids, mask, strict=True)][: last + 1]


@pytest.mark.parametrize("token", [0, 3, 100, 180, 199])
def test_long_rows_are_cut_to_a_window_around_the_worst_token(token: int) -> None:
    found = text_probes(TOKEN, ["long"], list(range(100, 300)))
    shown = worst_case.show(WORST, case(probe="texts 0", row=0, token=token), found, word)
    assert shown.tokens is not None and shown.token is not None
    assert len(shown.tokens) == worst_case.WINDOW
    assert shown.tokens[shown.token] == f"w{100 + token}"


def test_what_no_probe_holds_is_left_as_it_is() -> None:
    for at in (case(probe="8 × 16, under the clock", row=0, token=0), case(), case(probe="texts 0")):
        assert worst_case.show(WORST, at, text_probes(TOKEN, ["one"], [5]), word) == WORST


@pytest.mark.parametrize(("of", "token"), [(TEXT, None), (TOKEN, 4), (SPAN, 4)], ids=["text", "token", "span"])
def test_a_comparison_names_row_and_token(of: Spec, token: int | None) -> None:
    at = next(p for p in probes.grid(of, [(3, 8)], None) if p.padding == "masked_row")

    def spoil(inputs: dict[str, Array], tokens: Array) -> Array:
        new = tokens.copy()
        new[2, 4] += 50
        return new

    mine, theirs = (parity.answer(session, at, of) for session in (Fake(of, spoil), Fake(of)))
    found = parity.compare(at, of, mine, theirs)
    assert (found.probe, found.row, found.token) == (at.name, 2, token)


# Records


def found(**fields: Any) -> StageMeasurements:
    zero = Comparison(max_abs=0, rel_l2=0, cosine_min=1, cosine_mean=1, label_flips=None, compared=1)
    given = {
        "cases": [case(max_abs=NAN)], "vs_parent": zero, "invariance": Invariance(max_abs=NAN, cosine_min=-math.inf, texts=1, where="x"),
        "predictions": [[1.0], [NAN]], "effects": {"nodes": (2, 2)}, "changed": True, "facts": {"threads": 1}, "peak_rss_bytes": 5,
    }  # fmt: skip
    return StageMeasurements.model_validate(given | fields)


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    records = Records(tmp_path / "checks", ["reference", 1])
    assert records.read(["a", None]) is None
    records.write(["a", None], found())
    again = records.read(["a", None])
    assert again is not None
    assert again.model_dump_json() == found().model_dump_json()
    assert math.isnan(again.cases[0].max_abs) and again.predictions is not None and math.isnan(again.predictions[1][0])
    assert [path.suffix for path in tmp_path.rglob("*") if path.is_file()] == [".json"]


def test_records_of_other_inputs_or_versions_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Records(tmp_path, ["reference", 1]).write(["a", "b"], found())
    assert Records(tmp_path, ["reference", 1]).read(["a", "b"]) is not None
    assert Records(tmp_path, ["reference", 2]).read(["a", "b"]) is None
    assert Records(tmp_path, ["reference", 1]).read(["a", None]) is None
    monkeypatch.setattr("bertopt.pipeline.measurement_cache.MEASURING", ("checks",))
    assert Records(tmp_path, ["reference", 1]).read(["a", "b"]) is None
