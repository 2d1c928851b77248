"""nDCG@10 and recall@10 of queries with several passages: by hand, as scikit-learn has them, and as a task's first metric."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from sklearn import metrics

from bertopt.checks import retrieval, task_metrics
from tests.support.specs import EMBEDDING, RERANKER, VALUE


def test_by_hand() -> None:
    # In order of their scores: 0, 3, 1. Best: 3, 1, 0.
    relevance, scores = np.array([3.0, 0.0, 1.0]), np.array([0.5, 0.9, 0.1])
    expected = (3 / math.log2(3) + 1 / 2) / (3 + 1 / math.log2(3))
    assert retrieval.ndcg(relevance, scores) == pytest.approx(expected) and retrieval.ndcg(relevance, relevance) == 1.0
    assert retrieval.recall(np.array([1.0, 0, 2] + [0] * 9), -np.arange(12.0)) == 1.0
    assert retrieval.recall(np.array([1.0] + [0] * 10 + [1]), -np.arange(12.0)) == 0.5
    # The last two of twelve share the places 10 and 11 … with equal scores, half of them is among the first ten.
    assert retrieval.recall(np.array([0.0] * 9 + [1, 0]), np.array([*range(20, 11, -1), 1.0, 1.0])) == 0.5
    assert math.isnan(retrieval.ndcg(relevance, np.array([0.5, math.nan, 0.1])))


@pytest.mark.parametrize("seed", range(4))
def test_as_scikit_learn_has_it(seed: int) -> None:
    rng = np.random.default_rng(seed)
    relevance, scores = rng.integers(0, 4, 25).astype(float), rng.normal(size=25).round(1)
    assert retrieval.ndcg(relevance, scores) == pytest.approx(metrics.ndcg_score([relevance], [scores], k=10))


@pytest.mark.parametrize("spec", [RERANKER, VALUE, EMBEDDING], ids=["reranker", "regression", "embeddings"])
def test_it_comes_first_where_queries_have_several_passages(spec: Any) -> None:
    rng = np.random.default_rng(0)
    queries = [f"query {number}" for number in range(40) for _ in range(12)]
    relevance = rng.integers(0, 2, len(queries)).astype(float)[:, None]
    reference, mine = relevance + rng.normal(size=relevance.shape) * 0.3, rng.normal(size=relevance.shape)
    found = task_metrics.measure(spec, relevance, mine, reference, queries)  # type: ignore[arg-type]
    assert [one.metric for one in (found, *found.others)] == ["ndcg_at_10", "recall_at_10", "spearman", "pearson"]
    assert found.reference > 0.9 and found.change < 0 and found.n == 40
    assert found.low is not None and found.high is not None and found.low < found.value < found.high
    assert found.change_high is not None and found.change_high < 0
    # Each query once, or labels of which some are negative: similarities, not relevance.
    for labels, texts in ((relevance, [str(i) for i in range(len(queries))]), (relevance - 0.5, queries)):
        assert task_metrics.measure(spec, labels, mine, reference, texts).metric == "spearman"  # type: ignore[arg-type]


def test_queries_whose_passages_are_alike_say_nothing() -> None:
    rows = retrieval.rows_by_query(["a", "b", "a", "c", "b"], np.array([1.0, 1, 0, 1, 1]))
    assert [some.tolist() for some in rows] == [[0, 2]]
