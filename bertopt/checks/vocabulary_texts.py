"""Texts made of a tokenizer's own words, where those that bertopt comes with are mostly unknown to it: those of proteins, for example."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bertopt.checks.probes import built_in_texts

#: Share of unknown tokens in the built-in texts beyond which they say little of a model.
MOST_UNKNOWN = 0.5
#: Texts that are made, tokens of the longest, and how many of the built-in ones stay: unknown words must be read as well.
COUNT, LONGEST, KEPT = 140, 640, 12
#: Words drawn from, of a large vocabulary.
WORDS = 4096
#: Every fourth text has mask tokens, in turn one in seven of its tokens, as in training, and half of them.
MASKED = (1 / 7, 1 / 2)

Encode = Callable[[Sequence[str]], Sequence[Sequence[int]]]


def unknown_share(ids: Sequence[Sequence[int]], unknown: int | None, special: Sequence[int]) -> float:
    """Return the share of unknown ones among the tokens of texts, special tokens aside."""
    every = np.concatenate([np.asarray(row, np.int64) for row in ids])
    own = every[~np.isin(every, [number for number in special if number != unknown])]
    return float((own == unknown).mean()) if unknown is not None and len(own) else 0.0


def own_words(encode: Encode, vocabulary: Sequence[str], unknown: int | None, special: Sequence[int]) -> list[str]:
    """Return words that a tokenizer knows, each one token; none where it knows most of those of the built-in texts, or fewer than two.

    `encode` gives the ids of texts, `vocabulary` are the spellings by id, `special` the ids of special tokens.
    """
    if unknown_share(encode(built_in_texts()), unknown, special) <= MOST_UNKNOWN:
        return []
    frame = len(encode([""])[0])
    numbers = np.setdiff1d(np.arange(len(vocabulary)), [*special, *([] if unknown is None else [unknown])])
    numbers = np.sort(np.random.default_rng(0).permutation(numbers)[:WORDS])
    words = [vocabulary[number] for number, row in zip(numbers, encode([vocabulary[number] for number in numbers]), strict=True) if len(row) == frame + 1 and number in row]
    return words if len(words) > 1 else []


def replaced(encode: Encode, words: Sequence[str], mask: str | None) -> list[str]:
    """Return texts of a tokenizer's own `words` to check a model with in place of the built-in ones, some of which stay; none without words.

    `encode` is as in `own_words`; `mask` is the mask token where texts are to hold some.
    """
    if not words:
        return []
    start = words[: min(8, len(words))]
    joined = len(encode(["".join(start)])[0]) == len(encode([""])[0]) + len(start)
    lengths = [1, 1, 2, 2, 3, *np.geomspace(2, LONGEST, COUNT - 5).round().astype(int).tolist()]
    rng = np.random.default_rng(0)
    return [*built_in_texts()[:KEPT], *(_text(words, length, number, joined, mask, rng) for number, length in enumerate(lengths))]


def _text(words: Sequence[str], length: int, number: int, joined: bool, mask: str | None, rng: np.random.Generator) -> str:
    """Return a text of `length` tokens. Where words need no spaces between them, two texts in three have none."""
    drawn: list[Any] = [words[place] for place in rng.integers(0, len(words), length)]
    if mask is not None and number % 4 == 3 and length > 1:
        for place in rng.permutation(length)[: max(1, int(MASKED[number // 4 % len(MASKED)] * length))]:
            drawn[place] = mask
    return ("" if joined and number % 3 else " ").join(drawn)
