"""`bertopt.load`'s Predictor answers as transformers does, for every task."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertopt import checkpoint
from bertopt.errors import UsageError
from bertopt.runtime.predictor import Predictor
from bertopt.sessions import open_session
from tests.conftest import Tiny, tokenizer

TEXTS = ["the cat sat", "a very good film , not bad !", "on the mat is a dog and she ran ' - ' 1 2 3", "", "was it ?"]
Opened = Callable[..., tuple[Path, Predictor]]


def predictor(directory: Path, task: str = "auto", **options: Any) -> Predictor:
    """As `bertopt.load` opens a stage, which holds the tokenizer as transformers would use it."""
    model = checkpoint.load(directory, task)
    with tempfile.TemporaryDirectory() as snapshot:
        checkpoint.write_snapshot(model, Path(snapshot))
        return Predictor(open_session(model, threads=1), model.spec, Path(snapshot), **options)


@pytest.fixture(scope="module")
def opened(tiny: Tiny) -> Opened:
    made: dict[Any, tuple[Path, Predictor]] = {}

    def go(task: str, family: str = "bert", pooling: str | None = None) -> tuple[Path, Predictor]:
        if (task, family, pooling) not in made:
            directory = tiny(family, task, pooling)
            made[task, family, pooling] = directory, predictor(directory)
        return made[task, family, pooling]

    return go


def plain(directory: Path, kind: str, text: Any) -> tuple[Any, dict[str, np.ndarray]]:
    """The tokens and raw answers [S, …] of one text by transformers alone."""
    import torch
    import transformers

    encode = transformers.AutoTokenizer.from_pretrained(directory)
    model = getattr(transformers, kind).from_pretrained(directory, attn_implementation="eager").eval()
    tokens = encode(
        *(text if isinstance(text, tuple) else (text,)),
        return_tensors="pt",
        return_offsets_mapping=True,
        return_token_type_ids=True,
    )
    with torch.inference_mode():
        answers = model(**{name: tokens[name] for name in ("input_ids", "attention_mask", "token_type_ids")})
    return tokens, {name: value[0].numpy() for name, value in answers.items()}


def softmax(logits: np.ndarray) -> np.ndarray:
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert"])
def test_text_classification(opened: Opened, family: str) -> None:
    import transformers

    directory, predict = opened("text-classification", family)
    expected = transformers.pipeline("text-classification", str(directory))(TEXTS)
    got = predict(TEXTS)
    assert [entry["label"] for entry in got] == [entry["label"] for entry in expected]
    np.testing.assert_allclose([e["score"] for e in got], [e["score"] for e in expected], atol=1e-5)


@pytest.mark.parametrize(("labels", "problem"), [(1, None), (3, "multi_label_classification"), (1, "regression")])
def test_scores_that_are_no_distribution(tmp_path: Path, labels: int, problem: str | None) -> None:
    import transformers

    size = {
        "vocab_size": 100,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    config = transformers.BertConfig(**size, max_position_embeddings=64, num_labels=labels, problem_type=problem)
    transformers.set_seed(0)
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path)
    tokenizer(tmp_path)
    expected = transformers.pipeline("text-classification", str(tmp_path))(TEXTS)
    got = predictor(tmp_path, "text-classification")(TEXTS)
    assert [entry["label"] for entry in got] == [entry["label"] for entry in expected]
    np.testing.assert_allclose([e["score"] for e in got], [e["score"] for e in expected], atol=1e-5)


def test_pairs(opened: Opened) -> None:
    directory, predict = opened("text-classification")
    pair = ("the cat sat", "was it good ?")
    _, answers = plain(directory, "AutoModelForSequenceClassification", pair)
    (got,) = predict([pair])
    assert got["score"] == pytest.approx(float(softmax(answers["logits"]).max()), abs=1e-5)
    (swapped,) = predict([pair[::-1]])
    assert swapped["score"] != pytest.approx(got["score"], abs=1e-6)


def test_token_classification(opened: Opened) -> None:
    directory, predict = opened("token-classification")
    for text, got in zip(TEXTS, predict(TEXTS), strict=True):
        tokens, answers = plain(directory, "AutoModelForTokenClassification", text)
        scores = softmax(answers["logits"])[1:-1]
        offsets = [tuple(pair) for pair in tokens["offset_mapping"][0].tolist()[1:-1]]
        assert [(entry["start"], entry["end"]) for entry in got] == offsets
        assert [entry["word"] for entry in got] == [text[start:end] for start, end in offsets]
        assert [entry["entity"] for entry in got] == [["bad", "good", "mixed"][i] for i in scores.argmax(axis=-1)]
        np.testing.assert_allclose([e["score"] for e in got], scores.max(axis=-1, initial=0), atol=1e-5)


def test_question_answering(opened: Opened) -> None:
    directory, predict = opened("question-answering")
    pairs = [("who sat ?", "the cat sat on the mat , and the dog ran"), ("was it good ?", "a film")]
    for (question, context), got in zip(pairs, predict(pairs), strict=True):
        tokens, answers = plain(directory, "AutoModelForQuestionAnswering", (question, context))
        inside = np.array([side == 1 for side in tokens.sequence_ids(0)])
        start, end = (softmax(np.where(inside, answers[f"{side}_logits"], -np.inf)) for side in ("start", "end"))
        n = len(inside)
        spans = [
            (float(start[i] * end[j]), i, j)
            for i in range(n)
            for j in range(i, min(n, i + 15))
            if inside[i] and inside[j]
        ]
        score, first, last = max(spans)
        offsets = tokens["offset_mapping"][0].tolist()
        assert (got["start"], got["end"]) == (offsets[first][0], offsets[last][1])
        assert got["answer"] == context[got["start"] : got["end"]] != ""
        assert got["score"] == pytest.approx(score, abs=1e-5)
    with pytest.raises(UsageError, match=r"texts\[1\] must be a pair"):
        predict([pairs[0], "no pair"])


def test_fill_mask(opened: Opened) -> None:
    import transformers

    directory, predict = opened("fill-mask")
    expected = transformers.pipeline("fill-mask", str(directory))("the [MASK] sat", top_k=5)
    one, two, none = predict(["the [MASK] sat", "[MASK] dog [MASK]", "no mask"])
    assert [entry["token"] for entry in one[0]] == [entry["token"] for entry in expected]
    assert [entry["token_str"] for entry in one[0]] == [entry["token_str"] for entry in expected]
    np.testing.assert_allclose([e["score"] for e in one[0]], [e["score"] for e in expected], atol=1e-5)
    assert len(one) == 1 and len(two) == 2 and none == []


def test_embeddings(opened: Opened) -> None:
    directory, predict = opened("feature-extraction", pooling="mean")
    got = predict(TEXTS)
    assert got.shape == (len(TEXTS), 32) and got.dtype == np.float32
    for text, vector in zip(TEXTS, got, strict=True):
        _, answers = plain(directory, "AutoModel", text)
        mean = answers["last_hidden_state"].mean(axis=0)
        np.testing.assert_allclose(vector, mean / np.linalg.norm(mean), atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(got, axis=1), 1, atol=1e-5)


def test_token_vectors(opened: Opened) -> None:
    directory, predict = opened("feature-extraction")
    for text, got in zip(TEXTS, predict(TEXTS), strict=True):
        _, answers = plain(directory, "AutoModel", text)
        np.testing.assert_allclose(got, answers["last_hidden_state"], atol=1e-4)


def test_order_is_kept_whatever_the_batches(opened: Opened) -> None:
    directory, predict = opened("feature-extraction", pooling="mean")
    texts = [" ".join(["cat", "dog", "the", "film"][i % 4] for i in range(n % 37)) for n in range(0, 500, 7)]
    expected = np.stack([predict([text])[0] for text in texts])
    small = predictor(directory, max_batch_tokens=60)
    for got in (predict(texts), small(texts), small.logits(texts)):
        np.testing.assert_allclose(got, expected, atol=1e-5)


def test_long_texts_are_cut(opened: Opened) -> None:
    _, predict = opened("feature-extraction", pooling="mean")
    text = "cat " * 500
    np.testing.assert_allclose(predict([text]), predict(["cat " * 46]), atol=1e-5)


@pytest.mark.parametrize(
    "task", ["text-classification", "token-classification", "question-answering", "fill-mask", "feature-extraction"]
)
def test_nothing_in_nothing_out(opened: Opened, task: str) -> None:
    assert opened(task)[1]([]) == []


def test_no_embeddings_of_nothing(opened: Opened) -> None:
    _, predict = opened("feature-extraction", pooling="mean")
    assert predict([]).shape == (0, 32)
    assert np.isfinite(predict([""])).all()


def test_what_is_no_text_is_named(opened: Opened) -> None:
    _, predict = opened("text-classification")
    bad: list[Any] = ["fine", 3]
    with pytest.raises(TypeError, match=r"texts\[1\] must be a string or a pair of strings; got int"):
        predict(bad)
    for wrong in (None, ("a",), ("a", 1), b"bytes", ["a", "b"]):
        with pytest.raises(TypeError, match=r"texts\[0\]"):
            predict([wrong])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="one string: put it in a list"):
        predict("not a list")
