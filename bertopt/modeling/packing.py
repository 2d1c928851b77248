"""Put texts into rows: the place of each text, the arrays of a batch of rows, and the outputs of each text from the batch's.

A row holds one text (layout "padded") or several (layout "packed"). R rows, L tokens of a row, K texts of a row at most,
N texts, T tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bertopt.spec import Spec

if TYPE_CHECKING:
    from bertopt.core import Array


#: Tokens of a captured graph for each place of a text.
TEXT_ROOM = 16


@dataclass(frozen=True)
class Flat:
    """N texts one after another: int64 [T] token ids, types (None: all 0), positions, and the N + 1 `starts`."""

    ids: Array
    types: Array | None
    positions: Array
    starts: Array

    @property
    def lengths(self) -> Array:
        return np.diff(self.starts)


def flat(spec: Spec, ids: Array, types: Array | None, lengths: Array) -> Flat:
    """Plain texts, with the positions that a padded network would give their tokens in the first columns of a row."""
    starts = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    positions = np.arange(spec.position_offset, spec.position_offset + len(ids)) - np.repeat(starts[:-1], lengths)
    if spec.positions == "counted":
        positions = counted(spec, ids, np.repeat(starts[:-1], lengths))
    return Flat(ids, types, positions, starts)


def unpadded(spec: Spec, inputs: Mapping[str, Array]) -> tuple[Array, Flat]:
    """Return the valid tokens of a padded batch, bool [B, S], and their texts, row after row.

    Tokens keep the positions that their columns have in a padded network, or begin at 0 where only distances matter, so that a text has the
    same bits under left padding. In a row without valid tokens the first one counts as valid, since something must be run.
    """
    mask = inputs["attention_mask"] != 0
    if not mask.any():
        mask[0, 0] = True
    lengths = mask.sum(axis=1)
    positions = np.nonzero(mask)[1] + spec.position_offset
    if spec.positions == "none":
        positions = positions - np.repeat(mask.argmax(axis=1), lengths)
    if spec.positions == "counted":
        ids = inputs["input_ids"]
        begins = np.repeat(np.arange(ids.shape[0]) * ids.shape[1], ids.shape[1])
        positions = counted(spec, ids.ravel(), begins)[mask.ravel()]
    types = inputs["token_type_ids"][mask] if "token_type_ids" in spec.inputs else None
    starts = np.concatenate([[0], np.cumsum(lengths[lengths > 0])])
    return mask, Flat(inputs["input_ids"][mask], types, positions, starts)


def counted(spec: Spec, ids: Array, begins: Array) -> Array:
    """Positions [T] as RoBERTa counts them: over the ids that are not its embedding's padding index, which the others
    get. `begins` [T] says where each token's own text begins.

    As transformers' `create_position_ids_from_input_ids`.
    """
    padding = spec.position_offset - 1
    own = ids != padding
    before = np.concatenate([[0], np.cumsum(own)])
    return np.asarray(np.where(own, padding + before[1:] - before[begins], padding))


@dataclass(frozen=True)
class Rows:
    """The row and the first column of each of N texts, and how many tokens of each row are `used` [R]."""

    row: Array
    column: Array
    used: Array


def whole(lengths: Array, block: int) -> Array:
    """Lengths up to the next multiple of `block`, so that what is laid out by them begins at one."""
    return -(-lengths // block) * block if block > 1 else lengths


def singly(lengths: Array) -> Rows:
    """A row for each text."""
    return Rows(np.arange(len(lengths)), np.zeros(len(lengths), np.int64), lengths)


def together(lengths: Array) -> Rows:
    """One row of all texts, one after the other."""
    return Rows(np.zeros(len(lengths), np.int64), np.cumsum(lengths) - lengths, lengths.sum(keepdims=True))


def best_fit(lengths: Array, row_length: int) -> Rows:
    """Put each text, longest first, into the row of `row_length` tokens that it fills best. A longer text gets a row as long as it is.

    This takes about 1 µs for each text: rows with room for n tokens are found by shifting the bits of one integer.
    """
    row, column = np.empty(len(lengths), np.int64), np.empty(len(lengths), np.int64)
    used: list[int] = []
    having: dict[int, list[int]] = {}
    free = 0  # bit n is set where some row has room for n more tokens
    order = np.argsort(-lengths, kind="stable")
    rows, columns = [], []
    for length in lengths[order].tolist():
        found = free >> length
        if found:
            room = length + (found & -found).bit_length() - 1
            at = having[room].pop()
            if not having[room]:
                free ^= 1 << room
        else:
            room, at = max(row_length, length), len(used)
            used.append(0)
        rows.append(at)
        columns.append(used[at])
        used[at] += length
        if left := room - length:
            having.setdefault(left, []).append(at)
            free |= 1 << left
    row[order], column[order] = rows, columns
    return Rows(row, column, np.array(used, np.int64))


def in_order(lengths: Array, row_length: int) -> Rows:
    """Put the texts one after another into rows of at most `row_length` tokens; a longer text gets a separate row."""
    ends = np.cumsum(lengths)
    row, column = np.empty(len(lengths), np.int64), np.empty(len(lengths), np.int64)
    used: list[int] = []
    first = 0
    while first < len(lengths):
        before = int(ends[first] - lengths[first])
        after = max(first + 1, int(np.searchsorted(ends, before + row_length, side="right")))
        row[first:after], column[first:after] = len(used), ends[first:after] - lengths[first:after] - before
        used.append(int(ends[after - 1]) - before)
        first = after
    return Rows(row, column, np.array(used, np.int64))


def spread(lengths: Array, count: int) -> Rows:
    """Put each text, longest first, into the one of `count` rows with the fewest tokens, so that rows have similar lengths."""
    row, column = np.empty(len(lengths), np.int64), np.empty(len(lengths), np.int64)
    heap = [(0, at) for at in range(min(count, len(lengths)))]
    used = np.zeros(len(heap), np.int64)
    for text in np.argsort(-lengths, kind="stable").tolist():
        taken, at = heap[0]
        row[text], column[text] = at, taken
        used[at] = taken + int(lengths[text])
        heapq.heapreplace(heap, (int(used[at]), at))
    return Rows(row, column, used)


@dataclass(frozen=True)
class Batch:
    """The arrays of some rows, and the places of their texts' outputs."""

    inputs: dict[str, Array]
    texts: Array
    """[M] numbers of the texts in it."""
    flat: Flat
    """The texts that these numbers count."""
    row: Array
    slot: Array
    """[M] the row of each text and its number within the row."""
    source: Array
    cells: Array
    """Where in `flat` [T], and where in [R × L], the tokens of its texts are, text after text in the order of `texts`."""
    packed: bool

    def by_text(self, answers: Array) -> Array:
        """Return the vectors [M, D] of the texts from outputs [R, D] or [R, K, D]."""
        return np.asarray(answers[self.row, self.slot] if self.packed else answers[self.row])

    def by_token(self, answers: Array) -> Array:
        """Return the values [T, …] of the tokens from outputs [R, L, …]."""
        return np.asarray(answers.reshape(-1, *answers.shape[2:])[self.cells])

    def padded(self, spec: Spec, outputs: Mapping[str, Array]) -> tuple[dict[str, Array], dict[str, Array]]:
        """The same texts as a padded batch [M, S], and `outputs` as a padded network would give them: 0 for padding."""
        if not self.packed:
            return self.inputs, dict(outputs)
        plain = spec.model_copy(update={"layout": "padded", "one_row": False})
        alone = batch(plain, self.flat, self.texts, np.arange(len(self.texts)), np.zeros(len(self.texts), np.int64))
        answers = {}
        for name, value in outputs.items():
            if spec.granularity == "text":
                answers[name] = self.by_text(value)
                continue
            found = np.zeros((alone.inputs["input_ids"].size, *value.shape[2:]), value.dtype)
            found[alone.cells] = self.by_token(value)
            answers[name] = found.reshape(*alone.inputs["input_ids"].shape, *value.shape[2:])
        return alone.inputs, answers


def batch(spec: Spec, of: Flat, texts: Array, row: Array, column: Array) -> Batch:
    """The arrays of `spec.network_inputs` for the numbered `texts` [M], at least one, each in its `row` (from 0, none
    left out) from its `column`. Rows are as long as the longest."""
    lengths = of.lengths[texts]
    rows, length = int(row.max()) + 1, int((column + lengths).max())
    before = np.cumsum(lengths) - lengths
    steps = np.arange(int(lengths.sum()))
    cells = np.repeat(row * length + column - before, lengths) + steps
    source = np.repeat(of.starts[:-1][texts] - before, lengths) + steps

    def filled(values: Array | int, rest: int = 0) -> Array:
        array = np.full(rows * length, rest, np.int64)
        array[cells] = values
        return array.reshape(rows, length)

    arrays = {"input_ids": filled(of.ids[source], spec.pad_id)}
    if "token_type_ids" in spec.inputs:
        none = np.zeros((rows, length), np.int64)
        arrays["token_type_ids"] = none if of.types is None else filled(of.types[source])
    if spec.layout == "padded":
        arrays["attention_mask"] = filled(1)
        slot = np.zeros(len(texts), np.int64)
    else:
        slot = _slots(row, column)
        arrays["position_ids"] = filled(of.positions[source])
        arrays["segment_ids"] = filled(np.repeat(slot + 1, lengths))
        if "first_tokens" in spec.network_inputs:
            # A power of two, so that few shapes are ever seen.
            most = 1 << int(slot.max()).bit_length()
            arrays["first_tokens"] = np.zeros((rows, most), np.int64)
            arrays["first_tokens"][row, slot] = column
    inputs = {name: arrays[name] for name in spec.network_inputs}
    return Batch(inputs, texts, of, row, slot, source, cells, spec.layout == "packed")


def _slots(row: Array, column: Array) -> Array:
    """The number of each text within its row, from 0, by column."""
    order = np.lexsort((column, row))
    sorted_rows = row[order]
    slot = np.empty(len(row), np.int64)
    slot[order] = np.arange(len(row)) - np.searchsorted(sorted_rows, sorted_rows)
    return slot


def by_length(rows: Rows) -> Array:
    """Return the place [N] of each text's row in the order of the rows by length, longest first."""
    rank = np.empty(len(rows.used), np.int64)
    rank[np.argsort(-rows.used, kind="stable")] = np.arange(len(rows.used))
    return np.asarray(rank[rows.row])


def batches(spec: Spec, of: Flat, rows: Rows, spans: Sequence[tuple[int, int]]) -> Iterator[Batch]:
    """Batches, made when asked for, of neighbouring rows: each from one place to another in their order by length, longest
    first."""
    place = by_length(rows)
    order = np.argsort(place, kind="stable")
    for (first, _), (low, high) in zip(spans, np.searchsorted(place[order], spans).tolist(), strict=True):
        chosen = order[low:high]
        yield batch(spec, of, chosen, place[chosen] - first, rows.column[chosen])


def random_rows(spec: Spec, rows: int, length: int, rng: np.random.Generator) -> dict[str, Array]:
    """The arrays of `rows` texts of `length` tokens drawn from the vocabulary, each in a row that it fills, or in one row
    together where the network takes one."""
    lengths = np.full(rows, length)
    drawn = flat(spec, rng.integers(0, spec.vocabulary, rows * length), None, lengths)
    laid = together(lengths) if spec.one_row else singly(lengths)
    return batch(spec, drawn, np.arange(rows), laid.row, laid.column).inputs
