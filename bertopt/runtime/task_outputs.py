"""Make answers from raw outputs by task, much like transformers' pipelines; docs/getting-started.md lists the differences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from bertopt.core import Spec
from bertopt.runtime.tokenization import Tokens
from bertopt.spec import Text

if TYPE_CHECKING:
    from bertopt.core import Array

#: Longest answer, in tokens, that question answering looks for.
MAX_ANSWER_TOKENS = 15
#: Tokens given for each mask by default.
TOP_K = 5
#: How many labels or tokens to return, best first; None: all. By default a classification returns only its best label, not in a list, a
#: multi-label one all labels, and fill-mask `TOP_K` tokens for each mask.
TopK = int | None | Literal["default"]


def plain(answer: Any) -> Any:
    """Return a predictor's answer in a form that JSON can hold: arrays become lists."""
    return answer.tolist() if isinstance(answer, np.ndarray) else answer


@np.errstate(under="ignore")
def softmax(logits: Array) -> Array:
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=-1, keepdims=True))


@np.errstate(over="ignore", under="ignore")
def sigmoid(logits: Array) -> Array:
    # A float32 logit below -88 overflows, which gives the right score, 0.
    return np.asarray(1.0 / (1.0 + np.exp(-logits)))


def label_scores(spec: Spec, logits: Array) -> Array:
    """Return the scores [B, C] of logits [B, C]: the sigmoid for one label or several independent ones, the raw value for a regression, else
    the softmax."""
    if spec.regression:
        return logits
    return sigmoid(logits) if spec.multi_label or logits.shape[-1] == 1 else softmax(logits)


def classify(spec: Spec, logits: Array, top_k: TopK = "default") -> list[Any]:
    """Return labels with their scores, given logits [B, C]; see `TopK`."""
    scores = label_scores(spec, logits)
    if top_k == "default" and not spec.multi_label:
        best = scores.argmax(axis=-1)
        return [{"label": spec.labels[i], "score": float(row[i])} for i, row in zip(best, scores, strict=True)]
    count = None if top_k == "default" else top_k
    order = np.argsort(-scores, axis=-1, kind="stable")[:, :count]
    return [[{"label": spec.labels[i], "score": float(row[i])} for i in best] for best, row in zip(order, scores, strict=True)]


def rank(logits: Array, scores: Array) -> list[tuple[int, float]]:
    """Return number and score of each passage, best first, given the logits and scores [N, 1] of a query with N passages."""
    # By logit, since the scores of all logits above 17 are 1 in float32.
    return [(i, float(scores[i, 0])) for i in np.argsort(-logits[:, 0], kind="stable").tolist()]


def tag(spec: Spec, logits: Array, text: Text, tokens: Tokens) -> list[dict[str, Any]]:
    """Return a label for each token that is not special, given the logits [S, C] of one text."""
    first = text if isinstance(text, str) else text[0]
    scores = softmax(logits[: len(tokens)])
    found = []
    for index, special in enumerate(tokens.special):
        if special or tokens.sequence[index] != 0:
            continue
        start, end = tokens.offsets[index]
        best = int(scores[index].argmax())
        found.append(
            {
                "entity": spec.labels[best],
                "score": float(scores[index, best]),
                "word": first[start:end],
                "start": start,
                "end": end,
            }
        )
    return found


@np.errstate(under="ignore")
def span(start: Array, end: Array, text: Text, tokens: Tokens) -> dict[str, Any]:
    """Return the best span of the context, given the start and end logits [S] of a (question, context) pair.

    As in transformers' pipeline, the first token takes part in the softmax: models that can give no answer point there, and all spans then
    have scores near 0.
    """
    context = text[1]
    inside = np.array([side == 1 for side in tokens.sequence])
    n = len(tokens)
    shared = inside | ((np.arange(n) == 0) & np.array(tokens.special, bool))
    starts, ends = (softmax(np.where(shared, logits[:n], -1e9)) * inside for logits in (start, end))
    scores = np.triu(np.outer(starts, ends)) - np.triu(np.outer(starts, ends), MAX_ANSWER_TOKENS)
    first, last = np.unravel_index(int(scores.argmax()), scores.shape)
    begin, finish = tokens.offsets[first][0], tokens.offsets[last][1]
    return {"answer": context[begin:finish], "score": float(scores[first, last]), "start": begin, "end": finish}


def fill(
    logits: Array, tokens: Tokens, mask_id: int, decode: Callable[..., str], top_k: TopK = "default", sequences: bool = False
) -> list[list[dict[str, Any]]]:
    """Return the best tokens for each mask of a text, given its logits [S, V]; with `sequences`, and one mask, each with the filled text."""
    filled = []
    masks = [i for i, token in enumerate(tokens.ids) if token == mask_id]
    for position in masks:
        scores = softmax(logits[position])
        best: Sequence[int] = np.argsort(scores)[::-1][: TOP_K if top_k == "default" else top_k].tolist()
        filled.append([{"score": float(scores[i]), "token": i, "token_str": decode([i], skip_special_tokens=False)} for i in best])
    if sequences and len(masks) == 1:
        before, after = tokens.ids[: masks[0]], tokens.ids[masks[0] + 1 :]
        filled = [[{**one, "sequence": decode([*before, one["token"], *after])} for one in filled[0]]]
    return filled
