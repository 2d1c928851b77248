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
