"""Zero-shot classification: the scores of transformers' pipeline, and what cannot be asked for."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bertopt.errors import UsageError
from bertopt.runtime import predictor as predictors
from tests.support.nli import NLI, write_nli
from tests.support.tiny_models import write_tiny
from tests.unit.runtime.test_answer_options import TEXTS
from tests.unit.runtime.test_predictor import predictor

LONG = "the cat sat on the mat . a good film was bad " * 20
LABELS = ["film", "a good cat", "dog", "very bad {x}"]


def pipeline(directory: Path, texts: list[str], **options: Any) -> list[dict[str, float]]:
    """The scores by label of each text."""
    import transformers

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = transformers.pipeline("zero-shot-classification", str(directory), device="cpu")(texts, **options)
    return [dict(zip(one["labels"], one["scores"], strict=True)) for one in found]


def by_label(answers: list[list[dict[str, Any]]]) -> list[Mapping[str, float]]:
    return [pytest.approx({one["label"]: one["score"] for one in answer}, abs=1e-5) for answer in answers]


@pytest.mark.parametrize("names", [NLI, ("ENTAILMENT", "NEUTRAL", "CONTRADICTION"), ("entailment", "not_entailment"), ("not_entailment", "Entailed", "x")])
@pytest.mark.parametrize("options", [{}, {"multi_label": True}, {"hypothesis_template": "the {} ran .", "multi_label": True}])
def test_scores_are_those_of_the_pipeline(names: tuple[str, ...], options: dict[str, Any], tmp_path: Path) -> None:
    directory = write_nli(tmp_path, names)
    texts = [*TEXTS[:6], LONG]
    expected = pipeline(directory, texts, candidate_labels=LABELS, **options)
    got = predictor(directory).zero_shot(texts, LABELS, **options)
    assert expected == by_label(got)
    for answer in got:
        scores = [one["score"] for one in answer]
        assert scores == sorted(scores, reverse=True)
        assert options.get("multi_label") or sum(scores) == pytest.approx(1, abs=1e-5)
    assert len({round(one["score"], 6) for one in got[0]}) == len(LABELS), "labels that all score alike would show nothing"


def test_one_label_is_scored_by_itself(tmp_path: Path) -> None:
    directory = write_nli(tmp_path, family="roberta")
    expected = pipeline(directory, TEXTS[:3], candidate_labels=["film"])
    assert expected == by_label(predictor(directory).zero_shot(TEXTS[:3], ["film"]))
    assert 0 < expected[0]["film"] < 1


def test_many_texts_are_run_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = predictor(write_nli(tmp_path))
    whole = model.zero_shot(TEXTS[:7], LABELS)
    monkeypatch.setattr(predictors, "WINDOW", 2 * len(LABELS))
    assert [{one["label"]: one["score"] for one in answer} for answer in model.zero_shot(iter(TEXTS[:7]), iter(LABELS))] == by_label(whole)
    assert model.zero_shot([], LABELS) == []


@pytest.mark.parametrize(
    ("labels", "template", "expected"),
    [
        ([], None, "candidate_labels: expected at least one label; got none"),
        (["film", "\ud800"], None, r"candidate_labels\[1\] has a lone surrogate"),
        (["film"], "{} \ud800", "hypothesis_template has a lone surrogate"),
        (["film"], "no place", "hypothesis_template must have one {}, .*got 'no place'"),
        (["film"], "{} or {}", "hypothesis_template must have one {}"),
        (["film"], "{:>1000000000}", "hypothesis_template must have one {}"),
        (["film"], "{0.__class__} {}", "hypothesis_template must have one {}"),
        (["film", "cat " * 40], None, r"candidate_labels\[1\]: a hypothesis may have at most 30 tokens, .*; got \d+: choose a shorter"),
    ],
)
def test_labels_that_cannot_be_used(labels: list[str], template: str | None, expected: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=expected):
        predictor(write_nli(tmp_path)).zero_shot(["a film"], labels, **({} if template is None else {"hypothesis_template": template}))


@pytest.mark.parametrize(
    ("texts", "labels", "expected"),
    [
        (["a"], "film", "candidate_labels must be a list of strings; got one string"),
        (["a"], ["film", 3], r"candidate_labels\[1\] must be a string; got int"),
        ("a film", ["film"], "expected a list of texts; got one string"),
        (["a", ("a", "b")], ["film"], r"texts\[1\] must be a string; got a pair"),
    ],
)
def test_what_is_no_string(texts: Any, labels: Any, expected: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=expected):
        predictor(write_nli(tmp_path)).zero_shot(texts, labels)


def test_other_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"needs a classifier of natural language inference, .*; its labels are 'bad', 'good', 'mixed'"):
        predictor(write_tiny(tmp_path / "labels")).zero_shot(["a"], ["film"])
    with pytest.raises(UsageError, match=r"the model's task is fill-mask$"):
        predictor(write_tiny(tmp_path / "masks", task="fill-mask")).zero_shot(["a"], ["film"])
