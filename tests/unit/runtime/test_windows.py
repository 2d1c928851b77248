"""`stride`: long texts in windows, as transformers' pipelines split them."""

from __future__ import annotations

import json
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertopt.errors import UsageError
from tests.support.tiny_models import WORDS, write_tiny
from tests.unit.runtime.test_answer_options import same, write_unigram
from tests.unit.runtime.test_predictor import predictor

rng = random.Random(0)


def words(count: int) -> str:
    return " ".join(rng.choice([*WORDS, "漢字", "unknown", "Ünï"]) for _ in range(count))


#: A tiny model takes 64 tokens.
TEXTS = ["the cat sat", *(words(count) for count in (40, 61, 62, 63, 64, 100, 300, 2)), ""]
PAIRS = [("who sat ?", text) for text in TEXTS[:-1]] + [(words(9), words(200)), (words(30), words(90))]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(("strategy", "stride"), [("simple", 0), ("first", 1), ("average", 13), ("max", 61)])
@pytest.mark.parametrize("family", ["bert", "xlm-roberta"])
def test_entities_of_long_texts(tmp_path: Path, family: str, strategy: Any, stride: int, side: str) -> None:
    import transformers

    extra = {} if family == "bert" else {"pad_token_id": 1, "max_position_embeddings": 66}
    directory = write_tiny(tmp_path, family, "token-classification", extra=extra)
    if family != "bert":
        write_unigram(directory)
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"truncation_side": side}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipeline = transformers.pipeline("token-classification", str(directory), device="cpu", aggregation_strategy=strategy, stride=stride)
        expected = pipeline(TEXTS[:-1])
    predict = predictor(directory)
    answer = predict.answer(TEXTS, aggregation_strategy=strategy, stride=stride)
    same(answer.values, [*expected, []])
    assert answer.truncated == []
    same(list(predict.stream(iter(TEXTS), 3, aggregation_strategy=strategy, stride=stride)), [*expected, []])
    cut = predict.answer(TEXTS, aggregation_strategy=strategy)
    assert cut.truncated and cut.tokens < answer.tokens and cut.values != answer.values


def best_span(directory: Path, question: str, context: str, stride: int) -> tuple[float, int, int]:
    """The best span of all windows by transformers alone: its score, start and end."""
    import torch
    import transformers

    encode = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForQuestionAnswering.from_pretrained(directory, attn_implementation="eager").eval()
    split = encode(
        question, context, truncation="only_second", max_length=64, stride=stride, return_overflowing_tokens=True,
        return_offsets_mapping=True, return_token_type_ids=True,
    )  # fmt: skip
    found = []
    for number, ids in enumerate(split["input_ids"]):
        with torch.no_grad():
            out = model(input_ids=torch.tensor([ids]), token_type_ids=torch.tensor([split["token_type_ids"][number]]))
        inside = np.array([side == 1 for side in split.sequence_ids(number)])
        shared = inside | (np.arange(len(ids)) == 0)
        start, end = (
            torch.softmax(torch.where(torch.tensor(shared), logits[0], -torch.inf), -1).numpy() for logits in (out.start_logits, out.end_logits)
        )
        offsets = split["offset_mapping"][number]
        found += [
            (float(start[i] * end[j]), offsets[i][0], offsets[j][1])
            for i in np.flatnonzero(inside) for j in range(i, min(len(ids), i + 15)) if inside[j]
        ]  # fmt: skip
    return max(found)


@pytest.mark.parametrize("stride", [0, 20])
@pytest.mark.parametrize("processor", ["template", "bert"])
def test_questions_about_long_contexts(tmp_path: Path, stride: int, processor: str) -> None:
    directory = write_tiny(tmp_path, task="question-answering")
    path = directory / "tokenizer.json"
    fast = json.loads(path.read_text())
    if processor == "bert":  # takes token types as they come
        ids = fast["model"]["vocab"]
        fast["post_processor"] = {"type": "BertProcessing", "sep": ["[SEP]", ids["[SEP]"]], "cls": ["[CLS]", ids["[CLS]"]]}
        path.write_text(json.dumps(fast))
    predict = predictor(directory)
    answer = predict.answer(PAIRS, stride=stride)
    assert answer.truncated == []
    beyond = 0
    for (question, context), got in zip(PAIRS, answer.values, strict=True):
        score, start, end = best_span(directory, question, context, stride)
        assert (got["start"], got["end"], got["answer"]) == (start, end, context[start:end])
        assert got["score"] == pytest.approx(score, abs=1e-5)
        beyond += start > 300
    assert beyond, "no answer lies beyond the first window"
    same(list(predict.stream(iter(PAIRS), 3, stride=stride)), answer.values)


def test_a_question_that_leaves_no_room_is_cut_as_without_windows(tmp_path: Path) -> None:
    predict = predictor(write_tiny(tmp_path, task="question-answering"))
    pairs = [("who ?", "a cat"), (words(50), words(100)), ("who ?", words(100))]
    answer, cut = predict.answer(pairs, stride=12), predict.answer(pairs)
    assert answer.truncated == [1] and cut.truncated == [1, 2]
    same(answer.values[:2], cut.values[:2])
    with pytest.raises(UsageError, match=r"texts\[1\] has a question that leaves \d+ tokens for a window of its context, and neighbours share 12"):
        predict(pairs, truncate=False, stride=12)
    assert predict.answer(pairs[::2], truncate=False, stride=12).truncated == []
    whole = predict.answer(list(predict.stream(pairs[:0])), stride=12)
    assert whole.values == [] and whole.tokens == 0


@pytest.mark.parametrize(
    ("task", "texts", "options", "message"),
    [
        ("text-classification", ["a"], {"stride": 1}, "stride goes with question-answering and token-classification; the model's task is text"),
        ("token-classification", ["a"], {"stride": 1}, "give aggregation_strategy too"),
        ("token-classification", ["a"], {"stride": -1, "aggregation_strategy": "simple"}, "from 0, or None .*; got -1"),
        ("token-classification", ["a"], {"stride": True, "aggregation_strategy": "simple"}, "got True"),
        ("token-classification", ["a"], {"stride": 62, "aggregation_strategy": "simple"}, "less than the 62 tokens .* got 62"),
        ("token-classification", ["a", ("b", "c")], {"stride": 1, "aggregation_strategy": "simple"}, r"single texts; texts\[1\] is a pair"),
        ("question-answering", [("a", "b")], {"stride": 61}, "less than the 61 tokens"),
        ("question-answering", [("a", "b")], {"stride": 1.5}, "got 1.5"),
    ],
)  # fmt: skip
def test_strides_that_cannot_be(tmp_path: Path, task: str, texts: Any, options: Any, message: str) -> None:
    predict = predictor(write_tiny(tmp_path, task=task))
    with pytest.raises(UsageError, match=message):
        predict(texts, **options)
