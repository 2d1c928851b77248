"""Accuracy and its intervals, against published figures."""

from __future__ import annotations

import pytest

from bertopt.checks import quality


def test_wilson_is_the_published_interval() -> None:
    # Newcombe 1998, table I, method 3: 81 of 263, 15 of 148, 0 of 20, 1 of 29.
    for successes, n, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611),
                                    (1, 29, 0.0061, 0.1718)):  # fmt: skip
        assert quality.wilson(successes, n) == pytest.approx((low, high), abs=1e-4)
    assert quality.wilson(20, 20)[1] == 1.0


def answers(both: int, only: int, other: int, neither: int) -> tuple[list[bool], list[bool]]:
    """Return whether a stage and the reference are right on each text, given the number of texts on which both, one or neither are."""
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
