"""Merge the labels of tokens into entities, by the aggregation strategies of transformers' token-classification pipeline."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from bertopt.core import Spec
from bertopt.runtime.tokenization import Tokens
from bertopt.spec import Text

if TYPE_CHECKING:
    from bertopt.core import Array

Aggregation = Literal["none", "simple", "first", "average", "max"]
#: The label that is no entity.
OUTSIDE = "O"


@dataclass(frozen=True)
class _Unit:
    """A token, or a word with strategies that go by words."""

    label: str
    score: float
    word: str
    start: int
    end: int

    @property
    def begins(self) -> bool:
        return self.label.startswith("B-")

    @property
    def tag(self) -> str:
        return self.label[2:] if self.label.startswith(("B-", "I-")) else self.label


def entities(
    spec: Spec, scores: Array, text: Text, tokens: Tokens, strategy: Aggregation, fast: Any, unknown_id: int | None,
    ignored: Collection[str] = (OUTSIDE,),
) -> list[dict[str, Any]]:  # fmt: skip
    """Return the entities of a text, except those of `ignored` labels, from the scores [S, C] of its tokens; see transformers'
    `aggregation_strategy`.

    `fast` is the tokenizer, `unknown_id` the id of its unknown token.
    """
    sentence = text if isinstance(text, str) else text[0]
    kept = [i for i, special in enumerate(tokens.special) if not special and tokens.sequence[i] == 0]
    pieces = [_piece(fast, unknown_id, tokens, i, sentence) for i in kept]
    # Where the strategy goes by tokens, every token starts a unit.
    starts = [k for k in range(len(kept)) if k == 0 or strategy == "simple" or not pieces[k][1]]
    units = []
    for first, after in pairwise([*starts, len(kept)]):
        label, score = _label(scores[kept[first:after]], strategy)
        words = [word for word, _ in pieces[first:after]]
        word = words[0] if strategy == "simple" else _join(fast, words)
        begin, end = tokens.offsets[kept[first]][0], tokens.offsets[kept[after - 1]][1]
        units.append(_Unit(spec.labels[label], score, word, begin, end))
    found = [_entity(fast, group) for group in _groups(units)]
    return [entity for entity in found if entity["entity_group"] not in ignored]


def _piece(fast: Any, unknown_id: int | None, tokens: Tokens, index: int, sentence: str) -> tuple[str, bool]:
    """Return a token's word, and whether it continues the word before."""
    start, end = tokens.offsets[index]
    if tokens.ids[index] == unknown_id:
        return sentence[start:end], False
    word = str(fast.id_to_token(tokens.ids[index]))
    if getattr(fast.model, "continuing_subword_prefix", None):
        return word, len(word) != end - start
    return word, start > 0 and " " not in sentence[start - 1 : start + 1]


def _label(scores: Array, strategy: Aggregation) -> tuple[int, float]:
    """Return the label of a unit and its score, from the scores [T, C] of its tokens."""
    if strategy == "average":
        row = scores.mean(axis=0)
    elif strategy == "max":
        row = scores[int(scores.max(axis=1).argmax())]
    else:
        row = scores[0]
    return int(row.argmax()), float(row.max())


def _groups(units: Sequence[_Unit]) -> Iterator[list[_Unit]]:
    """Yield runs of units with the same tag; B- begins a new run."""
    group: list[_Unit] = []
    for unit in units:
        if group and (unit.begins or unit.tag != group[-1].tag):
            yield group
            group = []
        group.append(unit)
    if group:
        yield group


def _entity(fast: Any, group: Sequence[_Unit]) -> dict[str, Any]:
    return {
        "entity_group": group[0].label.split("-", 1)[-1],
        "score": float(np.mean([unit.score for unit in group])),
        "word": _join(fast, [unit.word for unit in group]),
        "start": group[0].start,
        "end": group[-1].end,
    }


def _join(fast: Any, words: Sequence[str]) -> str:
    return str(fast.decoder.decode(list(words))) if fast.decoder is not None else " ".join(words)
