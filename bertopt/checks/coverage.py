"""Coverage: run every token id, position, batch size and length once, and refuse rows that stand out.

The parity probes look closely at a few inputs; these sweeps look once at what those leave out. Every stage runs the batch sizes and
a few lengths; the stage that is delivered runs every sweep. Lengths are run as one text without padding. Not looked at: batch sizes beyond `MAX_BATCH` other than the largest batch; pairs of a batch size and
a length, or of a text's length and its batch's, other than one or a few for each; ids and lengths beyond the budgets of a
large model (one of 12 layers runs 5 % of 512 lengths of a batch, 14 % of a text) and most that the predictor cuts off; of a
longer row all but `PLACES` or `ROW_PLACES` tokens, and of an output all but `WIDE` columns. The shares are in the report.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from bertopt.checks import framing
from bertopt.checks.framing import Frame
from bertopt.checks.probes import TEXT_BATCH, Probe
from bertopt.core import ShapeLimits, Spec
from bertopt.results import Failure, Limits
from bertopt.results.coverage import Coverage, SweptOutput

if TYPE_CHECKING:
    from bertopt.core import Array

    Run = Callable[[Mapping[str, Array]], Mapping[str, Array]]

#: Rows of 4 ids: one wrong embedding changes such a row by 0.54 at least, dynamic INT8 of MiniLM by 0.24 at most (rows of
#: 8: 0.23 and 0.21; a row of 1 says nothing where post-norm layers forget a lone token).
ID_LENGTH, ID_ROWS = 4, 128
#: Tokens of the batches of 1 … `MAX_BATCH` rows: their length is drawn up to this share of them.
MAX_BATCH, BATCH_TOKENS = 32, 256
#: Of each range one batch size, at random, has long rows: about this many tokens. Programs choose code by rows and by length.
LONG_BATCHES, LONG_TOKENS = ((9, 15), (17, 23), (25, 31)), 1536
#: Length of the rows of the largest batch, and its tokens where each one has an answer over a vocabulary.
LARGEST_LENGTH, WIDE_TOKENS = 256, 2048
#: Compared tokens of a row, where an output has a vector for each, of a batch and of one row; the longest is compared everywhere.
PLACES, ROW_PLACES = 16, 64
#: Columns compared of a wider output.
WIDE = 1024
#: Batches that are run beside copies as well, as rows and how often each is there: rows that are alike may be computed once.
COPIED = ((1, 2), (16, 2), (7, 3))
#: Products and sums that the sweeps may take in the stage that is delivered: about 20 s of two cores.
BUDGET = 8e12
#: Those of rows of one text, of lengths that no batch has: about 6 s for all 256 of MiniLM, as far as every id has room besides;
#: where it has none: about 3 s; and of lengths that the predictor cuts texts off before: less, as only other programs run them.
LENGTHS_BUDGET, LEAST_LENGTHS_BUDGET, CUT_OFF_BUDGET = 1e12, 4e11, 5e10
#: Those of rows of one text that every stage runs.
STAGE_LENGTHS_BUDGET = 5e10
#: Relative difference of a row beyond which a model is wrong whatever its precision, where no limit says so.
GROSS = 0.35
#: Texts through the artefact's tokenizer and predictor; limits beyond `EXACT` are those of reduced precision.
END_TO_END, EXACT = "texts end to end", 1e-3
#: Relative difference of a text's outputs that are as far from the reference's as from none at all.
LOST = 1.0
#: Median difference of rows in larger batches, relative to that in smaller ones, of a model whose batches are wrong by their
#: size; and a difference that counts as rounding, whatever it is in smaller ones.
LARGER, NEAR = 3.0, 0.01
#: Sweeps that only stages of reduced precision run: there a wrong id shows in a short row alone.
SHORT_ROWS = "ids in short rows"


@dataclass(frozen=True)
class Plan:
    """The sweeps over one model: `probes` of padding `batch sizes`, `ids` and `SHORT_ROWS`, and the columns compared.

    `first` names those that every stage runs; the others are for the stage that is delivered. `frame` is around rows of `batch sizes`.
    """

    seed: int
    probes: tuple[Probe, ...]
    first: frozenset[str]
    frame: Frame | None = None

    def of(self, reduced: bool, shapes: ShapeLimits, every: bool = True) -> list[Probe]:
        """Return the sweeps of a stage that runs these shapes, `every` one if it is delivered.

        Ids whose larger batches it cannot run are run in short rows.
        """
        larger = [probe for probe in self.probes if probe.padding == "batch sizes"]
        fitting = [probe for probe in larger if shapes.fit(*probe.shape) is not None]
        if not every:
            return [probe for probe in fitting if probe.name in self.first]
        short = reduced or len(fitting) < len(larger)
        ids = [probe for probe in self.probes if probe.padding == "ids" or (short and probe.padding == SHORT_ROWS)]
        return [*fitting, *(probe for probe in ids if _rows(probe, shapes) > 0)]


def plan(spec: Spec, seed: int, most_tokens: int, frame: Frame | None = None) -> Plan:
    """Spread every id, the padding's too, over batches of all sizes, the largest of `most_tokens`, and rows of `ID_LENGTH`."""
    rng = np.random.default_rng([seed, 18])
    width = spec.vocabulary if spec.task == "fill-mask" else 0
    cost = 2 * (12 * spec.layers * spec.hidden**2 + spec.hidden * width)
    room = int(BUDGET / cost)
    ids = rng.permutation(spec.vocabulary)
    largest = min(most_tokens, WIDE_TOKENS if width else most_tokens)
    least, room_of_ids = LEAST_LENGTHS_BUDGET / cost, len(ids) + largest + MAX_BATCH * BATCH_TOKENS + len(LONG_BATCHES) * LONG_TOKENS
    shapes = _shapes(spec, rng, largest, max(least, min(LENGTHS_BUDGET / cost, room - room_of_ids)), CUT_OFF_BUDGET / cost)
    taken, probes = 0, list[Probe]()
    for shape in shapes:
        mask = _lengths(shape, rng)
        count = int(framing.free(mask, frame).sum())
        probes.append(make_probe(spec, "batch sizes", len(probes), mask, np.take(ids, range(taken, taken + count), mode="wrap"), rng, frame))
        taken += count
    # The longest row, the batch sizes, and of the rows of one text the first; the last of all is the largest batch.
    longest_and_batches, single = probes[: MAX_BATCH + 1], probes[MAX_BATCH + 1 : -1]
    within = np.cumsum([probe.shape[1] for probe in single]) <= STAGE_LENGTHS_BUDGET / cost
    first = [*longest_and_batches, *(probe for probe, early in zip(single, within, strict=True) if early)]
    copies = [_beside_copies(probes[batch], times, len(probes) + number, rng) for number, (batch, times) in enumerate(COPIED)]
    probes += copies
    room = max(room - taken, ID_ROWS * ID_LENGTH)
    length = min(ID_LENGTH, spec.max_length)
    for padding, some in (("ids", ids[taken : taken + room]), (SHORT_ROWS, ids[: min(taken, room)])):
        for start in range(0, len(some), ID_ROWS * length):
            part = some[start : start + ID_ROWS * length]
            mask = np.ones((-(-len(part) // length), length), np.int64)
            probes.append(make_probe(spec, padding, len(probes), mask, np.resize(part, mask.size), rng))
    return Plan(seed, tuple(probes), frozenset(probe.name for probe in (*first, *copies)), frame)


def run_sweeps(
    run: Run, spec: Spec, shapes: ShapeLimits, names: Sequence[Mapping[str, str]], arrays: Mapping[str, Array], seed: int
) -> tuple[list[bool], dict[str, Array]]:
    """Run probes, whose arrays are named `<number>/<name>`; return which had finite outputs, and vectors named so."""
    finite, vectors = [], {}
    for number, fields in enumerate(names):
        inputs, compared = {name: arrays[f"{number}/{name}"] for name in spec.inputs}, arrays[f"{number}/compared"]
        probe = Probe(fields["name"], fields["padding"], inputs, compared, np.ones(len(compared), bool))
        answers, whole = answer(run, probe, spec, shapes, seed)
        finite.append(whole)
        vectors.update({f"{number}/{name}": value for name, value in answers.items()})
    return finite, vectors


def answer(run: Run, probe: Probe, spec: Spec, shapes: ShapeLimits, seed: int) -> tuple[dict[str, Array], bool]:
    """Return vectors [N, D] to compare for each output that `run` gives, and whether every output was finite."""
    kept: dict[str, list[Array]] = {}
    finite, rows = True, _rows(probe, shapes)
    for start in range(0, probe.shape[0], rows):
        part = slice(start, start + rows)
        inputs = {name: np.ascontiguousarray(array[part]) for name, array in probe.inputs.items()}
        for name, value in run(inputs).items():
            finite = finite and bool(np.isfinite(value).all())
            vectors = _vectors(value, probe.compared[part], spec, seed)
            kept.setdefault(name, []).append(np.asarray(vectors, np.float32))
    return {name: np.concatenate(parts) for name, parts in kept.items()}, finite


def narrowed(value: Array, seed: int) -> Array:
    """Return `WIDE` columns of a wider output [..., D], chosen by `seed`."""
    if value.shape[-1] <= WIDE or value.ndim == 1:
        return value
    return value[..., np.random.default_rng([seed, 19]).choice(value.shape[-1], WIDE, replace=False)]


def _vectors(value: Array, compared: Array, spec: Spec, seed: int) -> Array:
    """Return the compared vectors [N, D] of one output."""
    if spec.granularity == "span" and value.ndim == 2:
        return np.where(compared, value[:, : compared.shape[1]], 0)
    chosen = value[:, : compared.shape[1]][compared] if value.ndim == 3 else value
    return narrowed(chosen, seed)


def shares(spec: Spec, probes: Sequence[Probe]) -> dict[str, float]:
    """Return the shares of ids, positions, batch sizes up to `MAX_BATCH`, lengths and token types that `probes` run."""
    ids, types = set[int](), set[int]()
    batches, lengths, valid_lengths, positions = set[int](), set[int](), set[int](), 0
    for probe in probes:
        batch, sequence = probe.shape
        valid = probe.inputs["attention_mask"].astype(bool)
        ids.update(np.unique(probe.inputs["input_ids"][valid]).tolist())
        types.update(np.unique(probe.inputs["token_type_ids"][valid]).tolist() if "token_type_ids" in probe.inputs else ())
        batches.add(batch)
        lengths.add(sequence)
        valid_lengths.update(valid.sum(axis=1).tolist())
        positions = max(positions, int(np.flatnonzero(np.any(valid, axis=0)).max(initial=-1)) + 1)
    known = max(1, spec.token_types if any("token_type_ids" in probe.inputs for probe in probes) else 0)
    return {
        "ids": len({i for i in ids if i < spec.vocabulary}) / spec.vocabulary, "positions": min(1.0, positions / spec.max_length),
        "batch_sizes": len(batches & set(range(1, MAX_BATCH + 1))) / MAX_BATCH,
        "lengths": len(lengths) / spec.max_length, "text_lengths": len(valid_lengths - {0}) / spec.max_length,
        "token_types": min(1.0, len(types) / known) if types else 1.0,
    }  # fmt: skip


def failures(found: Coverage, limits: Limits) -> list[Failure]:
    """Return what is grossly wrong: values that are not finite, a median row beyond `rel_l2`, a row that stands out.

    In float32 a row may differ by `rel_l2`, or by 30 times the median where that is more. The rounding of reduced precision
    spreads less, so there by 5 times the median or by 0.1; and rows in batches larger than those of the real texts, which are
    held to what rounding costs, may differ `LARGER` times as much as in those.
    """
    missed: list[tuple[str | None, str]] = [] if found.finite else [(None, "outputs of the coverage sweeps must be finite")]
    for name, output in found.outputs.items():
        if beyond := next((each for each in held(name, output, limits) if not each.value <= each.limit), None):
            missed.append(("rel_l2" if math.isfinite(output.worst) else None, beyond.text))
    return [Failure(gate="coverage", metric=metric, text=text) for metric, text in missed]


class Held(NamedTuple):
    """What one limit of the sweeps holds: `text` says how it is missed."""

    name: str
    value: float
    limit: float
    text: str


def held(name: str, output: SweptOutput, limits: Limits) -> Iterator[Held]:
    """What is held of one output, the most general limit first: the first that is missed is the one to report."""
    limit, where = _median_limit(limits), f"({output.where})"
    median, small, large = output.median, output.small_batches, output.large_batches
    yield Held("median row", median, limit, f"the median row of the coverage sweeps may differ by {limit:g}; got {median:.4g} {where}")
    if name == END_TO_END and limit > EXACT:
        # How far one text's outputs may be in reduced precision is for the limits on parity to say, unless nothing of them is left.
        most = max(LOST, limit)
        yield Held(END_TO_END, output.worst, most, f"the outputs of one text, end to end, may differ by {most:g}; got {output.worst:.4g} {where}")
        return
    if limit > EXACT and small is not None and large is not None:
        text = f"{LARGER:g} times as much as in smaller ones, {small:.3g}; got {large:.4g} ({name})"
        # Differences below `NEAR` are rounding, whatever they are in smaller batches.
        yield Held("rows in large batches", large, max(LARGER * small, NEAR), f"the median row in batches of more than {TEXT_BATCH} may differ by {text}")
    allowed = allowed_row(median, limit)
    yield Held("one row", output.worst, allowed, f"one row of the coverage sweeps may differ by {allowed:.3g}; got {output.worst:.4g} {where}")


def _median_limit(limits: Limits) -> float:
    """Return `rel_l2`, or without it the relative difference of vectors whose cosine is `cosine_median_min`."""
    gross = GROSS if limits.cosine_median_min is None else math.sqrt(2 * (1 - limits.cosine_median_min))
    return gross if limits.rel_l2 is None else limits.rel_l2


def allowed_row(median: float, limit: float) -> float:
    """Return the largest relative difference of a row that is not a gross fault."""
    return max(limit, min(30 * median, max(5 * median, 0.1)))


def _shapes(spec: Spec, rng: np.random.Generator, most_tokens: int, room: float, beyond: float) -> list[tuple[int, int]]:
    """[B, S]: the longest row, every batch size with another length, a few of them long, the largest batch; and rows of other
    lengths: of `room` tokens up to what the predictor cuts texts to, of tokens `beyond`."""
    sizes = [(1, spec.max_length)]
    long = [int(rng.integers(least, most + 1)) for least, most in LONG_BATCHES]
    for batch in range(1, MAX_BATCH + 1):
        shortest, longest = (LONG_TOKENS // batch // 2, LONG_TOKENS // batch) if batch in long else (2, BATCH_TOKENS // batch)
        longest = max(2, min(spec.max_length, longest))
        length = int(np.exp(rng.uniform(np.log(min(shortest, longest)), np.log(longest + 1))))
        sizes.append((batch, min(spec.max_length, length)))
    others = rng.permutation(np.setdiff1d(np.arange(1, spec.max_length + 1), [sequence for _, sequence in sizes]))
    for some, tokens in ((others[others <= spec.text_length], room), (others[others > spec.text_length], beyond)):
        sizes += [(1, int(length)) for length in some[np.cumsum(some) <= tokens]]
    length = min(spec.max_length, LARGEST_LENGTH)
    return [*sizes, (max(1, most_tokens // length), length)]


def _lengths(shape: tuple[int, int], rng: np.random.Generator) -> Array:
    """Return the mask [B, S] of rows of different lengths, from half the longest, which is anywhere among them."""
    lengths = np.resize(rng.permutation(np.arange(max(1, shape[1] // 2), shape[1] + 1)), shape[0])
    lengths[int(rng.integers(shape[0]))] = shape[1]
    return (np.arange(shape[1]) < lengths[:, None]).astype(np.int64)


def make_probe(spec: Spec, padding: str, number: int, mask: Array, valid: Array, rng: np.random.Generator, frame: Frame | None = None) -> Probe:
    """A batch of the ids `valid` where `mask` [B, S] is 1, in each row between those of `frame`."""
    batch, sequence = mask.shape
    ids = framing.framed(mask, valid, frame, spec.pad_id)
    types = np.zeros((batch, sequence), np.int64)
    if spec.token_types > 1:
        # Half the rows are pairs, which part anywhere.
        second = rng.integers(0, 2 * sequence, batch)[:, None]
        types = (np.arange(sequence) >= second).astype(np.int64) * int(rng.integers(1, spec.token_types)) * mask
    arrays = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
    compared = mask.astype(bool)
    places = PLACES if batch > 1 else ROW_PLACES if sequence < spec.max_length else sequence
    if sequence > places:
        order = np.argsort(np.where(compared, rng.random(mask.shape), 2.0), axis=1)[:, :places]
        chosen = np.zeros_like(compared)
        np.put_along_axis(chosen, order, True, axis=1)
        compared &= chosen
    inputs = {name: np.ascontiguousarray(arrays[name]) for name in spec.inputs}
    return Probe(f"{batch} × {sequence}, sweep {number}: {padding}", padding, inputs, compared, np.ones(batch, bool))


def _beside_copies(probe: Probe, times: int, number: int, rng: np.random.Generator) -> Probe:
    """A batch of the rows of `probe`, each there `times`, in other orders."""
    rows = np.concatenate([np.arange(probe.shape[0]), *(rng.permutation(probe.shape[0]) for _ in range(times - 1))])
    inputs = {name: np.ascontiguousarray(array[rows]) for name, array in probe.inputs.items()}
    name = f"{len(rows)} × {probe.shape[1]}, sweep {number}: rows beside their copies"
    return Probe(name, probe.padding, inputs, probe.compared[rows], probe.rows[rows])


def _rows(probe: Probe, shapes: ShapeLimits) -> int:
    """Return how many rows of a probe are run at once: all, or of an id sweep as many as the form runs."""
    batch, sequence = probe.shape
    if probe.padding == "batch sizes":
        return batch
    most = shapes.most_rows(sequence)
    return batch if most is None else min(batch, most)
