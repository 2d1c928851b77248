"""Made-up measurements of a stage, for tests of what judges them."""

from __future__ import annotations

from typing import Any

from bertopt.checks.measurements import StageMeasurements
from bertopt.results import Case, Comparison
from bertopt.results.coverage import Coverage, SweptOutput


def case(**changed: Any) -> Case:
    given = {
        "batch": 1, "sequence": 8, "padding": "none", "where": "logits[0, 1], 1 × 8, none", "max_abs": 1e-3, "rel_l2": 1e-3,
        "cosine_min": 0.9999, "cosine_mean": 0.9999, "label_flips": 0, "compared": 10,
    }  # fmt: skip
    return Case.model_validate(given | changed)


def measured(parent: float = 1e-3, **fields: Any) -> StageMeasurements:
    """A stage that differs by `parent` from its parent; fields of a case change its one case."""
    between = Comparison(max_abs=parent, rel_l2=parent, cosine_min=1, cosine_mean=1, label_flips=0, compared=10)
    figures = {name: fields.pop(name) for name in list(fields) if name in Case.model_fields}
    return StageMeasurements(**{"cases": [case(**figures)], "vs_parent": between, "changed": True, **fields})


def swept(median: float = 1e-6, worst: float = 1e-5, name: str = "logits", finite: bool = True) -> Coverage:
    """What coverage sweeps measure of one output."""
    outputs = {name: SweptOutput(median=median, worst=worst, where="row 3 of 8 × 4, sweep 2: ids")}
    shares = dict.fromkeys(("ids", "positions", "batch_sizes", "lengths", "token_types"), 1.0)
    return Coverage(seed=1, outputs=outputs, rows=9, tokens=36, finite=finite, **shares)
