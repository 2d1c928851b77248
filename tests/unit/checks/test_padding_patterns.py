"""Rows with padding on the left and with holes, beside those that are padded as texts are."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bertopt.checks import padding_patterns
from bertopt.results import Case, Limits
from tests.support.measured import case
from tests.support.specs import TEXT, spec

BF16 = Limits(cosine_median_min=0.99)


def differing(padding: str, rel_l2: float, compared: int = 32) -> Case:
    return case(rel_l2=rel_l2, compared=compared).model_copy(update={"padding": padding, "batch": 32})


def test_no_row_is_whole_and_each_has_tokens() -> None:
    """A model that cut batches to their number of tokens was delivered in bf16: right where any row is whole."""
    found = {probe.padding: probe for probe in padding_patterns.probes(TEXT, 32)}
    assert list(found) == ["right", "left", "holes"]
    for padding, probe in found.items():
        mask = probe.inputs["attention_mask"]
        assert probe.shape == (32, 16) and mask.any(axis=1).all() and not mask.all(axis=1).any()
        assert padding == "right" or bool(mask[:, -1].any())
        assert padding != "left" or not mask[:, 0].any()
        assert padding != "holes" or mask[:, 0].all()
    assert all(probe.shape == (4, 3) for probe in padding_patterns.probes(spec(max_length=3), 4))
    assert not list(padding_patterns.probes(spec(max_length=2), 4))


@pytest.mark.parametrize(
    ("left", "holes", "limits", "failed"),
    [
        (0.005, 0.006, BF16, []), (0.3, 0.006, BF16, ["padding on the left"]), (0.005, 0.016, BF16, ["holes in their mask"]),
        (0.3, 0.3, BF16, ["padding on the left", "holes in their mask"]), (math.nan, 0.005, BF16, ["padding on the left"]),
        (0.3, 0.3, Limits(rel_l2=0.5), []), (None, None, BF16, []),
    ],
)  # fmt: skip
def test_rows_without_text_are_held_to_the_others(left: float | None, holes: float | None, limits: Limits, failed: list[str]) -> None:
    """Positions that were counted along the mask were delivered in bf16."""
    by_padding: dict[str, float | None] = {"right": 0.005, "none": 0.005, "left": left, "holes": holes}
    cases = [differing(padding, value) for padding, value in by_padding.items() if value is not None]
    # One short row that is far off is rounding.
    cases += [differing("left", 0.2, 1)] if left is not None else []
    found = padding_patterns.failures(cases, limits)
    assert [failure.text.split(" may")[0] for failure in found] == [f"rows with {what}" for what in failed]


def test_differences_below_rounding_pass() -> None:
    cases = [differing("right", 1e-4), differing("left", 0.009)]
    assert not padding_patterns.failures(cases, BF16) and np.isclose(next(padding_patterns.held(cases, BF16)).limit, 0.01)


def test_few_rows_of_a_pattern_prove_nothing() -> None:
    """Of a right ModernBERT in bf16 a whole row in each batch with padding on the left was compared, and they were refused."""
    cases = [differing("right", 0.0046), *(differing("left", 0.049, 1) for _ in range(5))]
    assert not padding_patterns.failures(cases, BF16) and padding_patterns.failures([*cases, differing("left", 0.049, 11)], BF16)
