"""A text's outputs among others and with padding, with made-up sessions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from bertopt.checks import invariance
from bertopt.checks.parity import DEFAULT_LIMITS
from bertopt.core import Profile, Session, ShapeLimits, Spec
from bertopt.results import Invariance
from tests.support.specs import spec

Array = np.ndarray

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
@pytest.mark.parametrize("bad", [math.nan, math.inf])
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
