"""Which batches the coverage sweeps run: numbers of rows, each with texts of every range of lengths that takes few tokens.

Kernels choose code by rows, by length and by tokens; services send batches whose texts all have about one length, since predictors sort
them. Every stage runs each number of rows up to `MAX_BATCH` once, and the numbers of one range share the ranges of lengths. The stage to
deliver also runs `CELLS`. Not run: most numbers of rows with more than a few lengths; more than 8 rows that are all longer than 136 tokens,
and 32 that are all longer than 48, but for the largest batch, half of which is long, and those of `padded_batches`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from bertopt.checks.padded_batches import TILES
from bertopt.checks.probes import longest_row
from bertopt.core import Spec

if TYPE_CHECKING:
    from bertopt.core import Array

#: Most rows of the batches that every stage runs. One has about BATCH_TOKENS at most, and no fewer columns than SHORTEST: shorter rows have no
#: room for special tokens, and with two tokens a row, a number of rows would run no text.
MAX_BATCH, BATCH_TOKENS, SHORTEST = 32, 256, 4
#: Ranges of rows, and of the tokens of texts.
ROWS = ((2, 4), (5, 8), (9, 16), (17, 31), (32, 32))
LENGTHS = ((SHORTEST, 4), (5, 8), (9, 16), (17, 40), (41, 128), (129, 255))
#: How many batches of more than `MAX_BATCH` rows, up to `MORE_ROWS`, run on devices whose predictor makes such batches, and most tokens of
#: one: few and short, since each row counts as much in the medians as any other.
MORE_BATCHES, MORE_ROWS, MORE_TOKENS = 6, 1024, 8192
#: Length of the rows of the largest batch.
LARGEST_LENGTH = 256
#: Which rows of a batch are pairs. In most calls all texts are, or none.
Pairs = Literal["some", "none", "one", "all but one", "all"]


class Cell(NamedTuple):
    """A batch with a number of rows and of columns that are drawn from ranges."""

    rows: tuple[int, int]
    columns: tuple[int, int]
    pairs: Pairs = "some"


class Batch(NamedTuple):
    """A batch of `rows` whose longest has `columns` tokens."""

    rows: int
    columns: int
    pairs: Pairs = "some"


#: Batches for the stage to deliver: those that the batches of every stage have no room for, and numbers of rows that services choose. Several
#: rows come right after one of more than 2,000 tokens, and a long text after one of more than 1,000: data that it left behind shows there.
CELLS = (
    *(Cell(rows, columns) for rows in ((1, 1), (2, 4), (32, 32)) for columns in LENGTHS[:3]), Cell((1, 1), (17, 40)), Cell((2, 4), (17, 40)),
    Cell((32, 32), (17, 28)), Cell((2, 4), (41, 96)), Cell((2, 4), (129, 160), "one"), Cell((9, 11), (129, 136), "none"),
    Cell((16, 16), (64, 64), "one"), Cell((17, 18), (129, 136), "all"), Cell((5, 8), (41, 96), "all but one"), Cell((24, 24), (33, 33), "all"),
    Cell((25, 31), (41, 44), "all but one"), Cell((1, 1), (129, 160)),
)  # fmt: skip
CELL_TOKENS = sum(rows[1] * columns[1] for rows, columns, _ in CELLS)


def of_every_stage(spec: Spec, rng: np.random.Generator, most_tokens: int) -> list[Batch]:
    """Return the longest row, and a batch of each number of rows up to `MAX_BATCH`, then of some more."""
    columns, squares = {1: _length(spec, rng, SHORTEST, BATCH_TOKENS)}, list[int]()
    for least, most in ROWS:
        # A tenth more tokens, so that the numbers of one range have the same ranges of lengths.
        cheap = [each for each in LENGTHS if each[0] * most <= 1.1 * BATCH_TOKENS]
        for rows, (shortest, longest) in zip(rng.permutation(np.arange(least, most + 1)).tolist(), cycle(rng.permutation(cheap).tolist())):
            columns[rows] = _length(spec, rng, shortest, max(shortest, min(longest, BATCH_TOKENS // rows)))
            squares += [rows] * (shortest <= rows <= longest)
    # Code that swaps the two axes is right only where a batch has as many columns as rows.
    square = int(rng.choice(squares))
    columns[square] = min(square, spec.max_length)
    return [Batch(1, longest_row(spec)), *(Batch(rows, columns[rows]) for rows in range(1, MAX_BATCH + 1)), *_more(spec, rng, most_tokens)]


def single_rows(spec: Spec, rng: np.random.Generator, run: Sequence[Batch], room: float, beyond: float) -> list[Batch]:
    """Return single rows of lengths that no single row of `run` has: of `room` tokens in all up to the predictor's truncation, and of `beyond`
    more. Lengths that batches have are run as single rows too: kernels also choose code by the number of rows."""
    others = rng.permutation(np.setdiff1d(np.arange(1, longest_row(spec) + 1), [batch.columns for batch in run if batch.rows == 1]))
    # Kernels choose other code at multiples of a tile, and one token before or after: one such length of each tile comes first.
    edges = np.intersect1d(np.add(TILES, rng.integers(-1, 2, len(TILES))), others[others <= spec.text_length])
    # From short to long, so that a large model has some of them.
    others = np.concatenate([edges, others[~np.isin(others, edges)]])
    reached = others <= spec.text_length
    return [
        Batch(1, length) for some, tokens in ((others[reached], room), (others[~reached], beyond)) for length in some[np.cumsum(some) <= tokens].tolist()
    ]


def to_deliver(spec: Spec, rng: np.random.Generator, most_tokens: int) -> list[Batch]:
    """Return a batch of each of `CELLS`, with shorter rows where the model or a batch of the predictor has no room for them, and the largest batch."""
    found = list[Batch]()
    for (least, most), (shortest, longest), pairs in CELLS:
        rows = int(rng.integers(least, most + 1))
        room = max(1, min(longest, most_tokens // rows))
        found.append(Batch(rows, _length(spec, rng, min(shortest, room), room), pairs))
    length = min(spec.max_length, LARGEST_LENGTH)
    return [*found, Batch(max(1, most_tokens // length), length)]


def _length(spec: Spec, rng: np.random.Generator, shortest: int, longest: int) -> int:
    """Draw a length, short ones more often: as many up to 8 as from 8 to 16."""
    longest = min(spec.max_length, longest)
    return min(longest, int(np.exp(rng.uniform(np.log(min(shortest, longest)), np.log(longest + 1))) + 1e-9))


def _more(spec: Spec, rng: np.random.Generator, most_tokens: int) -> list[Batch]:
    """Return one batch from each of `MORE_BATCHES` ranges of rows of equal ratio, if the predictor makes batches of more than `MAX_BATCH` rows."""
    if most_tokens <= MAX_BATCH * LARGEST_LENGTH:
        return []
    edges = np.geomspace(MAX_BATCH + 1, MORE_ROWS, MORE_BATCHES + 1)
    sizes = [int(np.exp(rng.uniform(*np.log(both)))) for both in pairwise(edges)]
    longest = [min(spec.max_length, MORE_TOKENS // rows) for rows in sizes]
    return [Batch(rows, int(rng.integers(max(1, most // 2), most + 1))) for rows, most in zip(sizes, longest, strict=True)]


def mask_of(batch: Batch, rng: np.random.Generator) -> Array:
    """Return the mask [B, S] of rows of different lengths, from half of S and in one of `LENGTHS`; at least one random row has length S."""
    least = max([1, batch.columns // 2, *(shortest for shortest, _ in LENGTHS[1:] if shortest <= batch.columns)])
    lengths = np.resize(rng.permutation(np.arange(least, batch.columns + 1)), batch.rows)
    lengths[int(rng.integers(batch.rows))] = batch.columns
    return (np.arange(batch.columns) < lengths[:, None]).astype(np.int64)
