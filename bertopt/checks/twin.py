"""Compare a stage of reduced precision with its twin: the reference with the same rounding simulated, on the same real texts.

The cost of rounding varies by chance: the error of a three-class model is mostly one shift of its outputs, which another rounding of the
same kind makes half or twice as large. A stage that misses a default limit relative to one twin is therefore compared with up to `DRAWS`
twins that round differently, and each figure is taken relative to the twin with the largest error.

Not seen: faults on other texts, and errors smaller than what rounding costs anyway.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from bertopt.checks.parity import ProbeOutputs
from bertopt.checks.ranking import rank_loss
from bertopt.checks.row_differences import deviations, units
from bertopt.core import Spec
from bertopt.results import nan_max, nan_min
from bertopt.results.fidelity import Rounding

if TYPE_CHECKING:
    from bertopt.core import Array

#: Errors are relative to a vector's size, but at least to this share of the output's usual size.
_SMALL = 0.1
#: Fewest vectors from which their mean error can be separated from the rest.
_MANY = 16
#: Least relative error of a twin that counts: float32 itself differs by as much.
_EXACT = 1e-6
#: How many rounding errors two outputs of one vector move apart at most, if all vectors have errors of the same size.
_TAIL = 8
#: Most twins.
DRAWS = 8


def beside(draws: int, compared: Callable[[int], Rounding | None], passes: Callable[[Rounding], bool]) -> Rounding | None:
    """Return the smallest value of each figure that `compared` gives for twin 0, 1, …: as many as it takes to pass, at most `draws`."""
    least: Rounding | None = None
    for draw in range(draws):
        found = compared(draw)
        if found is None:
            return None
        least = found if least is None else _merged(nan_min, [least, found])
        if passes(least):
            break
    return least


def _merged(of: Callable[[Iterable[float]], float], found: Sequence[Rounding]) -> Rounding:
    """Combine each figure by `of`, leaving out None; `vectors` is the first one's."""
    names = [name for name in Rounding.model_fields if name != "vectors"]
    values = {name: [value for one in found if (value := getattr(one, name)) is not None] for name in names}
    return Rounding(vectors=found[0].vectors, **{name: of(some) if some else None for name, some in values.items()})


def compare(
    spec: Spec, names: Sequence[str], got: Mapping[str, ProbeOutputs], twin: Mapping[str, ProbeOutputs],
    reference: Mapping[str, ProbeOutputs], parent: Mapping[str, ProbeOutputs] | None = None, contexts: Mapping[str, Array] | None = None,
) -> Rounding | None:  # fmt: skip
    """Return how far a stage is from the reference on the probes in `names`, in units of its twin's error.

    `parent` is given where it has the same precision: the stage is then compared with it as well. `contexts` [B, S], where outputs are
    spans, are the tokens that these may be of, by probe. The figures are the worst of all outputs, NaN where anything compared is not
    finite, None where no probe was run by all.
    """
    asked = (got, twin, reference, *([parent] if parent is not None else []))
    names = [name for name in names if all(name in outputs for outputs in asked)]
    if not names:
        return None
    found = []
    for output in spec.outputs:
        # Scores of spans have as many columns as their batch: shorter ones are filled up to the longest.
        mine, theirs, right = (_stack([outputs[name].vectors[output] for name in names]) for outputs in (got, twin, reference))
        before = None if parent is None else _stack([parent[name].vectors[output] for name in names])
        if spec.gives_numbers or spec.gives_several:
            # Each number relative to its own size (beside a price, any rating is small), each label to how much it varies.
            unit = units(np.sqrt(np.square(right).mean(axis=0)))[0] if spec.gives_numbers else deviations(right)
            mine, theirs, right, before = mine / unit, theirs / unit, right / unit, None if before is None else before / unit
        of_output = _of_output(spec, mine, theirs, right, before)
        if contexts is not None:
            inside = (_stack([_inside(outputs[name].vectors[output], contexts[name]) for name in names]) for outputs in (got, reference))
            margin = _flip_margin(spec, *inside) / _least_margin(spec, theirs, right)
            of_output = of_output.model_copy(update={"flip_margin": nan_max([of_output.flip_margin or 0.0, margin])})
        found.append(of_output)
    return _merged(nan_max, found).model_copy(update={"vectors": sum(one.vectors for one in found)})


def finite(outputs: Mapping[str, ProbeOutputs]) -> bool:
    """Return whether every output is finite; a twin in float16 may overflow."""
    return all(of_probe.finite and all(np.isfinite(part).all() for part in of_probe.vectors.values()) for of_probe in outputs.values())


def _of_output(spec: Spec, got: Array, twin: Array, reference: Array, parent: Array | None) -> Rounding:
    """Return the figures of one output, given the compared vectors [N, D] of the stage, its twin, the reference and the parent."""
    usual = math.sqrt(float(np.square(reference).mean()))
    sizes = np.maximum(np.linalg.norm(reference, axis=1), max(_SMALL * usual * math.sqrt(reference.shape[1]), 1e-12))
    error = _mean_error(got, reference, sizes)
    cost = max(_mean_error(twin, reference, sizes), _EXACT)
    # The error of a single element; in the mean over many vectors such errors should cancel.
    rounding = _rounding(twin, reference)
    # Not all of a twin's errors cancel either: some dimensions of embeddings shift by twice the rounding error.
    shift, usual_shift = (0.0 if spec.granularity == "span" else _shift(values, reference) for values in (got, twin))
    # Where outputs hardly vary, an error that is small beside them is large beside their variation.
    about, varied = (values - values.mean(axis=0) for values in (twin - reference, reference))
    ratio = error / cost
    if len(reference) >= _MANY and float(np.linalg.norm(varied)) < _SMALL * float(np.linalg.norm(reference)):
        # There all vectors have the same error by chance: `bias` limits it, and this figure the rest.
        rest = _mean_error(got - (got - reference).mean(axis=0), reference, sizes)
        ratio = rest / max(_mean_error(reference + about, reference, sizes), _EXACT)
    # Relative to the usual size at least: rounding is many times the size of a vector near zero.
    wide = np.maximum(sizes, max(usual * math.sqrt(reference.shape[1]), 1e-12))
    farthest, its = (float((np.linalg.norm(one - reference, axis=1) / wide).max()) for one in (got, twin))
    # For question answering a column is a position, which holds another token in each text.
    by_column = spec.granularity != "span" and reference.shape[1] > 1 and len(reference) >= _MANY
    margin = _flip_margin(spec, got, reference) if spec.gives_several or (spec.labelled and reference.shape[1] > 1 and not spec.regression) else None
    tilt = abs(_slope(got, reference) - 1) / max(cost, float(np.linalg.norm(about)) / max(float(np.linalg.norm(varied)), 1e-12))
    return Rounding(
        error=error, error_ratio=ratio, worst_ratio=farthest / max(its, _EXACT), slope_error=tilt,
        bias=shift / max(rounding, usual_shift), column_ratio=_column_ratio(got - reference, about, usual) if by_column else None,
        flip_margin=None if margin is None else margin / _least_margin(spec, twin, reference),
        rank_ratio=_rank_ratio(got, twin, reference) if spec.pooling is not None else None,
        parent_ratio=None if parent is None else _mean_error(got, parent, sizes) / cost, vectors=len(reference),
    )  # fmt: skip


def _stack(parts: Sequence[Array]) -> Array:
    width = max(part.shape[1] for part in parts)
    filled = [np.pad(part.astype(np.float64), ((0, 0), (0, width - part.shape[1])), mode="edge") for part in parts]
    return np.concatenate(filled)


def _mean_error(got: Array, expected: Array, sizes: Array) -> float:
    return float((np.linalg.norm(got - expected, axis=1) / sizes).mean())


def _shift(got: Array, reference: Array) -> float:
    return float(np.abs((got - reference).mean(axis=0)).max())


def _rounding(twin: Array, reference: Array) -> float:
    """Return the root mean square error of a twin's elements; not less than float32's."""
    usual = math.sqrt(float(np.square(reference).mean()))
    return max(float(np.sqrt(np.square(twin - reference).mean())), _EXACT * usual, 1e-12)


def _least_margin(spec: Spec, twin: Array, reference: Array) -> float:
    """Return the unit of margins: a twin's error or, where a few vectors have most of it, 1/`_TAIL` of the furthest that it moves two outputs
    apart, so that no label may change that the twin's largest error could not change."""
    moved = twin - reference
    furthest = float(np.abs(moved).max() if spec.gives_several else np.ptp(moved, axis=1).max())
    return max(_rounding(twin, reference), furthest / _TAIL)


def _inside(scores: Array, context: Array) -> Array:
    """Return scores [N, S] with those outside the context set to the lowest inside; rows without a context are unchanged."""
    lowest = np.where(context, scores, np.inf).min(axis=1, keepdims=True)
    return np.where(context | ~context.any(axis=1, keepdims=True), scores, lowest)


def _column_ratio(errors: Array, about: Array, usual: float) -> float:
    """Return the largest standard deviation of a column's `errors` in units of the twin's, whose errors `about` their mean are given: of the
    same column's, or of all columns' where that is larger."""
    mine, its = errors.std(axis=0), np.sqrt(np.square(about).mean(axis=0))
    return float((mine / np.maximum(its, max(float(np.sqrt(np.square(its).mean())), _EXACT * usual, 1e-12))).max())


def _slope(got: Array, reference: Array) -> float:
    """Return the slope of all outputs against the reference's, each about its mean (1 / temperature); 1 where nothing varies."""
    about = reference - reference.mean(axis=0)
    spread = float(np.square(about).sum())
    return float((got * about).sum()) / spread if spread > 0 else 1.0


def _flip_margin(spec: Spec, got: Array, reference: Array) -> float:
    """Return the largest margin by which the reference preferred its label over the stage's; 0 where none changed. Where texts have several
    labels: the largest logit, in absolute value, of a label that only one of them gives."""
    if np.isnan(got).any():
        return math.nan
    if spec.gives_several:
        return float(np.abs(reference[(got > 0) != (reference > 0)]).max(initial=0.0))
    chosen = np.take_along_axis(reference, got.argmax(axis=1)[:, None], axis=1)[:, 0]
    return float((reference.max(axis=1) - chosen).max())


def _rank_ratio(got: Array, twin: Array, reference: Array) -> float | None:
    """Return the loss of rank correlation in units of the twin's loss."""
    lost, cost = rank_loss(got, reference), rank_loss(twin, reference)
    return None if lost is None or cost is None else lost / max(cost, _EXACT)
