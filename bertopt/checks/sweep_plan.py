"""Which rows the coverage sweeps run: every token id, position and batch size, and as many lengths as there is time for.

Every stage runs the batch sizes and a few lengths (see `batch_shapes`); the stage to deliver runs every sweep. A length is run as one text
without padding. Not run: ids and lengths beyond the budget of a large model (one of 12 layers runs 5 % of 512 padded lengths, 14 % of the
text lengths); most lengths that the predictor truncates. Of longer rows only `PLACES` or `ROW_PLACES` tokens are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from bertopt.checks import batch_shapes, framing, near_copies, padded_batches
from bertopt.checks.batch_shapes import BATCH_TOKENS, CELL_TOKENS, LARGEST_LENGTH, MAX_BATCH, Batch, Pairs
from bertopt.checks.framing import Frame
from bertopt.checks.probes import Probe, longest_row
from bertopt.core import ShapeLimits, Spec

if TYPE_CHECKING:
    from bertopt.core import Array

#: Rows of 4 ids: one wrong embedding changes such a row by at least 0.54, dynamic INT8 of MiniLM by at most 0.24 (rows of 8: 0.23 and
#: 0.21; in rows of 1, post-norm layers hide the only token).
ID_LENGTH, ID_ROWS = 4, 128
#: Tokens compared in each row of a batch, and in a single row, where outputs have a vector for each token; the longest row is compared whole.
PLACES, ROW_PLACES = 16, 64
#: Batches that are also run with copies of their rows: their number of rows, and how many times each row is in the batch then. A model may
#: compute equal rows only once.
COPIED = ((1, 2), (16, 2), (7, 3))
#: Tokens of the texts that are run alone after the largest batch; several, since buffers may take turns.
ALONE = (12, 4, 4)
#: Tokens of a row that fills a batch, and how many copies of it: more than occur by chance.
ALIKE_LENGTH, ALIKE = 24, 11
#: Floating-point operations of the sweeps over the stage to deliver: about 20 s of two cores.
BUDGET = 8e12
#: Operations of single rows of all lengths: about 6 s for the 256 lengths of MiniLM, as far as all ids fit into the budget beside them; the
#: least otherwise, about 3 s; and of lengths beyond the predictor's truncation, which only other programs run.
LENGTHS_BUDGET, LEAST_LENGTHS_BUDGET, CUT_OFF_BUDGET = 1e12, 4e11, 4e10
#: Operations of the single rows that every stage runs, and most of the longest row if every stage is to run it (bge-m3's 8,192 tokens take
#: 1.2e13). A batch of documents may take as many as the latter, and on a GPU as many times more as its batches are larger.
STAGE_LENGTHS_BUDGET, LONGEST_BUDGET = 5e10, 2e12
#: Sweeps that only stages of reduced precision run: there a wrong id shows only in a short row.
SHORT_ROWS = "ids in short rows"
#: Sweep that only packed models run, whose rows hold many texts: MANY texts (more than 8 bits can number) of 3 or 4 tokens, and BESIDE_LONG
#: of them with one of LONG_TEXT tokens.
MANY_TEXTS, MANY, BESIDE_LONG, LONG_TEXT = "many texts", 600, 24, 288
#: Sweeps whose batches are never split.
WHOLE = ("batch sizes", MANY_TEXTS)


@dataclass(frozen=True)
class Plan:
    """The sweeps over one model. A probe's `padding` names its kind: `batch sizes`, `MANY_TEXTS`, `ids` or `SHORT_ROWS`.

    Every stage runs the probes named in `first`, the stage to deliver runs all. `frame` stands around the rows of `batch sizes`.
    """

    seed: int
    probes: tuple[Probe, ...]
    first: frozenset[str]
    frame: Frame | None = None

    def of(self, reduced: bool, shapes: ShapeLimits, every: bool = True, packed: bool = False) -> list[Probe]:
        """Return the sweeps for a stage that can run these shapes, `every` one if it is to be delivered.

        If it cannot run all larger batches, their ids are run in short rows.
        """
        larger = [probe for probe in self.probes if probe.padding == "batch sizes"]
        fitting = [probe for probe in larger if shapes.fit(*probe.shape) is not None]
        if not every:
            return [probe for probe in fitting if probe.name in self.first]
        short = reduced or len(fitting) < len(larger)
        ids = [probe for probe in self.probes if probe.padding == "ids" or (short and probe.padding == SHORT_ROWS)]
        many = [probe for probe in self.probes if packed and probe.padding == MANY_TEXTS and shapes.fit(*probe.shape) is not None]
        return [*fitting, *many, *(probe for probe in ids if rows_at_once(probe, shapes) > 0)]


def plan(spec: Spec, seed: int, most_tokens: int, frame: Frame | None = None) -> Plan:
    """Spread all ids, including the padding's, over batches of all sizes (the largest has `most_tokens`) and rows of `ID_LENGTH`."""
    rng = np.random.default_rng([seed, 18])
    width = spec.vocabulary if spec.over_vocabulary else 0
    token_cost = 2 * (12 * spec.layers * spec.hidden**2 + spec.hidden * width)
    tokens = int(BUDGET / token_cost)
    ids = rng.permutation(spec.vocabulary)
    beside_lengths = len(ids) + most_tokens + MAX_BATCH * BATCH_TOKENS + CELL_TOKENS
    length_tokens = max(LEAST_LENGTHS_BUDGET / token_cost, min(LENGTHS_BUDGET / token_cost, tokens - beside_lengths))
    early = batch_shapes.of_every_stage(spec, rng, most_tokens)
    single = batch_shapes.single_rows(spec, rng, early, length_tokens, CUT_OFF_BUDGET / token_cost)
    probes, taken = _batches(spec, [*early, *single, *batch_shapes.to_deliver(spec, rng, most_tokens)], ids, rng, frame)
    longest, largest = probes[0].shape[1], probes[-1]
    cheap = longest * (token_cost + 4 * spec.layers * spec.hidden * longest) <= LONGEST_BUDGET
    few = int((np.cumsum([batch.columns for batch in single]) <= STAGE_LENGTHS_BUDGET / token_cost).sum())
    first = probes[0 if cheap else 1 : len(early) + few]
    # Stale data of a large batch shows in short texts right after it.
    probes += [_alone(spec, length, ids, number, rng, frame) for number, length in enumerate(ALONE, len(probes))]
    copies = _copies(spec, probes, ids, rng, frame)
    probes += copies
    probes += near_copies.probes(spec, len(probes), ids, rng, frame)
    affordable = int(LONGEST_BUDGET / token_cost * most_tokens / (MAX_BATCH * LARGEST_LENGTH))
    probes += _padded(spec, most_tokens, affordable, ids, len(probes), np.random.default_rng([seed, 21]), frame)
    probes += _many_texts(spec, most_tokens, ids, len(probes), rng, frame)
    probes += near_copies.longer_half(largest, len(probes), MANY_TEXTS)
    room = max(tokens - taken, ID_ROWS * ID_LENGTH)
    for padding, some in (("ids", ids[taken : taken + room]), (SHORT_ROWS, ids[: min(taken, room)])):
        probes += _id_rows(spec, padding, some, len(probes), rng)
    return Plan(seed, tuple(probes), frozenset(probe.name for probe in (*first, *copies)), frame)


def _batches(
    spec: Spec, batches: Sequence[Batch], ids: Array, rng: np.random.Generator, frame: Frame | None
) -> tuple[list[Probe], int]:
    """Return the batches, filled with `ids` in their order, and how many of them were taken. Half of the last one's rows are short."""
    taken, probes = 0, list[Probe]()
    for number, batch in enumerate(batches, 1):
        mask = batch_shapes.mask_of(batch, rng)
        if number == len(batches):
            mask = padded_batches.half_short(mask, rng)
        count = int(framing.free(mask, frame).sum())
        valid = in_turn(ids, taken, count)
        probes.append(make_probe(spec, "batch sizes", len(probes), mask, valid, rng, frame, batch.pairs))
        taken += count
    return probes, taken


def in_turn(ids: Array, first: int, count: int) -> Array:
    """Return `count` ids from number `first` on: all `ids` in their order, then all of them again and again, each time in another order. In one
    order, all long rows of a small vocabulary, such as that of proteins, would be nearly equal, and a row that gets another's output as well."""
    rounds = range(first // len(ids), (first + count) // len(ids) + 1)
    every = np.concatenate([ids if turn == 0 else np.random.default_rng([turn, 27]).permutation(ids) for turn in rounds])
    return every[first - rounds[0] * len(ids) :][:count]


def _copies(spec: Spec, batches: Sequence[Probe], ids: Array, rng: np.random.Generator, frame: Frame | None) -> list[Probe]:
    """Return some of `batches` with copies of their rows, and a batch of copies of one row."""
    found = [near_copies.beside_copies(batches[batch], times, len(batches) + number, rng) for number, (batch, times) in enumerate(COPIED)]
    row = np.ones((1, min(ALIKE_LENGTH, spec.max_length)), np.int64)
    valid = np.take(ids, range(int(framing.free(row, frame).sum())), mode="wrap")
    alike = make_probe(spec, "batch sizes", len(batches), row, valid, rng, frame)
    return [*found, near_copies.beside_copies(alike, ALIKE, len(batches) + len(found), rng)]


def _id_rows(spec: Spec, padding: str, ids: Array, number: int, rng: np.random.Generator) -> Iterator[Probe]:
    """Yield `ids` in batches of rows of `ID_LENGTH`, from number `number` on."""
    length = min(ID_LENGTH, spec.max_length)
    for start in range(0, len(ids), ID_ROWS * length):
        part = ids[start : start + ID_ROWS * length]
        mask = np.ones((-(-len(part) // length), length), np.int64)
        yield make_probe(spec, padding, number + start // (ID_ROWS * length), mask, np.resize(part, mask.size), rng)


def make_probe(
    spec: Spec, padding: str, number: int, mask: Array, valid: Array, rng: np.random.Generator, frame: Frame | None = None, pairs: Pairs = "some"
) -> Probe:
    """Return a batch with the ids `valid` where `mask` [B, S] is 1, in each row between the two of `frame`."""
    batch, sequence = mask.shape
    ids = framing.framed(mask, valid, frame, spec.pad_id)
    types = np.zeros((batch, sequence), np.int64)
    if spec.token_types > 1:
        # Half of the rows are pairs, split anywhere, or all are, or none, or all but one.
        second = rng.integers(0, 2 * sequence, batch)[:, None]
        if pairs != "some":
            pair = np.full((batch, 1), pairs.startswith("all"))
            pair[rng.integers(batch)] ^= pairs in ("one", "all but one")
            second = np.where(pair, 1 + second % np.maximum(mask.sum(axis=1, keepdims=True) - 1, 1), sequence)
        types = (np.arange(sequence) >= second).astype(np.int64) * int(rng.integers(1, spec.token_types)) * mask
    compared = mask.astype(bool)
    places = PLACES if batch > 1 else ROW_PLACES if sequence < longest_row(spec) else sequence
    if sequence > places:
        order = np.argsort(np.where(compared, rng.random(mask.shape), 2.0), axis=1)[:, :places]
        chosen = np.zeros_like(compared)
        np.put_along_axis(chosen, order, True, axis=1)
        compared &= chosen
    inputs = spec.padded_inputs(ids, mask, types)
    return Probe(f"{batch} × {sequence}, sweep {number}: {padding}", padding, inputs, compared, np.ones(batch, bool))


def _padded(spec: Spec, most: int, affordable: int, ids: Array, number: int, rng: np.random.Generator, frame: Frame | None) -> Iterator[Probe]:
    """Yield the batches of `padded_batches`, numbered from `number`."""
    last: Probe | None = None
    for at, (what, mask) in enumerate(padded_batches.masks(spec, rng, most, affordable), number):
        valid = in_turn(ids, 0, int(framing.free(mask, frame).sum()))
        probe = make_probe(spec, "batch sizes", at, mask, valid, rng, frame, "none" if len(mask) > MAX_BATCH // 4 else "all")
        # Batches of one shape follow each other: data cached under the shape, or the number of tokens, is wrong for the second.
        before = (last,) if last is not None and last.shape == probe.shape else ()
        probe = replace(probe, name=f"{mask.shape[0]} × {mask.shape[1]}, sweep {at}: {what}", before=before)
        last = near_copies.sharing(spec, probe, what, frame)
        yield last


def _alone(spec: Spec, length: int, ids: Array, number: int, rng: np.random.Generator, frame: Frame | None) -> Probe:
    """Return one short text, to run after a large batch."""
    mask = np.ones((1, min(length, spec.max_length)), np.int64)
    probe = make_probe(spec, "batch sizes", number, mask, rng.choice(ids, int(framing.free(mask, frame).sum())), rng, frame)
    return replace(probe, name=f"1 × {mask.shape[1]}, sweep {number}: a text after the largest batch")


def _many_texts(spec: Spec, most_tokens: int, ids: Array, number: int, rng: np.random.Generator, frame: Frame | None) -> Iterator[Probe]:
    """Yield two batches of texts of 3 or 4 tokens: many, as a service may send to a packed model, and fewer together with one long text."""
    short = min(4, spec.max_length)
    for count, longest in ((MANY, short), (BESIDE_LONG, min(LONG_TEXT, spec.text_length))):
        lengths = rng.integers(max(1, short - 1), short + 1, max(1, min(count, most_tokens // short)))
        lengths[0] = longest
        mask = (np.arange(longest) < lengths[:, None]).astype(np.int64)
        valid = in_turn(ids, 0, int(framing.free(mask, frame).sum()))
        yield make_probe(spec, MANY_TEXTS, number, mask, valid, rng, frame)
        number += 1


def rows_at_once(probe: Probe, shapes: ShapeLimits) -> int:
    """Return how many rows of a probe are run at once: all, or in an id sweep as many as the form can run."""
    batch, sequence = probe.shape
    if probe.padding in WHOLE:
        return batch
    most = shapes.most_rows(sequence)
    return batch if most is None else min(batch, most)
