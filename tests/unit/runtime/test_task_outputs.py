"""Raw outputs to answers: what only extreme outputs show. `test_predictor` holds the rest against transformers."""

from __future__ import annotations

import warnings

import numpy as np

from bertopt.runtime import task_outputs


def test_scores_of_large_logits_warn_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scores = task_outputs.sigmoid(np.array([-500.0, 0.0, 500.0], np.float32))
    assert scores.tolist() == [0.0, 0.5, 1.0]


def test_passages_are_ranked_by_logits_where_their_scores_are_all_1() -> None:
    logits = np.array([[30.0], [-1.0], [50.0], [40.0]], np.float32)
    ranked = task_outputs.rank(logits, task_outputs.sigmoid(logits))
    assert [index for index, _ in ranked] == [2, 3, 0, 1] and [score for _, score in ranked][:3] == [1.0, 1.0, 1.0]
    assert task_outputs.rank(logits, logits) == [(2, 50.0), (3, 40.0), (0, 30.0), (1, -1.0)]
