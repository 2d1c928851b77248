"""Entities as conlleval and seqeval read them, answers to questions as SQuAD's evaluation compares them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bertopt.checks import span_metrics, task_metrics
from bertopt.core import Spec
from tests.support.specs import QUESTIONS, TAGS


def measured(spec: Spec, scores: Any, reference: Any = None) -> dict[str, Any]:
    first = task_metrics.measure(spec, task_metrics.truth(spec, ["x"] * len(scores)), scores, reference)
    return {found.metric: found for found in (first, *first.others)}


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("B-PER I-PER O B-LOC", {("PER", 0, 1), ("LOC", 3, 3)}),
        ("O O O", set()),
        ("I-PER I-PER B-PER I-LOC", {("PER", 0, 1), ("PER", 2, 2), ("LOC", 3, 3)}),
        ("B-PER B-PER", {("PER", 0, 0), ("PER", 1, 1)}),
        ("B-LOC O I-LOC", {("LOC", 0, 0), ("LOC", 2, 2)}),
        ("S-LOC B-PER I-PER E-PER S-PER", {("LOC", 0, 0), ("PER", 1, 3), ("PER", 4, 4)}),
    ],
)
def test_entities_of_tags(tags: str, expected: set[tuple[str, int, int]]) -> None:
    assert span_metrics.entities(tags.split()) == expected


def test_entities_as_seqeval_counts_them() -> None:
    # The example of seqeval's README, whose F1 is 0.5.
    labelled = [["O", "O", "O", "B-MISC", "I-MISC", "I-MISC", "O"], ["B-PER", "I-PER", "O"]]
    given = [["O", "O", "B-MISC", "I-MISC", "I-MISC", "I-MISC", "O"], ["B-PER", "I-PER", "O"]]
    found = measured(TAGS, [span_metrics._tags(a, b) for a, b in zip(labelled, given, strict=True)])
    assert list(found) == ["entity_f1", "entity_precision", "entity_recall", "word_accuracy"]
    assert [found[name].value for name in found] == [0.5, 0.5, 0.5, 0.8]


def test_a_word_has_the_tag_of_its_first_token() -> None:
    text = "Annabel lives  in Rome"
    spans = [(0, 4, "B-PER"), (4, 7, "I-PER"), (8, 13, "O"), (15, 17, "O"), (18, 20, "B-LOC"), (20, 22, "O")]
    tokens = [{"start": start, "end": end, "entity": tag} for start, end, tag in spans]
    assert span_metrics.word_tags(text, tokens) == ["B-PER", "O", "O", "B-LOC"]
    assert span_metrics.word_tags(text, tokens[:3]) == ["B-PER", "O", "O", "O"], "cut off"
    assert span_metrics.scores(TAGS, [text], [("B-PER", "O", "O", "O")], [tokens]) == [[1, 2, 1, 3, 4]]


@pytest.mark.parametrize(
    ("label", "given", "exact", "f1"),
    [
        ("the Eiffel Tower", "Eiffel tower.", 1, 1.0),
        ("Eiffel Tower in Paris", "the Eiffel Tower", 0, 2 / 3),
        (("1976", "in 1976"), "in  1976", 1, 1.0),
        ("1976", "1977", 0, 0.0),
        ("", "a", 1, 1.0),
    ],
)
def test_answers(label: Any, given: str, exact: int, f1: float) -> None:
    (found,) = span_metrics.scores(QUESTIONS, ["q"], [label], [{"answer": given}])
    assert found == [exact, pytest.approx(f1), 1]


def test_intervals_are_of_texts_and_changes_are_paired() -> None:
    rng = np.random.default_rng(0)
    reference = [[float(right), 0.3 + 0.7 * right, 1.0] for right in rng.random(200) < 0.8]
    mine = [[exact * (i % 5 > 0), f1 * (i % 5 > 0), 1.0] for i, (exact, f1, _) in enumerate(reference)]
    found = measured(QUESTIONS, mine, reference)
    assert list(found) == ["answer_f1", "exact_match"]
    for column, name in ((1, "answer_f1"), (0, "exact_match")):
        each = found[name]
        assert each.value == pytest.approx(np.mean([row[column] for row in mine]))
        assert each.low < each.value < each.high and each.change_low < each.change < each.change_high < 0


def test_nothing_there_counts_as_nothing() -> None:
    assert [each.value for each in measured(TAGS, [[0, 0, 0, 3, 3], [0, 0, 0, 2, 2]]).values()] == [0, 0, 0, 1]
    plain = TAGS.model_copy(update={"labels": ("NOUN", "VERB")})
    assert list(measured(plain, [[0, 0, 0, 1, 2]])) == ["word_accuracy"]
