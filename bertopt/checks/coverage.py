"""Coverage sweeps: run every token id, position, batch size and length once, and refuse rows whose error stands out.

The parity probes compare a few inputs closely; the sweeps run once what those leave out (`sweep_plan` chooses the rows). Of an output
with more than `WIDE` columns, only that many are compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from bertopt.checks import sweep_plan
from bertopt.checks.batch_shapes import MAX_BATCH
from bertopt.checks.probes import TEXT_BATCH, Probe
from bertopt.core import ShapeLimits, Spec
from bertopt.results import Failure, Limits, nan_as_inf
from bertopt.results.coverage import Coverage, SweptOutput

if TYPE_CHECKING:
    from bertopt.core import Array

    Run = Callable[[Mapping[str, Array]], Mapping[str, Array]]

#: Columns compared of a wider output.
WIDE = 1024
#: Limit of the median row's relative difference where `limits` states neither `rel_l2` nor `cosine_median_min`.
GROSS = 0.35
#: Name of the figures for texts that go through the artefact's own tokenizer and predictor. A limit above `EXACT` is one of reduced precision.
END_TO_END, EXACT = "texts end to end", 1e-3
#: Name of the figures for 400 short texts in one call, which are tokenised in pieces and run in many batches, several at once.
IN_ONE_CALL = "texts in one call"
#: Relative difference of outputs that have nothing in common with the reference's: zeros would be as close.
LOST = 1.0
#: How many times the median one row of reduced precision may differ, where the cosine limit allows more. Correct models had rows at 9
#: times the median; second texts that were cut off were at 54 times, a wrong embedding at 94 times.
MOST_MEDIANS = 25
#: Standard deviation of a normal distribution, divided by the median of the absolute values: for outputs of one number.
ONE_NUMBER = 1.4826
#: How many times as much the median row of larger batches may differ as that of smaller ones, and the median row of some lengths as that
#: of all: correct INT8 models had 2.1 times, second texts that were cut off 13 times. A difference up to `NEAR` always counts as rounding.
LARGER, NEAR = 3.0, 0.01
#: How many times as much the median of short rows that are mostly padding may differ as that of other rows of as many tokens.
PADDED = 2.0
#: How many times the mean error on real texts the median row of reduced precision may differ. Correct models of 8 families and 2
#: checkpoints had 1.1 at most.
TEXT_ERRORS = 5.0
#: How many times the median the 90th percentile of the rows' differences may be; beyond that, many rows are wrong. The same models had 2.1
#: at most. Normally distributed numbers, as the errors of outputs of one number are, have 2.4.
SPREAD = 4.0


def run_sweeps(
    run: Run, spec: Spec, shapes: ShapeLimits, described: Sequence[Mapping[str, str]], arrays: Mapping[str, Array], seed: int
) -> tuple[list[bool], dict[str, Array]]:
    """Run probes, each `described` by name and padding, whose arrays are named `<number>/<name>`.

    Return which had finite outputs, and the vectors [N, D] to compare, named `<number>/<output>`.
    """
    finite, vectors = [], {}
    for number, fields in enumerate(described):
        inputs, compared = {name: arrays[f"{number}/{name}"] for name in spec.inputs}, arrays[f"{number}/compared"]
        probe = Probe(fields["name"], fields["padding"], inputs, compared, np.ones(len(compared), bool))
        answers, whole = answer(run, probe, spec, shapes, seed)
        finite.append(whole)
        vectors.update({f"{number}/{name}": value for name, value in answers.items()})
    return finite, vectors


def answer(run: Run, probe: Probe, spec: Spec, shapes: ShapeLimits, seed: int) -> tuple[dict[str, Array], bool]:
    """Return vectors [N, D] to compare for each output that `run` gives, and whether every output was finite."""
    kept: dict[str, list[Array]] = {}
    finite, rows = True, sweep_plan.rows_at_once(probe, shapes)
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


def failures(found: Coverage, limits: Limits, text_error: float | None = None) -> list[Failure]:
    """Return what the sweeps show to be wrong: values that are not finite, and for each output the first limit of `held` that it misses.

    `text_error` is the mean error of reduced precision on real texts, where it was measured.
    """
    missed = [] if found.finite else [Failure(gate="coverage", metric=None, text="outputs of the coverage sweeps must be finite")]
    for name, output in found.outputs.items():
        if beyond := next((each for each in held(name, output, limits, text_error) if not each.value <= each.limit), None):
            missed.append(Failure.of_figure("coverage", "rel_l2", output.worst, beyond.text))
    return missed


class Held(NamedTuple):
    """A figure of the sweeps and its limit; `text` is what to say where it is missed."""

    name: str
    value: float
    limit: float
    text: str


def held(name: str, output: SweptOutput, limits: Limits, text_error: float | None = None) -> Iterator[Held]:
    """Yield the figures of one output that have limits, the most general first: the first that misses its limit is the one to report.

    In float32 a row may differ by `rel_l2`, or by 30 times the median where that is more. Rounding to reduced precision varies less: there
    a row may differ by 5 times the median, by 0.1 or by what the cosine limit allows, and by `MOST_MEDIANS` medians at most. Real texts
    are mostly short and run in small batches, so larger batches and each range of lengths are compared with the other rows.
    """
    limit, where = _median_limit(limits), f"({output.where})"
    median, small, large = output.median, output.small_batches, output.large_batches
    median_limit, why = limit, ""
    if limits.rel_l2 is None and text_error is not None and (beside_texts := max(NEAR, TEXT_ERRORS * text_error)) < limit:
        median_limit, why = beside_texts, f", {TEXT_ERRORS:g} times the mean error on real texts and at least {NEAR:g}"
    yield Held("median row", median, median_limit, f"the median row of the coverage sweeps may differ by {median_limit:.3g}{why}; got {median:.4g} {where}")
    if name in (END_TO_END, IN_ONE_CALL) and limit > EXACT:
        # How far one text's outputs may be in reduced precision is for the limits on parity to say, unless nothing of them is left.
        most = max(LOST, limit)
        yield Held(name, output.worst, most, f"the outputs of one text, end to end, may differ by {most:g}; got {output.worst:.4g} {where}")
        return
    if limit > EXACT and small is not None and large is not None:
        text = f"{LARGER:g} times as much as in smaller ones, {small:.3g}; got {large:.4g} ({name})"
        # Differences below `NEAR` are rounding, whatever they are in smaller batches.
        yield Held("rows in large batches", large, max(LARGER * small, NEAR), f"the median row in batches of more than {TEXT_BATCH} may differ by {text}")
    if limit > EXACT and output.short_rows is not None and output.padded_rows is not None:
        allowed = max(PADDED * (ONE_NUMBER if output.one_number else 1) * output.short_rows, NEAR)
        text = f"{allowed:.3g}, as others of as many tokens differ by {output.short_rows:.3g}; got {output.padded_rows:.4g} ({name})"
        yield Held("rows that are mostly padding", output.padded_rows, allowed, f"the median of short rows that are mostly padding may differ by {text}")
    if limit > EXACT and output.lengths:
        lengths, most = max(output.lengths.items(), key=lambda item: nan_as_inf(item[1]))
        allowed = max(LARGER * median, NEAR)
        text = f"{LARGER:g} times as much as the median of all rows, {median:.3g}, or by {NEAR:g}; got {most:.4g} ({name})"
        yield Held("rows of one length", most, allowed, f"the median of {lengths} may differ by {text}")
    if limit > EXACT and limits.rel_l2 is None and output.p90 is not None:
        times = SPREAD * (ONE_NUMBER if output.one_number else 1)
        most = max(times * median, NEAR)
        text = f"{times:.3g} times as much as the median row, {median:.3g}, or by {NEAR:g}; one in ten differs by {output.p90:.4g} or more ({name})"
        yield Held("nine rows of ten", output.p90, most, f"nine rows of ten of the coverage sweeps may differ by {text}")
    allowed = allowed_row(median, limit, output.one_number)
    if limit > EXACT and limits.rel_l2 is None:
        # Where the others are close, the limit of cosines is far from what rounding costs a row.
        allowed = min(allowed, max(NEAR, MOST_MEDIANS * median))
    yield Held("one row", output.worst, allowed, f"one row of the coverage sweeps may differ by {allowed:.3g}; got {output.worst:.4g} {where}")


def _median_limit(limits: Limits) -> float:
    """Return `rel_l2`, or without it the relative difference of vectors whose cosine is `cosine_median_min`."""
    gross = GROSS if limits.cosine_median_min is None else math.sqrt(2 * (1 - limits.cosine_median_min))
    return gross if limits.rel_l2 is None else limits.rel_l2


def allowed_row(median: float, limit: float, one_number: bool = False) -> float:
    """Return the largest relative difference of a row that does not stand out, where the median row's is `median`.

    Of outputs of one number 5 medians are 3.4 standard deviations, which rounding reaches in one of 1,300 rows; the norm of a
    vector's differences is near their root mean square.
    """
    return max(limit, min(30 * median, max(5 * median * (ONE_NUMBER if one_number else 1), 0.1)))
