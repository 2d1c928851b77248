"""Split texts that are too long for a model into windows that overlap, and merge the windows' answers.

Windows are those of transformers' pipelines: of a pair (question, context) the context is split, and the question is in each window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from bertopt.core import Task
from bertopt.errors import UsageError
from bertopt.runtime.tokenization import Encoded, Tokenizer
from bertopt.spec import Text


@dataclass(frozen=True)
class Windows:
    """The windows of some texts, in their order; text i has the windows from `starts[i]` to before `starts[i + 1]`."""

    encoded: Encoded
    starts: list[int]

    def of_each(self, texts: Sequence[Text]) -> list[Text]:
        """Return the text of each window."""
        return [text for text, (start, end) in zip(texts, pairwise(self.starts), strict=True) for _ in range(start, end)]

    def merged(self, answers: Sequence[Any]) -> list[Any]:
        """Return an answer for each text, merged from those of its windows."""
        return [_merged(answers[start:end]) for start, end in pairwise(self.starts)]


def split(
    tokenizer: Tokenizer, texts: Sequence[Text], task: Task, stride: int, truncate: bool, first: int = 0, most: int | None = None
) -> Windows:
    """Return windows of at most the model's limit that overlap by `stride` tokens; a text that is not too long is one window.

    A pair whose question leaves no room for windows is truncated, and its number, counted from `first`, is in `cut`; without `truncate`
    UsageError is raised. So it is for a `stride` that does not fit into a window, for a pair where the task takes single texts, and,
    before they are made, for windows of more than `most` tokens in all.
    """
    paired = task == "question-answering"
    room = tokenizer.limit - int(tokenizer.whole.num_special_tokens_to_add(paired))
    if stride >= room:
        raise UsageError(f"stride must be less than the {room} tokens that a window has beside special ones; got {stride}")
    found, starts, cut, total = [], [0], [], 0
    for number, (text, whole) in enumerate(zip(texts, tokenizer.whole.encode_batch(list(texts)), strict=True), first):
        if not paired and not isinstance(text, str):
            raise UsageError(f"stride goes with single texts; texts[{number}] is a pair: leave stride out, or give its first text alone")
        if len(whole) <= tokenizer.limit:
            total += len(whole)
            windows = [whole]
        elif (left := tokenizer.limit - len(whole) + (length := whole.sequence_ids.count(int(paired)))) > stride:
            total += tokenizer.limit * (1 + math.ceil((length - left) / (left - stride)))
            if most is not None and total > most:
                raise UsageError(
                    f"texts[{number}]: with the texts before it, its windows have about {total} tokens; expected at most {most}: give fewer texts "
                    "at once, or a smaller stride"
                )
            windows = tokenizer.windows(text, stride)
        elif truncate:
            windows = [tokenizer.cut(text)]
            cut.append(number)
        else:
            raise UsageError(
                f"texts[{number}] has a question that leaves {max(left, 0)} tokens for a window of its context, and neighbours share {stride}: "
                "shorten the question, give a smaller stride, or leave out truncate=False to have the text cut"
            )
        found += windows
        starts.append(len(found))
    return Windows(tokenizer.encoded(found, paired, cut, origins=True), starts)


def _merged(answers: Sequence[Any]) -> Any:
    """Return the span with the best score, or the entities of all windows."""
    if len(answers) == 1:
        return answers[0]
    if isinstance(answers[0], dict):
        return answers[int(np.argmax([answer["score"] for answer in answers]))]
    return _without_overlaps([entity for found in answers for entity in found])


def _without_overlaps(entities: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return of entities that overlap only the longest, and of equally long ones the one with the best score."""
    kept: list[dict[str, Any]] = []
    for entity in sorted(entities, key=lambda entity: int(entity["start"])):
        if not kept or entity["start"] >= kept[-1]["end"]:
            kept.append(entity)
        elif (entity["end"] - entity["start"], entity["score"]) > (kept[-1]["end"] - kept[-1]["start"], kept[-1]["score"]):
            kept[-1] = entity
    return kept
