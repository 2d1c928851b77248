"""Tokens beside padding: a few of each row, which a median of all tokens does not show."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bertopt.checks import beside_padding, padding_patterns
from bertopt.checks.probes import Probe
from bertopt.results import Limits
from tests.support.measured import case
from tests.support.specs import TAGS

BF16 = Limits(cosine_median_min=0.99)


def batch(padding: str) -> Probe:
    return next(probe for probe in padding_patterns.probes(TAGS, 32) if probe.padding == padding)


def differences(probe: Probe, side: int, distance: int) -> np.ndarray:
    """0.5 for tokens with padding `distance` places before (`side` -1) or behind them and none nearer, else 0.01."""
    mask = probe.inputs["attention_mask"] == 1
    found = np.full(mask.shape, 0.01)
    for row, column in np.argwhere(mask):
        steps = [column + side * step for step in range(1, distance + 1)]
        if all(0 <= at < mask.shape[1] for at in steps) and [bool(mask[row, at]) for at in steps] == [True] * (distance - 1) + [False]:
            found[row, column] = 0.5
    return found[probe.compared]


@pytest.mark.parametrize("distance", [1, 2, 4])
@pytest.mark.parametrize(("padding", "side"), [("left", -1), ("right", 1), ("holes", -1), ("holes", 1)])
def test_the_place_with_the_largest_median_counts(padding: str, side: int, distance: int) -> None:
    probe = batch(padding)
    found = differences(probe, side, distance)
    assert beside_padding.largest_median(probe, found) == 0.5 and np.median(found) == 0.01


def test_the_ends_of_a_row_are_no_padding() -> None:
    probe = batch("left")
    last = np.zeros(probe.compared.shape)
    last[:, -1] = 0.5
    assert beside_padding.largest_median(probe, last[probe.compared]) == 0


def test_values_that_are_no_numbers_are_the_largest() -> None:
    probe = batch("left")
    found = differences(probe, -1, 2)
    assert math.isnan(beside_padding.largest_median(probe, np.where(found == 0.5, np.nan, found)) or 0)


def test_batches_without_padding_say_nothing() -> None:
    probe = batch("right")
    whole = Probe("whole", "none", {"attention_mask": np.ones((32, 16), np.int64)}, np.ones((32, 16), bool), np.ones(32, bool))
    assert beside_padding.largest_median(whole, np.ones(512)) is None
    few = Probe("few", "right", {name: array[:4] for name, array in probe.inputs.items()}, probe.compared[:4], probe.rows[:4])
    assert beside_padding.largest_median(few, np.ones(int(few.compared.sum()))) is None


@pytest.mark.parametrize(
    ("padding", "beside", "limits", "named"),
    [
        ("left", 0.03, BF16, "padding on the left"), ("left", 0.014, BF16, None), ("holes", 0.03, BF16, "holes in the mask"),
        ("right", 0.03, BF16, "padding on the right"), ("left", math.nan, BF16, "padding on the left"), ("left", 0.03, Limits(rel_l2=0.5), None),
        ("text", 0.03, BF16, None), ("left", None, BF16, None),
    ],
)  # fmt: skip
def test_they_are_held_to_all_others(padding: str, beside: float | None, limits: Limits, named: str | None) -> None:
    """ConvBERT whose last convolution read left padding was delivered in bf16: its rows' median was that of any row."""
    usual = case(rel_l2=0.005, compared=512).model_copy(update={"padding": "right", "beside_padding": 0.006})
    other = usual.model_copy(update={"padding": padding, "beside_padding": beside})
    found = [failure.text.split(" may")[0] for failure in padding_patterns.failures([usual, other], limits)]
    assert found == ([f"tokens beside {named}"] if named else [])
