"""The task metrics of a model on labelled texts, each with a 95 % interval and its paired change from the reference.

`metric_drop_max` limits the first metric of a task; the others are only shown. Accuracy has closed-form intervals (`quality`); the
others have percentile intervals of a seeded bootstrap over texts, paired because both models answer the same resampled texts. Such an
interval has no width where no prediction differs, which proves little with few texts.

Not looked at: probabilities (calibration), thresholds other than 0.5 for several labels, regressions of several values. For entities and
answers to questions see `span_metrics`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bertopt.checks import quality, retrieval, span_metrics
from bertopt.core import Spec
from bertopt.errors import missing_library
from bertopt.results import Quality
from bertopt.spec import Label

if TYPE_CHECKING:
    from bertopt.core import Array

#: Resamples of the bootstrap.
RESAMPLES = 400


@dataclass(frozen=True)
class _Metric:
    """Its value as scikit-learn or scipy gives it, and its values [R] in resamples, in which text n counts `weights[r, n]` times.

    A call of scikit-learn takes milliseconds, so resamples are computed from counts; a test compares the two.
    """

    value: Callable[[Array, Array], float]
    resampled: Callable[[Array, Array, Array], Array]


def measurable(spec: Spec, labelled: bool, paired: bool) -> bool:
    """Return whether there is a metric: of labels, tags of words, answers to questions, or similarities of pairs of texts."""
    alone = spec.task in ("text-classification", "token-classification")
    return labelled and (alone or (paired and (spec.pooling is not None or spec.task == "question-answering")))


def predictions(spec: Spec, outputs: Array, second: Array | None = None) -> list[list[float]]:
    """Return the predictions [N, D] of outputs [N, C], encoded as `truth` is; `second` are the embeddings of the second texts."""
    if second is not None:
        size = np.linalg.norm(outputs, axis=-1) * np.linalg.norm(second, axis=-1)
        found = (outputs * second).sum(axis=-1) / np.maximum(size, 1e-12)
        return [[float(value)] for value in found]
    if spec.graded:
        return [[float(value) for value in row] for row in outputs]
    if spec.multi_label:
        return [[float(value > 0) for value in row] for row in outputs]
    return [[float(value)] for value in outputs.argmax(axis=-1)]


def truth(spec: Spec, labels: Sequence[Label]) -> list[list[float]]:
    """Return the correct `predictions` [N, D]: a value, a flag for each label, or the number of the label; zeros where predictions are scores."""
    if spec.task in span_metrics.TASKS:
        return [[0.0]] * len(labels)
    if spec.graded:
        return [[float(str(label))] for label in labels]
    sets = [{label} if isinstance(label, str) else set(label) for label in labels]
    if spec.multi_label:
        return [[float(name in given) for name in spec.labels] for given in sets]
    return [[float(spec.labels.index(next(iter(given))))] for given in sets]


def measure(
    spec: Spec, expected: Sequence[Sequence[float]], mine: Sequence[Sequence[float]],
    reference: Sequence[Sequence[float]] | None, queries: Sequence[str] | None = None,
) -> Quality:  # fmt: skip
    """Return the first metric of the task, with the others in it; `reference` is None for the reference itself.

    `queries` are the first texts of pairs: where most of them have several passages, ranking metrics come first. Raises Unsupported where
    scikit-learn is needed and not installed.
    """
    y, a = np.asarray(expected, float), np.asarray(mine, float)
    b = None if reference is None else np.asarray(reference, float)
    metrics = _metrics(spec)
    weights = np.random.default_rng(0).multinomial(len(y), np.full(len(y), 1 / len(y)), size=RESAMPLES)
    found = [_bootstrapped(name, metric, y, a, b, weights) for name, metric in metrics.items()]
    if spec.task == "text-classification" and not spec.graded and not spec.multi_label:
        right = [None if p is None else [bool(hit) for hit in (p == y)[:, 0]] for p in (a, b)]
        assert right[0] is not None
        found = [quality.measure(right[0], right[1]), *found]
    ranked = retrieval.rows_by_query(queries, y[:, 0]) if spec.graded and queries else []
    if 2 * sum(map(len, ranked)) > len(y):
        found = [*_of_queries(ranked, y[:, 0], a[:, 0], None if b is None else b[:, 0]), *found]
    return found[0].model_copy(update={"others": found[1:]})


def _metrics(spec: Spec) -> dict[str, _Metric]:
    if spec.task in span_metrics.TASKS:
        return {name: _of_sums(of) for name, of in span_metrics.metrics(spec).items()}
    if spec.graded:
        return _of_values()
    return _of_several_labels() if spec.multi_label else _of_one_label()


def _of_sums(of: Callable[[Array], Array]) -> _Metric:
    return _Metric(lambda _, p: float(of(p.sum(0))), lambda _, p, weights: of(weights @ p))


def _sklearn() -> Any:
    try:
        from sklearn import metrics
    except ModuleNotFoundError as error:
        raise missing_library("labelled texts need scikit-learn", "'bertopt[metrics]'", "give texts without labels") from error
    return metrics


def _of_one_label() -> dict[str, _Metric]:
    metrics = _sklearn()
    return {
        "macro_f1": _Metric(
            lambda y, p: metrics.f1_score(y[:, 0], p[:, 0], average="macro", zero_division=0),
            lambda y, p, weights: _macro_f1(*_counts(*_one_hot(y, p), weights), every=False),
        ),
        "mcc": _Metric(
            lambda y, p: metrics.matthews_corrcoef(y[:, 0], p[:, 0]),
            lambda y, p, weights: _mcc(*_counts(*_one_hot(y, p), weights)),
        ),
    }


def _of_several_labels() -> dict[str, _Metric]:
    metrics = _sklearn()
    return {
        "micro_f1": _Metric(
            lambda y, p: metrics.f1_score(y, p, average="micro", zero_division=0),
            lambda y, p, weights: _micro_f1(*_counts(y, p, weights)),
        ),
        "macro_f1": _Metric(
            lambda y, p: metrics.f1_score(y, p, average="macro", zero_division=0),
            lambda y, p, weights: _macro_f1(*_counts(y, p, weights), every=True),
        ),
        "exact_match": _Metric(metrics.accuracy_score, lambda y, p, weights: weights @ (y == p).all(1) / len(y)),
    }


def _of_values() -> dict[str, _Metric]:
    from scipy.stats import pearsonr, spearmanr

    def metric(of: Any) -> _Metric:
        def value(y: Array, p: Array) -> float:
            if len(y) <= 2 or not np.isfinite(p).all():  # scipy raises for NaN, by version
                return math.nan
            return float(of(y[:, 0], p[:, 0]).statistic)

        def resampled(y: Array, p: Array, weights: Array) -> Array:
            rows = [np.repeat(np.arange(len(y)), counts) for counts in weights]
            return np.array([value(y[chosen], p[chosen]) for chosen in rows])

        return _Metric(value, resampled)

    return {"spearman": metric(spearmanr), "pearson": metric(pearsonr)}


def _of_queries(ranked: Sequence[Array], y: Array, mine: Array, reference: Array | None) -> list[Quality]:
    """Return means over queries, whose rows are `ranked`, resampled by query; recall only where a query has more than `TOP` passages."""
    mean = _Metric(lambda _, p: p.mean(), lambda _, p, weights: weights @ p[:, 0] / len(p))
    weights = np.random.default_rng(0).multinomial(len(ranked), np.full(len(ranked), 1 / len(ranked)), size=RESAMPLES)
    metrics = {f"ndcg_at_{retrieval.TOP}": retrieval.ndcg, f"recall_at_{retrieval.TOP}": retrieval.recall}

    def each(of: Callable[[Array, Array], float], scores: Array | None) -> Array | None:
        return None if scores is None else np.array([[of(y[rows], scores[rows])] for rows in ranked])

    found = []
    for name, of in metrics.items() if max(map(len, ranked)) > retrieval.TOP else [*metrics.items()][:1]:
        values = each(of, mine)
        assert values is not None
        found.append(_bootstrapped(name, mean, values, values, each(of, reference), weights))
    return found


def _one_hot(y: Array, p: Array) -> tuple[Array, Array]:
    labels = np.union1d(y, p)
    return y == labels, p == labels


def _counts(y: Array, p: Array, weights: Array) -> tuple[Array, Array, Array]:
    """Return the numbers of true positives, true and predicted labels [R, K] in each resample, given flags [N, K]."""
    true, predicted = y.astype(float), p.astype(float)
    return weights @ (true * predicted), weights @ true, weights @ predicted


def _macro_f1(hits: Array, true: Array, predicted: Array, every: bool) -> Array:
    """Return the mean over labels [R]; a label that is neither true nor predicted anywhere counts as 0 with `every`, else not at all."""
    there = true + predicted > 0
    scores = np.divide(2 * hits, true + predicted, out=np.zeros_like(hits), where=there)
    return np.asarray(scores.sum(1) / (scores.shape[1] if every else there.sum(1)))


def _micro_f1(hits: Array, true: Array, predicted: Array) -> Array:
    return _macro_f1(hits.sum(1, keepdims=True), true.sum(1, keepdims=True), predicted.sum(1, keepdims=True), every=True)


def _mcc(hits: Array, true: Array, predicted: Array) -> Array:
    """Return Matthews' correlation [R] for any number of labels (Gorodkin 2004); 0 where there is only one label."""
    n = true.sum(1)
    numerator = hits.sum(1) * n - (true * predicted).sum(1)
    size = np.sqrt((n**2 - (true**2).sum(1)) * (n**2 - (predicted**2).sum(1)))
    return np.asarray(np.divide(numerator, size, out=np.zeros_like(numerator), where=size > 0))


def _bootstrapped(name: str, metric: _Metric, y: Array, mine: Array, reference: Array | None, weights: Array) -> Quality:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # correlation of equal values
        value, values = float(metric.value(y, mine)), metric.resampled(y, mine, weights)
        low, high = _percentiles(values)
        alone = Quality(metric=name, value=value, reference=value, change=0.0, n=len(y), low=low, high=high)
        if reference is None:
            return alone
        base, bases = float(metric.value(y, reference)), metric.resampled(y, reference, weights)
        change_low, change_high = _percentiles(values - bases)
    update = {"reference": base, "change": value - base, "change_low": change_low, "change_high": change_high}
    return alone.model_copy(update=update)


def _percentiles(values: Array) -> tuple[float, float]:
    low, high = np.nanquantile(values, [0.025, 0.975])
    return float(low), float(high)
