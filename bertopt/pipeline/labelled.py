"""Run labelled texts through a stage in its worker, and compare what it predicts with their labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bertopt.checks import span_metrics, task_metrics
from bertopt.core import Spec
from bertopt.recipe.texts import Texts
from bertopt.results import Quality
from bertopt.spec import Text
from bertopt.workers.client import Worker

if TYPE_CHECKING:
    from bertopt.core import Array


def measurable(spec: Spec, texts: Texts) -> bool:
    """Return whether a metric of the task can be measured with these texts."""
    return task_metrics.measurable(spec, texts.labels is not None, texts.second is not None)


def predictions(worker: Worker, spec: Spec, texts: Texts) -> list[list[float]]:
    """Return what the open stage predicts for each text, as `quality` takes it."""

    def outputs(of: Sequence[Text]) -> Array:
        return worker.exchange("logits", texts=list(of))[1]["logits"]

    if spec.task in span_metrics.TASKS:
        answers = worker.call("answers", texts=list(texts.asked(spec.task)))
        return span_metrics.scores(spec, texts.texts, texts.labels or (), answers)
    if texts.second is not None and spec.task == "feature-extraction":
        return task_metrics.predictions(spec, outputs(texts.texts), outputs(texts.second))
    return task_metrics.predictions(spec, outputs(texts.asked(spec.task)))


def quality(spec: Spec, texts: Texts, predicted: Sequence[Sequence[float]], reference: Sequence[Sequence[float]] | None) -> Quality:
    """Return the metrics of the task; `reference` are the reference's predictions, None for the reference itself."""
    expected = task_metrics.truth(spec, texts.labels or ())
    return task_metrics.measure(spec, expected, predicted, reference, texts.second and texts.texts)
