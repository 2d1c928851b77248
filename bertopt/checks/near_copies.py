"""Rows that are nearly equal: a model that caches outputs under a part of its inputs returns one row's output for another.

The cache key may be the first or last tokens, all tokens but one, the tokens in any order, or all inputs but the token types. Rows that
agree in such a key are run in one batch, alone after the row that they resemble, and in a batch after a batch of those rows. Long rows
share three quarters of their tokens, as texts with the same letterhead or signature do. Pairs share one text, as a query does with all
its passages, or a part of one. In some batches many rows share both ends, or many pairs a query: a model may compute those only once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from bertopt.checks import framing
from bertopt.checks.framing import Frame
from bertopt.checks.probes import Probe
from bertopt.core import Spec

if TYPE_CHECKING:
    from bertopt.core import Array

#: Tokens of a row, so that half of it is longer than a cache key would be; and the number of rows that others resemble.
LENGTH, BASES = 40, 3
#: Tokens of the two texts of a pair. Half of the first is as long as an instruction before a query.
QUERY, PASSAGE = 16, 40
#: Tokens that more than FEW rows of a batch share at each end, or as a query; fewest and most rows of a batch of empty texts.
SHARED, FEW, EMPTY = 12, 8, (2, 8)
#: Most tokens of a long row; one in DIFFERS of them differs in the rows that resemble it.
LONG, DIFFERS = 512, 4


def rows(spec: Spec, ids: Array, rng: np.random.Generator, frame: Frame | None) -> tuple[dict[str, Array], int]:
    """Return inputs [K × BASES, S] and K: the base rows 0 … BASES - 1, then K - 1 blocks of rows that resemble them, in the same order."""
    length = min(LENGTH, spec.max_length)
    mask = np.ones((BASES, length), np.int64)
    size = int(framing.free(mask[:1], frame).sum())
    words = np.resize(ids, (BASES, size))
    others = rng.permutation(words.ravel()).reshape(BASES, size)
    # Another token at every place that differs, whatever the permutation gave.
    others = np.where(others == words, np.roll(words, 1, axis=1), others)
    place = np.arange(size)
    likes = [
        words, np.where(place < size // 2, words, others), np.where(place >= size // 2, words, others),
        np.where(place != size // 2, words, others), words[:, ::-1],
    ]  # fmt: skip
    types = [np.zeros(length, np.int64)] * len(likes)
    if spec.token_types > 1:
        likes.append(words)
        types.append((np.arange(length) >= length // 2).astype(np.int64))
    found = [framing.framed(mask, like.ravel(), frame, spec.pad_id) for like in likes]
    ones = np.ones((len(likes) * BASES, length), np.int64)
    return spec.padded_inputs(np.concatenate(found), ones, np.repeat(types, BASES, axis=0)), len(likes)


def long_rows(spec: Spec, ids: Array, rng: np.random.Generator, frame: Frame | None) -> dict[str, Array]:
    """Return inputs [3, S]: a row as long as the longest text, one with another last quarter and one with another first quarter."""
    mask = np.ones((1, min(LONG, spec.text_length)), np.int64)
    size = int(framing.free(mask, frame).sum())
    words, others = np.resize(rng.permutation(ids), (2, size))
    others = np.where(others == words, np.roll(words, 1), others)
    place, differ = np.arange(size), -(-size // DIFFERS)
    likes = [words, np.where(place < size - differ, words, others), np.where(place < differ, others, words)]
    ids = np.concatenate([framing.framed(mask, like, frame, spec.pad_id) for like in likes])
    return spec.padded_inputs(ids, np.repeat(mask, len(likes), axis=0))


def pairs(spec: Spec, ids: Array, rng: np.random.Generator, frame: Frame | None) -> dict[str, Array]:
    """Return inputs [K, S] of a pair and of pairs that resemble it: with another second text (as long, shorter, or with the same first or
    last half), or with another first text (or only another second half of it)."""
    begin, end = (int(each) for each in rng.choice(ids, 2)) if frame is None else frame
    query, other_query, passage, other = (rng.choice(ids, size) for size in (QUERY, QUERY, PASSAGE, PASSAGE))
    half, middle = QUERY // 2, PASSAGE // 2
    both = [
        (query, passage), (query, other), (query, other[:middle]),
        (query, np.append(passage[:middle], other[middle:])), (query, np.append(other[:middle], passage[middle:])),
        (other_query, passage), (np.append(query[:half], other_query[half:]), passage),
    ]  # fmt: skip
    first = [[begin, *one.tolist(), end] for one, _ in both]
    rows = [[*one, *two.tolist(), end] for one, (_, two) in zip(first, both, strict=True)]
    place = np.arange(min(spec.max_length, max(map(len, rows))))
    mask = np.asarray(place < np.array(list(map(len, rows)))[:, None], np.int64)
    inputs = np.full(mask.shape, spec.pad_id, np.int64)
    for row, tokens in zip(inputs, rows, strict=True):
        row[: len(tokens)] = tokens[: len(row)]
    types = (place >= np.array(list(map(len, first)))[:, None]) * mask * (spec.token_types > 1)
    return spec.padded_inputs(inputs, mask, types)


def sharing(spec: Spec, probe: Probe, what: str, frame: Frame | None) -> Probe:
    """Return a batch of rows of one length, changed so that its rows share both ends, as texts after one prompt do, or are pairs with one
    query. `what` describes the batch (see `padded_batches.masks`); batches of other kinds and small ones are returned unchanged."""
    pairs = what == "rows without padding, no tiles" and spec.task in ("question-answering", "text-classification")
    length = int(probe.inputs["attention_mask"][0].sum())
    at = 0 if frame is None else 1
    shared = min(SHARED, (length - 2 * at) // 3)
    if probe.shape[0] <= FEW or not (pairs or what == "rows of one length, padded") or shared < 1:
        return probe
    inputs = {name: array.copy() for name, array in probe.inputs.items()}
    ids = inputs["input_ids"]
    ids[:, at : at + shared] = ids[0, at : at + shared]
    if not pairs:
        ids[:, length - at - shared : length - at] = ids[0, length - at - shared : length - at]
        # All but FEW become the same row: a column of a table may hold one value nearly everywhere.
        for array in inputs.values():
            array[:-FEW] = array[0]
        return replace(probe, inputs=inputs, name=f"{probe.name}, with one beginning and one end")
    ids[:, at + shared] = ids[0, at + shared] if frame is None else frame[1]
    if "token_type_ids" in inputs:
        inputs["token_type_ids"][:] = np.arange(ids.shape[1]) > at + shared
    return replace(probe, inputs=inputs, name=f"{probe.name}, pairs with one query")


def _empty(spec: Spec, number: int, ids: Array, rng: np.random.Generator, frame: Frame | None) -> Probe:
    """Return a batch of empty texts, as a column with missing values gives: equal rows, shorter than all others."""
    rows = int(rng.integers(EMPTY[0], EMPTY[1] + 1))
    around = rng.choice(ids, 2) if frame is None else np.array(frame)
    shape = (rows, min(len(around), spec.max_length))
    inputs = spec.padded_inputs(np.tile(around[: shape[1]], (rows, 1)), np.ones(shape, np.int64))
    return Probe(f"{rows} × {shape[1]}, sweep {number}: empty texts", "batch sizes", inputs, np.ones(shape, bool), np.ones(rows, bool))


def probes(spec: Spec, first: int, ids: Array, rng: np.random.Generator, frame: Frame | None) -> Iterator[Probe]:
    """Yield the batches of nearly equal rows, long rows and pairs, and one of empty texts, numbered from `first`."""
    numbers = count(first)
    inputs, kinds = rows(spec, ids, rng, frame)
    yield from _likes(inputs, kinds, (BASES, 1), numbers)
    yield from _likes(long_rows(spec, ids, np.random.default_rng([first, 22]), frame), 3, (1,), numbers, "long ")
    if spec.token_types > 1 or spec.task in ("question-answering", "text-classification"):
        found = pairs(spec, ids, np.random.default_rng([first, 24]), frame)
        yield from _likes(found, len(found["input_ids"]), (1,), numbers, "pairs in ")
    yield _empty(spec, next(numbers), ids, np.random.default_rng([first, 25]), frame)


def longer_half(probe: Probe, number: int, padding: str) -> Iterator[Probe]:
    """Yield a batch of the longer half of a batch's rows, each twice, if its shortest row fills less than half the columns: as many rows,
    and more tokens."""
    lengths = probe.inputs["attention_mask"].sum(axis=1)
    longer = np.argsort(lengths, kind="stable")[len(lengths) // 2 :]
    if lengths.min() * 2 < probe.shape[1]:
        rows = np.tile(longer, 2)[: len(lengths)]
        inputs = {name: np.ascontiguousarray(array[rows]) for name, array in probe.inputs.items()}
        name = f"{len(rows)} × {probe.shape[1]}, sweep {number}: {padding}"
        yield Probe(name, padding, inputs, probe.compared[rows], probe.rows[rows])


def beside_copies(probe: Probe, times: int, number: int, rng: np.random.Generator) -> Probe:
    """Return a batch with `times` copies of each row of `probe`, in different orders."""
    rows = np.concatenate([np.arange(probe.shape[0]), *(rng.permutation(probe.shape[0]) for _ in range(times - 1))])
    inputs = {name: np.ascontiguousarray(array[rows]) for name, array in probe.inputs.items()}
    name = f"{len(rows)} × {probe.shape[1]}, sweep {number}: rows beside their copies"
    return Probe(name, probe.padding, inputs, probe.compared[rows], probe.rows[rows])


def _likes(inputs: dict[str, Array], kinds: int, sizes: Sequence[int], numbers: Iterator[int], long: str = "") -> Iterator[Probe]:
    """Yield all rows in one batch; then, for each of `sizes`, batches of base rows and of rows that resemble them in turn."""
    bases = len(inputs["input_ids"]) // kinds

    def probe(of: Sequence[int], what: str, before: tuple[Probe, ...] = ()) -> Probe:
        mask = inputs["attention_mask"][list(of)]
        longest = int(mask.sum(axis=1).max())
        chosen = {name: np.ascontiguousarray(array[list(of), :longest]) for name, array in inputs.items()}
        name = f"{len(of)} × {longest}, sweep {next(numbers)}: {long}{what}"
        return Probe(name, "batch sizes", chosen, mask[:, :longest] == 1, np.ones(len(of), bool), before=before)

    yield probe(range(kinds * bases), "rows that are almost alike")
    for size in sizes:
        for kind in range(1, kinds):
            # Right after the rows that they resemble: a cache may hold only these.
            like = probe(range(size), "rows that others are like")
            yield like
            yield probe(range(kind * bases, kind * bases + size), "rows almost like those before", (like,))


def again(probe: Probe, other: Array) -> list[Probe]:
    """Return the probes that run before `probe`, and then `probe`, with each id replaced by `other[id]`."""

    def changed(of: Probe) -> Array:
        ids = of.inputs["input_ids"]
        return np.where(of.inputs["attention_mask"] == 1, other[ids], ids)

    return [replace(each, inputs={**each.inputs, "input_ids": changed(each)}) for each in (*probe.before, probe)]
