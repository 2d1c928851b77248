"""Read the recipe's waivers: known misses of limits, each with a reason and a last day."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from bertopt.recipe.messages import format_value, sentence, validate_model
from bertopt.recipe.suggest import nearest
from bertopt.recipe.yaml_document import Document, KeyPath
from bertopt.results import Limits, Waiver


def read(doc: Document, data: Any, stages: Sequence[str]) -> tuple[Waiver, ...]:
    """The waivers in `data`, the recipe's `waivers`. Every mistake is reported; `stages` are the steps' names."""
    if data is None:  # every entry is commented out
        return ()
    if not isinstance(data, list):
        doc.report(("waivers",), f"waivers must be a list of '- stage: NAME'; got {format_value(data)}")
        return ()
    found = [_one(doc, ("waivers", index), item, stages) for index, item in enumerate(data)]
    taken: set[tuple[str, str]] = set()
    for index, waiver in enumerate(found):
        if waiver is not None and (waiver.stage, waiver.metric) in taken:
            text = f"waiver {index + 1}: {waiver.metric} of '{waiver.stage}' is waived above; keep one"
            doc.report(("waivers", index), text)
        elif waiver is not None:
            taken.add((waiver.stage, waiver.metric))
    return tuple(waiver for waiver in found if waiver is not None)


def _one(doc: Document, path: KeyPath, data: Any, stages: Sequence[str]) -> Waiver | None:
    who = f"waiver {int(path[-1]) + 1}: "
    if not isinstance(data, dict):
        doc.report(path, f"{who}expected a mapping with stage, metric, reason and expires; got {format_value(data)}")
        return None
    waiver = validate_model(Waiver, data, doc, path, who)
    stage, metric, reason = data.get("stage"), data.get("metric"), data.get("reason")
    if isinstance(stage, str) and stage not in stages:
        doc.report((*path, "stage"), f"{who}stage must be a step's name; got {format_value(stage)}{nearest(stage, stages)}")
    known = list(Limits.model_fields)
    if isinstance(metric, str) and metric not in known:
        doc.report((*path, "metric"), f"{who}metric must be a limit; got {format_value(metric)}{nearest(metric, known)}")
    if waiver is not None and waiver.limit is not None and metric in known:
        _check_limit(doc, path, who, waiver.metric, data["limit"])
    if isinstance(reason, str) and reason and not reason.strip():
        doc.report((*path, "reason"), f"{who}reason must say why; got only spaces")
    return waiver


def _check_limit(doc: Document, path: KeyPath, who: str, metric: str, limit: float) -> None:
    if metric == "certified":
        doc.report((*path, "limit"), f"{who}certified is true or false; a waiver of it takes no limit: leave it out")
        return
    try:
        Limits.model_validate({metric: limit}, strict=True)
    except ValidationError as error:
        for mistake in error.errors():
            doc.report((*path, "limit"), f"{who}{sentence(mistake, ('limit',))}, as every limit of {metric}")
