"""Rows that share most of what they are: a model that keeps answers by a part of its inputs gives one row's to another.

What it keeps them by may be the first or last tokens, all but one, the tokens in any order, or all but their types. Each such row is
run beside the others, alone after the row that it is like, and in a batch after one of such rows.
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

#: Tokens of a row, so that halves are longer than what a cache would take for a key, and rows that others are like.
LENGTH, BASES = 40, 3


def rows(spec: Spec, ids: Array, rng: np.random.Generator, frame: Frame | None) -> tuple[dict[str, Array], int]:
    """Return inputs [K × BASES, S] of rows and how many rows each of the `BASES` is there as: itself and its likes.

    Rows 0 … BASES - 1 are those that the next BASES are like, in the same order, and so on.
    """
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
    shape = (len(likes) * BASES, length)
    arrays = {
        "input_ids": np.concatenate(found), "attention_mask": np.ones(shape, np.int64), "token_type_ids": np.repeat(types, BASES, axis=0),
    }  # fmt: skip
    return {name: arrays[name] for name in spec.inputs}, len(likes)


def probes(spec: Spec, first: int, ids: Array, rng: np.random.Generator, frame: Frame | None) -> Iterator[Probe]:
    """Yield the sweeps, from number `first` on."""
    inputs, kinds = rows(spec, ids, rng, frame)
    numbers = count(first)

    def probe(of: Sequence[int], what: str, before: tuple[Probe, ...] = ()) -> Probe:
        chosen = {name: np.ascontiguousarray(array[list(of)]) for name, array in inputs.items()}
        shape = chosen["input_ids"].shape
        name = f"{shape[0]} × {shape[1]}, sweep {next(numbers)}: {what}"
        return Probe(name, "batch sizes", chosen, np.ones(shape, bool), np.ones(len(of), bool), before=before)

    yield probe(range(kinds * BASES), "rows that are almost alike")
    for size in (BASES, 1):
        for kind in range(1, kinds):
            # Right after those that they are like: a cache may hold no more.
            like = probe(range(size), "rows that others are like")
            yield like
            yield probe(range(kind * BASES, kind * BASES + size), "rows almost like those before", (like,))


def again(probe: Probe, other: Array) -> list[Probe]:
    """Return what is run before a probe, and last the probe, with `other[id]` for each id."""

    def changed(of: Probe) -> Array:
        ids = of.inputs["input_ids"]
        return np.where(of.inputs["attention_mask"] == 1, other[ids], ids)

    return [replace(each, inputs={**each.inputs, "input_ids": changed(each)}) for each in (*probe.before, probe)]
