"""Masks of batches that the other sweeps hardly contain: without padding, with every row padded, padded to whole tiles, mostly padding, longest
row first, and of documents.

Sessions and kernels choose code by the mask: they drop a mask without padding, cut a batch to its longest row, and remove padding.
Services send all of these: truncated texts fill batches without padding, clients that pad to a fixed length pad every row, one long
text among short ones makes most of a batch padding, and the predictor sorts texts by length. Documents are split into parts as long
as a model takes, and fill the largest batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from bertopt.core import Spec

if TYPE_CHECKING:
    from bertopt.core import Array

#: Fewest and most rows of each kind of batch with padding.
SIZES = ((2, 8), (9, 30))
#: Fewest and most rows of a batch without padding that has a whole number of tiles in at least one dimension, as services choose, and of one
#: that has it in neither; and most tokens of both. Few rows are as long as texts get.
UNPADDED = (((5, 6), (5, 7)), ((32, 32), (9, 31)))
ROW_TILE, TOKEN_TILE = 8, 16
TOKENS = ((1536, 1100), (1536, 1536))
#: Tokens of a batch with padding, and most tokens of a row.
PADDED_TOKENS, LONGEST = 768, 256
#: Widths of tiles: kernels choose other code at their multiples.
TILES = (64, 128, 256, 512)
#: Tokens of the shortest row (one token between the special ones), and the number from which a row does not count as short.
SHORTEST, SHORT = 3, 10
#: A row is mostly padding where its batch has more columns than this number times its tokens.
MOSTLY = 8
#: Fewest padded rows of one length in a large batch: enough for several copies of one row beside more than 8 others.
ALIKE = 16
#: Batches of documents, whose rows are longer than LONGEST: fewest and most rows, and most tokens. Only a GPU runs the second.
DOCUMENTS = ((9, 16, 8192), (33, 128, 65_536))


def masks(spec: Spec, rng: np.random.Generator, most_tokens: int, affordable: int = 0) -> Iterator[tuple[str, Array]]:
    """Yield a description and the mask [B, S] of each batch, of at most `most_tokens`; batches of documents have at most `affordable` tokens."""
    for (least, most), unpadded, tokens in zip(SIZES, UNPADDED, TOKENS, strict=True):
        batch = int(rng.integers(least, most + 1))
        tiled, odd = (int(rng.integers(least, most + 1)) for least, most in unpadded)
        # At least one row less than a whole number of tiles.
        odd -= 0 if odd % ROW_TILE else int(rng.integers(1, ROW_TILE))
        full, partly = (min(spec.text_length, LONGEST, min(most, most_tokens) // rows) for rows, most in zip((tiled, odd), tokens, strict=True))
        yield "rows without padding", np.ones((tiled, max(1, full - full % TOKEN_TILE if full > TOKEN_TILE else full)), np.int64)
        yield "rows without padding, no tiles", np.ones((odd, max(1, partly - (partly % TOKEN_TILE == 0))), np.int64)
        longest = min(spec.text_length, LONGEST, min(PADDED_TOKENS, most_tokens) // batch)
        if longest > SHORTEST:
            most_used = longest - int(rng.integers(1, max(2, longest // 3)))
            padded = rng.integers(min(SHORTEST, most_used), most_used, batch, endpoint=True)
            # The large batch is sorted from short to long, since the others are sorted the other way or not at all.
            yield "every row padded", _mask(np.sort(padded) if most > ROW_TILE else padded, longest)
            lengths = np.exp(rng.uniform(np.log(SHORTEST), np.log(longest / 2 + 1), batch)).astype(int).clip(SHORTEST)  # e^log 3 may be below 3
            lengths[int(rng.integers(batch))] = longest
            yield "short rows beside a long one", _mask(lengths, longest)
            # The large batch has the same lengths as the one before, in another order; the small one has one short row among long ones.
            few = np.append(np.linspace(longest, max(SHORTEST, longest // 2), batch).astype(int)[:-1], SHORTEST)
            yield "longest first", _mask(np.sort(lengths)[::-1] if most > ROW_TILE else few, longest)
            alike = max(batch, ALIKE) if most > ROW_TILE and most_tokens // ALIKE > SHORTEST else batch
            used = min(most_used, min(PADDED_TOKENS, most_tokens) // alike - 1)
            yield "rows of one length, padded", _mask(np.full(alike, used), min(longest, used + 1))
    yield from _tiled(spec, rng, most_tokens)
    yield from _documents(spec, rng, min(most_tokens, affordable))


def half_short(mask: Array, rng: np.random.Generator) -> Array:
    """Return a mask [B, S] with the shorter half of its rows cut to a few tokens, so that they are mostly padding; unchanged where S is too small.

    Padding that takes part in attention by mistake shows most in such rows; in reduced precision it takes many rows to see it.
    """
    batch, columns = mask.shape
    lengths, most = mask.sum(axis=1), min(SHORT, columns // MOSTLY)
    if most <= SHORTEST:
        return mask
    half = np.argsort(lengths, kind="stable")[: batch // 2]
    lengths[half] = rng.integers(SHORTEST, most, len(half))
    return _mask(lengths, columns)


def mostly_padding(valid: Array) -> Array:
    """Return which rows of valid tokens [B, S] are mostly padding."""
    return np.asarray(MOSTLY * valid.sum(axis=1) < valid.shape[1])


def _tiled(spec: Spec, rng: np.random.Generator, most_tokens: int) -> Iterator[tuple[str, Array]]:
    for width in TILES:
        if width <= spec.text_length and 2 * width <= most_tokens:
            # One text of a few words, which many clients pad to a fixed length too.
            yield "rows padded to whole tiles", _mask(np.array([width, rng.integers(SHORTEST, SHORT)]), width)


def _documents(spec: Spec, rng: np.random.Generator, most_tokens: int) -> Iterator[tuple[str, Array]]:
    for least, most, tokens in DOCUMENTS:
        if spec.text_length > LONGEST and tokens <= most_tokens:
            batch = int(rng.integers(least, most + 1))
            columns = int(rng.integers(LONGEST, min(spec.text_length, tokens // batch))) + 1
            lengths = rng.integers(LONGEST, columns, batch, endpoint=True)
            lengths[int(rng.integers(batch))] = columns
            yield "documents", _mask(lengths, columns)


def _mask(lengths: Array, columns: int) -> Array:
    return np.asarray(np.arange(columns) < lengths[:, None], np.int64)
