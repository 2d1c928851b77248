"""Raw outputs to answers: what only extreme outputs show. `test_predictor` holds the rest against transformers."""

from __future__ import annotations

import warnings

import numpy as np

from bertopt.modeling.float_head import FloatHead
from bertopt.runtime import task_outputs
from bertopt.runtime.tokenization import Tokens


def test_scores_of_large_logits_warn_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scores = task_outputs.sigmoid(np.array([-500.0, 0.0, 500.0], np.float32))
    assert scores.tolist() == [0.0, 0.5, 1.0]


def test_numpy_that_raises_for_what_is_0_in_float32() -> None:
    """In a user's program with np.seterr(all="raise") every question, and confident classifications, raised FloatingPointError."""
    tokens = Tokens([2, 5, 3, 6, 3], [0, 0, 0, 1, 1], [1, 0, 1, 0, 1], [(0, 0), (0, 3), (0, 0), (0, 3), (0, 0)], [None, 0, None, 1, None])
    logits = np.array([0, 300, -300, 150, 1], np.float32)
    head = FloatHead(("gelu",), {})
    with np.errstate(all="raise"):
        assert task_outputs.softmax(logits).tolist() == [0.0, 1.0, 0.0, 0.0, 0.0]
        assert task_outputs.sigmoid(np.array([-300.0, 300.0], np.float32)).tolist() == [0.0, 1.0]
        assert task_outputs.span(logits, logits, ("who", "cat"), tokens)["answer"] == "cat"
        assert head(np.array([[-60.0, 60.0]], np.float32), lambda *_: None).tolist() == [[0.0, 60.0]]


def test_passages_are_ranked_by_logits_where_their_scores_are_all_1() -> None:
    logits = np.array([[30.0], [-1.0], [50.0], [40.0]], np.float32)
    ranked = task_outputs.rank(logits, task_outputs.sigmoid(logits))
    assert [index for index, _ in ranked] == [2, 3, 0, 1] and [score for _, score in ranked][:3] == [1.0, 1.0, 1.0]
    assert task_outputs.rank(logits, logits) == [(2, 50.0), (3, 40.0), (0, 30.0), (1, -1.0)]


def test_a_question_without_an_answer_has_a_score_near_0() -> None:
    """Models that were trained with such questions point at the first token; its share went to the context, whose best word had nearly 1."""
    tokens = Tokens(
        ids=[2, 5, 3, 6, 7, 3], types=[0, 0, 0, 1, 1, 1], special=[1, 0, 1, 0, 0, 1], offsets=[(0, 0), (0, 3), (0, 0), (0, 3), (4, 7), (0, 0)],
        sequence=[None, 0, None, 1, 1, None],
    )  # fmt: skip
    for first, score in ((10.0, 0.0), (-10.0, 1.0)):
        logits = np.array([first, 9, 9, -5, 2, 9], np.float32)
        got = task_outputs.span(logits, logits, ("who", "the cat"), tokens)
        assert got["answer"] == "cat" and abs(got["score"] - score) < 0.01
    # Without any context there is no answer.
    empty = Tokens([2, 5, 3, 3], [0, 0, 0, 1], [1, 0, 1, 1], [(0, 0), (0, 3), (0, 0), (0, 0)], [None, 0, None, None])
    assert task_outputs.span(logits[:4], logits[:4], ("who", ""), empty) == {"answer": "", "score": 0.0, "start": 0, "end": 0}
