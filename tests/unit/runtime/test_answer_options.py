"""`top_k`, all labels of multi-label models and entities, against transformers' own pipelines on random texts."""

from __future__ import annotations

import json
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertopt.errors import UsageError
from tests.support.tiny_models import LETTERS, VOCABULARY, WORDS, write_tiny
from tests.unit.runtime.test_predictor import predictor

rng = random.Random(0)
PLAIN = [letter for letter in LETTERS if not letter.startswith("#")]
TEXTS = [
    rng.choice(["", " "]).join(rng.choice(["", " "]) + rng.choice([*WORDS, *PLAIN, "Ünï", "漢字", " "]) for _ in range(rng.randint(1, 16)))
    for _ in range(40)
]
TEXTS = [text if text.strip() else "a" for text in TEXTS]


def pipeline(task: str, directory: Path, **options: Any) -> Any:
    import transformers

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.pipeline(task, str(directory), device="cpu")(TEXTS, **options)


def same(got: Any, expected: Any) -> None:
    """Equal but for the last digits of scores."""
    assert len(got) == len(expected)
    for mine, theirs in zip(got, expected, strict=True):
        if isinstance(theirs, dict):
            assert {k: v for k, v in mine.items() if k != "score"} == {k: v for k, v in theirs.items() if k != "score"}
            assert mine["score"] == pytest.approx(float(theirs["score"]), abs=1e-5)
        else:
            same(mine, theirs)


@pytest.mark.parametrize("top_k", [1, 2, 9, None])
@pytest.mark.parametrize("problem", ["multi_label_classification", "single_label_classification", "regression"])
def test_top_k_of_a_classification(tmp_path: Path, problem: str, top_k: int | None) -> None:
    directory = write_tiny(tmp_path, extra={"problem_type": problem})
    predict, expected = predictor(directory), pipeline("text-classification", directory, top_k=top_k)
    same(predict(TEXTS, top_k=top_k), expected)
    same(predict(TEXTS[:1], top_k=top_k), expected[:1])
    same(list(predict.stream(iter(TEXTS), 2, top_k=top_k)), expected)
    if top_k is None:
        default = predict(TEXTS)
        assert default == (predict(TEXTS, top_k=None) if "multi" in problem else [row[0] for row in predict(TEXTS, top_k=1)])


@pytest.mark.parametrize("strategy", ["simple", "first", "average", "max"])
@pytest.mark.parametrize("kind", ["wordpiece", "with a decoder", "no subwords"])
def test_entities(tmp_path: Path, strategy: Any, kind: str) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    directory = write_tiny(tmp_path, task="token-classification")
    config = json.loads((directory / "config.json").read_text())
    names = ["O", "B-PER", "I-PER"] if kind != "wordpiece" else ["B-PER", "I-ORG", "I-PER"]
    config |= {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
    (directory / "config.json").write_text(json.dumps(config))
    fast: Any = Tokenizer.from_file(str(directory / "tokenizer.json"))
    if kind == "with a decoder":
        fast.decoder = decoders.WordPiece()
    if kind == "no subwords":
        fast.model = models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token="[UNK]")
        fast.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()])
    fast.save(str(directory / "tokenizer.json"))
    expected = pipeline("token-classification", directory, aggregation_strategy=strategy)
    got = predictor(directory)(TEXTS, aggregation_strategy=strategy)
    same(got, expected)
    assert {entity["entity_group"] for text in got for entity in text} >= {"PER"}
    assert any(len(entity["word"].split()) > 1 for text in got for entity in text)


def write_unigram(directory: Path) -> None:
    """Give a checkpoint of XLM-RoBERTa a tokenizer whose tokens for a mask and for what it does not know transformers' class alone
    states, as many checkpoints of that family have it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    pieces = ["<s>", "<pad>", "</s>", "<unk>", "▁", *PLAIN, *(f"▁{word}" for word in WORDS), "[MASK]"]
    fast: Any = Tokenizer(models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], unk_id=3))
    fast.pre_tokenizer, fast.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    fast.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    fast.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)])
    fast.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 64}))


@pytest.mark.parametrize("strategy", ["simple", "first", "average", "max"])
def test_entities_where_the_class_alone_states_the_unknown_token(tmp_path: Path, strategy: Any) -> None:
    directory = write_tiny(tmp_path, "xlm-roberta", "token-classification", extra={"pad_token_id": 1, "max_position_embeddings": 66})
    write_unigram(directory)
    assert any("漢字" in text for text in TEXTS)
    same(predictor(directory)(TEXTS, aggregation_strategy=strategy), pipeline("token-classification", directory, aggregation_strategy=strategy))


def test_a_mask_where_the_class_alone_states_its_token(tmp_path: Path) -> None:
    import transformers

    directory = write_tiny(tmp_path, "xlm-roberta", "fill-mask", extra={"pad_token_id": 1, "max_position_embeddings": 66})
    write_unigram(directory)
    expected = transformers.pipeline("fill-mask", str(directory))("the <mask> sat")
    (got,) = predictor(directory)(["the <mask> sat"])[0]
    same(got, [{key: each[key] for key in ("score", "token", "token_str")} for each in expected])


def test_top_k_of_a_mask(tmp_path: Path) -> None:
    predict = predictor(write_tiny(tmp_path, task="fill-mask"))
    text = "the [MASK] sat on a [MASK]"
    (five,), (two,), (every,) = predict([text]), predict([text], top_k=2), predict([text], top_k=None)
    assert [len(mask) for mask in five] == [5, 5] and [len(mask) for mask in every] == [len(VOCABULARY)] * 2
    assert [mask[:2] for mask in five] == two == [mask[:2] for mask in every]
    np.testing.assert_allclose([sum(token["score"] for token in mask) for mask in every], 1, atol=1e-5)


@pytest.mark.parametrize(
    ("task", "options", "words"),
    [
        ("text-classification", {"top_k": 0}, "top_k must be a whole number from 1, or None for all; got 0"),
        ("text-classification", {"top_k": True}, "got True"),
        ("text-classification", {"aggregation_strategy": "simple"}, "aggregation_strategy goes with token-classification"),
        ("token-classification", {"aggregation_strategy": "last"}, "must be one of none, simple, first, average, max; got 'last'"),
        ("token-classification", {"top_k": 2}, "top_k goes with text-classification and fill-mask"),
    ],
)
def test_options_that_the_task_does_not_have(tmp_path: Path, task: str, options: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        predictor(write_tiny(tmp_path, task=task))(["a"], **options)


@pytest.mark.parametrize("problem", [None, "regression"])
def test_passages_are_ranked_for_a_query(tmp_path: Path, problem: str | None) -> None:
    predict = predictor(write_tiny(tmp_path, extra={"num_labels": 1, "problem_type": problem}))
    scores = [one["score"] for one in predict([("a cat", text) for text in TEXTS])]
    ranked = predict.rank("a cat", TEXTS)
    assert [one["index"] for one in ranked] == sorted(range(len(TEXTS)), key=lambda i: -scores[i])
    assert all(one["score"] == scores[one["index"]] for one in ranked)
    assert predict.rank("a cat", (text for text in TEXTS), top_n=3) == ranked[:3] and predict.rank("a cat", TEXTS, top_n=99) == ranked
    assert predict.rank("a cat", []) == []
    for wrong in (0, True, "2", 1.5):
        with pytest.raises(UsageError, match="top_n must be a whole number from 1, or None for all; got"):
            predict.rank("a cat", TEXTS, wrong)
    with pytest.raises(TypeError, match="query must be a string; got list"):
        predict.rank(["a cat"], TEXTS)
    with pytest.raises(TypeError, match=r"passages\[1\] must be a string; got tuple"):
        predict.rank("a cat", ["a", ("b", "c")])
    with pytest.raises(TypeError, match="expected a list of texts; got one string"):
        predict.rank("a cat", "a dog")
    with pytest.raises(UsageError, match=r"passages\[1\] has a lone surrogate"):
        predict.rank("a cat", ["a", "\ud800"])
    with pytest.raises(UsageError, match="query has a lone surrogate"):
        predict.rank("\ud800", ["a", "b"])


@pytest.mark.parametrize(("task", "words"), [("text-classification", "text-classification with 3 labels"), ("feature-extraction", "feature-extraction")])
def test_what_is_no_re_ranker_ranks_nothing(tmp_path: Path, task: str, words: str) -> None:
    predict = predictor(write_tiny(tmp_path, task=task))
    with pytest.raises(UsageError, match=f"rank needs a re-ranker, a classifier with one label; the model's task is {words}: call"):
        predict.rank("a cat", TEXTS)
