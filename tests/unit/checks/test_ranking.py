"""Whether embeddings rank texts as the reference's do."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bertopt.checks import ranking

Array = np.ndarray


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


@pytest.mark.parametrize("bad", [math.nan, math.inf])
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
