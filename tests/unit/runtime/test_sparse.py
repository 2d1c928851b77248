"""Answers of a SPLADE: the weights that are not 0, and their ids."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import bertopt
from bertopt.commands import bulk as command
from bertopt.errors import UsageError, WrongAnswer
from bertopt.runtime.collector import of_texts
from bertopt.runtime.predictor import Predictor
from bertopt.runtime.sparse import Weights
from tests.support.artefacts import write_artefact
from tests.support.tiny_models import Tiny

TEXTS = ["the cat sat", "a very good film , not bad !", "", "on the mat is a dog and she ran ' - ' 1 2 3"] * 40


@pytest.fixture(scope="module")
def artefact(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_artefact(tiny("bert", "feature-extraction", "splade"), tmp_path_factory.mktemp("splade") / "artifact")


@pytest.fixture(scope="module")
def predictor(artefact: Path) -> Predictor:
    return bertopt.load(artefact)


def test_each_text_gets_its_weights_and_their_ids(predictor: Predictor) -> None:
    whole = predictor.logits(TEXTS)
    assert whole.shape == (len(TEXTS), predictor.spec.vocabulary) and whole.dtype == np.float32
    for answers in (predictor(TEXTS), list(predictor.stream(TEXTS, window=7)), [predictor([text])[0] for text in TEXTS]):
        assert len(answers) == len(TEXTS)
        for answer, vector in zip(answers, whole, strict=True):
            indices = answer["indices"]
            assert indices == sorted(set(indices)) and 0 < len(indices) < predictor.spec.vocabulary
            weights = Weights(np.array(indices), np.array(answer["values"], np.float32))
            assert (weights.values > 0).all() and np.abs(weights.whole(whole.shape[1]) - vector).max() < 1e-6


def test_values_have_no_more_digits_than_float32() -> None:
    values = np.random.default_rng(1).random(1000, np.float32)
    answer = Weights.of(values).answer()
    assert np.array_equal(np.array(answer["values"], np.float32), values)
    assert len(json.dumps(answer["values"])) < 13 * len(values)


def test_a_text_without_weights_has_none(predictor: Predictor) -> None:
    assert Weights.of(np.zeros(5, np.float32)).answer() == {"indices": [], "values": []}
    assert predictor([]) == [] and predictor.logits([]).shape == (0, predictor.spec.vocabulary)


def test_nan_is_no_weight_that_is_left_out() -> None:
    assert Weights.of(np.array([0, np.nan, 1], np.float32)).indices.tolist() == [1, 2]


def test_only_weights_that_are_not_0_are_kept(predictor: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []

    def watched(*args: object) -> object:
        kept.extend(found := of_texts(*args))  # type: ignore[arg-type]
        return found

    monkeypatch.setattr("bertopt.runtime.collector.of_texts", watched)
    predictor(TEXTS)
    assert len(kept) == len(TEXTS) and all(named.keys() == {"indices", "values"} for named in kept)


def test_a_batch_has_few_tokens_as_each_has_a_number_for_each_id(predictor: Predictor) -> None:
    assert predictor.runner.limits.tokens == 2048


def test_options_of_other_tasks_are_refused(predictor: Predictor) -> None:
    with pytest.raises(UsageError, match="top_k goes with"):
        predictor(["a"], top_k=3)


@pytest.mark.parametrize("form", ["jsonl", "csv"])
def test_bulk_writes_them_beside_each_text(artefact: Path, predictor: Predictor, tmp_path: Path, form: str) -> None:
    source = tmp_path / f"in.{form}"
    texts = ["the cat", "a dog"]
    source.write_text("\n".join(["text", *texts] if form == "csv" else [json.dumps({"text": text}) for text in texts]) + "\n")
    assert command.bulk(source, tmp_path / "out", artefact).rows == 2
    lines = (tmp_path / "out" / f"part-00000.{form}").read_text().splitlines()
    expected = predictor(texts)
    if form == "jsonl":
        assert [json.loads(line)["embedding"] for line in lines] == expected
    else:
        assert lines[0] == "text,embedding" and json.loads(lines[1].split(",", 1)[1].strip('"').replace('""', '"')) == expected[0]


def test_bulk_refuses_weights_that_are_not_finite(artefact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Weights, "answer", lambda weights: {"indices": [3], "values": [float("nan")]})
    (tmp_path / "in.txt").write_text("the cat\n")
    with pytest.raises(WrongAnswer, match=r"in\.txt:1: expected a finite embedding"):
        command.bulk(tmp_path / "in.txt", tmp_path / "out", artefact)


def test_values_have_the_digits_of_a_float32() -> None:
    """As Python's `str` of each: 0.1, not 0.10000000149011612."""
    rng = np.random.default_rng(0)
    drawn = np.concatenate([rng.uniform(0, 5, 20_000), 10 ** rng.uniform(-8, 2, 20_000), np.arange(1, 2000) / 1000, [1e-3, 0.1, 1, 10, 88.72284, 9.999999e-5]])
    values = drawn.astype(np.float32)
    found = Weights(np.arange(len(values)), values).answer()["values"]
    assert found == values.astype(str).astype(float).tolist()


@pytest.mark.parametrize("value", [1e-45, 1e-38, 3e-30, 3.4028235e38, 1e20, np.inf, np.nan])
def test_extreme_values_stay_what_they_are(value: float) -> None:
    """Those of a damaged artefact too, whatever the caller's NumPy does with such numbers."""
    with np.errstate(all="raise"):
        (found,) = Weights(np.arange(1), np.array([value], np.float32)).answer()["values"]
    assert np.array_equal(np.float32(found), np.float32(value), equal_nan=True)


def test_no_values() -> None:
    assert Weights.of(np.zeros(9, np.float32)).answer() == {"indices": [], "values": []}
