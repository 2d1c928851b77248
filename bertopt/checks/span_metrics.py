"""Score answers that are spans: entities of tagged words, and answers to questions.

Each text has scores, and the metrics are functions of their sums, so that resamples of texts are not scored again. Entities are read
from tags as conlleval and seqeval (without `mode="strict"`) read them, answers are compared as SQuAD's evaluation does; a test compares
both with their figures.

Not looked at: the position of an answer in its context, and probabilities. The tag of a truncated word counts as `O`.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bertopt.core import Spec
from bertopt.spec import Label

if TYPE_CHECKING:
    from bertopt.core import Array

TASKS = ("token-classification", "question-answering")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def words(text: str) -> list[tuple[int, int]]:
    """Return where the words of a text, which white space separates, begin and end; each has a tag."""
    return [match.span() for match in re.finditer(r"\S+", text)]


def scores(spec: Spec, texts: Sequence[str], labels: Sequence[Label], answers: Sequence[Any]) -> list[list[float]]:
    """Return what each text adds to the sums: for tags the number of correct, predicted and labelled entities and of correct words and all
    words; for an answer its exact match, its F1 and 1. `answers` are a predictor's."""
    rows = zip(texts, labels, answers, strict=True)
    if spec.task == "question-answering":
        return [_answer([label] if isinstance(label, str) else label, answer["answer"]) for _, label, answer in rows]
    return [_tags(list(label), word_tags(text, tokens)) for text, label, tokens in rows]


def metrics(spec: Spec) -> Mapping[str, Callable[[Array], Array]]:
    """Return the metrics of a task, the main one first: functions of the sums [..., K] of `scores` over texts."""
    if spec.task == "question-answering":
        return {"answer_f1": lambda sums: _share(sums[..., 1], sums[..., 2]), "exact_match": lambda sums: _share(sums[..., 0], sums[..., 2])}
    entities: dict[str, Callable[[Array], Array]] = {
        "entity_f1": lambda sums: _share(2 * sums[..., 0], sums[..., 1] + sums[..., 2]),
        "entity_precision": lambda sums: _share(sums[..., 0], sums[..., 1]),
        "entity_recall": lambda sums: _share(sums[..., 0], sums[..., 2]),
    }
    named = any(label[:2] in ("B-", "I-") for label in spec.labels)
    return {**(entities if named else {}), "word_accuracy": lambda sums: _share(sums[..., 3], sums[..., 4])}


def word_tags(text: str, tokens: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the tag of each word: that of its first token."""
    tags, at = [], 0
    for start, end in words(text):
        while at < len(tokens) and tokens[at]["end"] <= start:
            at += 1
        tags.append(str(tokens[at]["entity"]) if at < len(tokens) and tokens[at]["start"] < end else "O")
    return tags


def entities(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """Return the type, first word and last word of each entity in IOB, IOB2 or IOBES tags."""
    found, kind, start = set[tuple[str, int, int]](), "", 0
    before = "O"
    for index, tag in enumerate([*tags, "O"]):
        prefix, name = tag[:1], tag.split("-", 1)[-1]
        goes_on = prefix in "IE" and before in ("B", "I") and name == kind
        if before != "O" and not goes_on:
            found.add((kind, start, index - 1))
        if prefix != "O" and not goes_on:
            kind, start = name, index
        before = prefix
    return found


def _tags(labelled: Sequence[str], given: Sequence[str]) -> list[float]:
    expected, got = entities(labelled), entities(given)
    right = sum(a == b for a, b in zip(labelled, given, strict=True))
    return [float(n) for n in (len(expected & got), len(got), len(expected), right, len(labelled))]


def _answer(accepted: Sequence[str], given: str) -> list[float]:
    exact = any(_normal(given) == _normal(one) for one in accepted)
    return [float(exact), max((_overlap(_normal(given).split(), _normal(one).split()) for one in accepted), default=0.0), 1.0]


def _normal(answer: str) -> str:
    """Return an answer in lower case, without punctuation, articles and extra white space (Rajpurkar et al. 2016)."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def _overlap(given: Sequence[str], expected: Sequence[str]) -> float:
    """Return the F1 of two bags of words; where one is empty, 1 if both are, else 0."""
    if not given or not expected:
        return float(given == expected)
    return 2 * sum((Counter(given) & Counter(expected)).values()) / (len(given) + len(expected))


def _share(part: Array, whole: Array) -> Array:
    """Return `part` / `whole`, 0 where `whole` is 0."""
    part, whole = np.asarray(part, float), np.asarray(whole, float)
    return np.divide(part, whole, out=np.zeros_like(part), where=whole > 0)
