"""How far a stage's rows are from the reference's: the figures of the coverage sweeps and of texts end to end."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from bertopt.checks import padded_batches
from bertopt.checks.probes import TEXT_BATCH, Probe
from bertopt.checks.sweep_plan import PLACES
from bertopt.core import Spec
from bertopt.errors import WrongAnswer
from bertopt.results import nan_max
from bertopt.results.coverage import Coverage, SweptOutput

if TYPE_CHECKING:
    from bertopt.core import Array


#: Fewest rows of one length whose median is judged.
FEWEST_ROWS = 16
#: Where a row has more scores than this (of labels or tokens), each score is also compared by itself: one wrong score is a small part of the row.
FEW_SCORES, ONE_SCORE = 8, ", one score"
#: Errors of a score are relative to its standard deviation, but at least to this share of its size.
OF_SIZE = 0.5
#: Largest relative difference between the float32 outputs of one text in a call with others and alone.
SAME_CALL = 1e-3


class Comparer:
    """Collects the relative differences of a stage's rows from the reference's; a row consists of all its compared tokens."""

    def __init__(self, usual: Mapping[str, Array], scores: Mapping[str, Array] | None = None) -> None:
        """`usual` are the sizes of the outputs (see `usual_sizes`); `scores` the units of outputs whose scores are also compared by
        themselves (see `score_units`)."""
        self.usual, self.scores = usual, scores or {}
        #: By output and probe: not every probe gives every output.
        self.errors: dict[str, dict[str, Array]] = {}
        self.probes: dict[str, Probe] = {}
        self._vectors = set[str]()
        self.finite = True

    def add(self, probe: Probe, got: Mapping[str, Array], finite: bool, reference: Mapping[str, Array]) -> None:
        """Compare the vectors of one probe, for each output that both give."""
        self.finite = self.finite and finite
        self.probes[probe.name] = probe
        for name in sorted(got.keys() & reference.keys()):
            several = reference[name].shape != (probe.shape[0], 1)
            for figure in (name, *([name + ONE_SCORE] if name in self.scores else [])):
                if several:
                    self._vectors.add(figure)
                self.errors.setdefault(figure, {})[probe.name] = self.row_errors(probe, got, reference, figure)

    def one_number(self, name: str) -> bool:
        """Whether an output is one number for each row, as a re-ranker's is."""
        return name not in self._vectors

    def result(self, seed: int, shares: Mapping[str, float], tokens: int) -> Coverage:
        """Return the figures over all sweeps, for each output."""
        return Coverage(
            seed=seed, tokens=tokens, rows=sum(probe.shape[0] for probe in self.probes.values()),
            finite=self.finite, outputs={name: self._swept(name) for name in self.errors}, **shares,
        )  # fmt: skip

    def _swept(self, name: str) -> SweptOutput:
        every = np.concatenate(list(self.errors[name].values()))
        at = int(every.argmax())  # of NaN the first NaN
        places = [(probe, row) for probe, errors in self.errors[name].items() for row in range(len(errors))]
        probe, row = places[at]
        sizes: dict[bool, list[Array]] = {False: [], True: []}
        for batch, errors in self._batches(name):
            sizes[batch.shape[0] > TEXT_BATCH].append(errors)
        short, padded = self._short(name)
        small, large = (float(np.median(np.concatenate(some))) if some else None for some in sizes.values())
        return SweptOutput(
            median=float(np.median(every)), worst=float(every[at]), where=f"{name}[{row}], {probe}",
            p90=float(np.quantile(every, 0.9)), small_batches=small, large_batches=large, lengths=self._by_length(name), short_rows=short, padded_rows=padded,
            one_number=self.one_number(name),
        )  # fmt: skip

    def _batches(self, name: str) -> list[tuple[Probe, Array]]:
        """Return the probes of `batch sizes`, each with the errors of its rows."""
        return [(self.probes[of], errors) for of, errors in self.errors[name].items() if self.probes[of].padding == "batch sizes"]

    def _short(self, name: str) -> list[float | None]:
        """Return the median of short rows that are not mostly padding, and of those that are; None for fewer than `FEWEST_ROWS`."""
        found: dict[bool, list[Array]] = {False: [], True: []}
        for probe, errors in self._batches(name):
            valid = probe.inputs["attention_mask"] == 1
            padded, tokens = padded_batches.mostly_padding(valid), valid.sum(axis=1)
            few = (tokens >= padded_batches.SHORTEST) & (tokens < padded_batches.SHORT)
            for which, some in found.items():
                some.append(errors[few & (padded == which)])
        joined = [np.concatenate([np.zeros(0), *some]) for some in found.values()]
        return [float(np.median(errors)) if len(errors) >= FEWEST_ROWS else None for errors in joined]

    def _by_length(self, name: str) -> dict[str, float]:
        """Return the median of rows of 1, 2, 3 to 4, 5 to 8 … tokens, of pairs by the length of the second text, and of batches of one size that
        was run more than once (a single run would only show its length)."""
        found: dict[tuple[str, int], list[float]] = {}
        sizes: dict[int, list[Array]] = {}
        for probe, errors in self._batches(name):
            sizes.setdefault(probe.shape[0], []).append(errors)
            valid = probe.inputs["attention_mask"] == 1
            second = valid & (probe.inputs["token_type_ids"] > 0) if "token_type_ids" in probe.inputs else np.zeros_like(valid)
            # Rows that begin with a second text are left out: no pair does, and static INT8 was not calibrated on such rows.
            behind_first = second.sum(axis=1) * ~second[:, :1].any(axis=1)
            for what, tokens in (("rows", valid.sum(axis=1)), ("second texts", behind_first)):
                for count, error in zip(tokens.tolist(), errors.tolist(), strict=True):
                    if count:
                        found.setdefault((what, (count - 1).bit_length()), []).append(error)
        return {
            f"{what} of {_tokens(power)}": float(np.median(errors))
            for (what, power), errors in sorted(found.items())
            if len(errors) >= FEWEST_ROWS
        } | {
            f"rows in batches of {size}": float(np.median(np.concatenate(parts)))
            for size, parts in sorted(sizes.items())
            if len(parts) > 1 and size * len(parts) >= FEWEST_ROWS
        }

    def row_errors(self, probe: Probe, got: Mapping[str, Array], reference: Mapping[str, Array], figure: str) -> Array:
        """Return the difference [B] of each row in one `figure` of `errors`: of the whole output, relative to its size but at least to the usual
        one (a few logits near zero measure nothing), or of the score with the largest error."""
        name, batch = figure.removesuffix(ONE_SCORE), probe.shape[0]
        mine, expected = got[name], reference[name].astype(np.float64)
        if mine.shape != expected.shape:
            return np.full(batch, np.inf)
        row_of_vector = np.arange(batch) if len(mine) == batch else np.argwhere(probe.compared)[:, 0]
        if figure != name:
            furthest = np.zeros(batch)
            np.maximum.at(furthest, row_of_vector, (np.abs(mine - expected) / self.scores[name]).max(axis=-1))
            return furthest
        # Each of several numbers relative to its own size.
        unit, usual_size = units(self.usual[name])
        mine, expected = mine / unit, expected / unit

        def squares_of_rows(vectors: Array) -> Array:
            return np.bincount(row_of_vector, np.square(vectors).sum(axis=-1), batch)

        usual = usual_size**2 * expected.shape[-1] * np.bincount(row_of_vector, minlength=batch)
        sizes = np.maximum(np.maximum(squares_of_rows(expected), usual), 1e-24)
        return np.asarray(np.sqrt(squares_of_rows(mine - expected) / sizes))


def _tokens(power: int) -> str:
    """Return `1 token`, `2 tokens`, `3 to 4 tokens`, …: the numbers above 2^(power - 1), up to 2^power."""
    first, last = 2**power // 2 + 1, 2**power
    return f"{f'{first} to ' if power > 1 else ''}{last} token{'s' if power else ''}"


def end_to_end(got: Mapping[str, Array], reference: Mapping[str, Array], texts: Sequence[object], least: float = 1.0) -> SweptOutput:
    """Compare the outputs `<number>/<name>` of texts with the reference's.

    Each difference is relative to the output's size, but at least to `least` times the usual one; of several outputs of a text the largest counts.
    """
    usual = usual_sizes({key.split("/", 1)[1]: value} for key, value in reference.items())
    errors = np.zeros(len(texts))
    for key, value in reference.items():
        number, name = key.split("/", 1)
        expected = value.astype(np.float64)
        floor = max(least * float(usual[name]) * math.sqrt(expected.size), 1e-12)
        error = math.inf
        if key in got and got[key].shape == expected.shape:
            error = float(np.linalg.norm(got[key] - expected)) / max(float(np.linalg.norm(expected)), floor)
        errors[int(number)] = nan_max((float(errors[int(number)]), error))
    at = int(errors.argmax())  # of NaN the first NaN
    return SweptOutput(median=float(np.median(errors)), worst=float(errors[at]), where=f"text {str(texts[at])[:60]!r}")


def check_alone(found: Mapping[str, Array], texts: Sequence[object]) -> None:
    """Raise WrongAnswer where float32 outputs of one call, `<number>/<name>`, are not those of calls for one text, `<number>/<name>, alone`."""
    alone = {key.removesuffix(", alone"): value for key, value in found.items() if key.endswith(", alone")}
    both = alone.keys() & found.keys()
    if not both:
        return
    differ = end_to_end({key: found[key] for key in both}, {key: alone[key] for key in both}, texts, 0.1)
    if not differ.worst <= SAME_CALL:
        raise WrongAnswer(
            f"the checkpoint's outputs for {differ.where} must be the same in a call for it and in one for {len(texts)} texts; they differ by "
            f"{differ.worst:.3g} of their size: install the versions of torch, transformers and tokenizers that bertopt was tested with, or report it"
        )


def usual_sizes(reference: Iterable[Mapping[str, Array]], by_number: bool = False) -> dict[str, Array]:
    """Return the root mean square of each of the reference's outputs [N, D]: of all elements, or [D] of each column if `by_number`, since
    beside a price any rating is as small as rounding."""
    sums: dict[str, tuple[Array, int]] = {}
    for outputs in reference:
        for name, value in outputs.items():
            total, count = sums.get(name, (np.zeros(()), 0))
            squares = np.square(value, dtype=np.float64)
            sums[name] = total + squares.sum(axis=0 if by_number else None), count + (len(value) if by_number else value.size)
    return {name: np.asarray(np.sqrt(total / max(1, count))) for name, (total, count) in sums.items()}


def score_units(reference: Iterable[Mapping[str, Array]], spec: Spec) -> dict[str, Array]:
    """Return units [D] or [1] for the reference's outputs [N, D] whose scores are compared by themselves. The largest error of a row's scores is
    divided by them; if all its scores are equally wrong, that gives about the same figure as the row as a whole.

    Empty for embeddings, which are compared as a whole, for few labels, and for scores over a vocabulary.
    """
    span, tokens = spec.granularity == "span", spec.granularity == "token"
    if not span and (not spec.labels or (not tokens and len(spec.labels) <= FEW_SCORES)):
        return {}
    found: dict[str, list[Array]] = {}
    for outputs in reference:
        for name in outputs.keys() & set(spec.outputs):
            # For question answering the columns are tokens, and 0 where nothing is compared.
            found.setdefault(name, []).append(outputs[name][outputs[name] != 0][:, None] if span else outputs[name])
    # About the largest of as many normally distributed numbers as a row has scores.
    largest = math.sqrt(2 * math.log(PLACES if span else len(spec.labels) * (PLACES if tokens else 1)))
    each = {name: deviations(np.concatenate(parts)) for name, parts in found.items()}
    # A score that varies less than the others is not rounded less.
    return {name: largest * np.maximum(usual, math.sqrt(float(np.square(usual).mean()))) for name, usual in each.items()}


def deviations(reference: Array) -> Array:
    """Return the standard deviation of each score of vectors [N, D], or `OF_SIZE` of its size where that is more: rounding depends on size."""
    values = reference.astype(np.float64)
    usual = np.maximum(values.std(axis=0), OF_SIZE * np.sqrt(np.square(values).mean(axis=0)))
    return np.where(usual > 0, usual, 1.0)


def units(usual: Array) -> tuple[Array, float]:
    """Return what to divide an output by before it is compared, and its usual size after that."""
    if np.ndim(usual) == 0:
        return np.ones(()), float(usual)
    return np.where(usual > 0, usual, 1.0), 1.0
