"""Made-up measurements of a stage, for tests of what judges them."""

from __future__ import annotations

from typing import Any

from bertopt.checks.measurements import StageMeasurements
from bertopt.results import Case, Comparison


def case(**changed: Any) -> Case:
    figures = {
        "max_abs": 1e-3, "rel_l2": 1e-3, "cosine_min": 0.9999, "cosine_mean": 0.9999, "label_flips": 0, "compared": 10,
    }  # fmt: skip
    return Case(batch=1, sequence=8, padding="none", where="logits[0, 1], 1 × 8, none", **{**figures, **changed})


def measured(parent: float = 1e-3, **fields: Any) -> StageMeasurements:
    """A stage that differs by `parent` from its parent; fields of a case change its one case."""
    between = Comparison(max_abs=parent, rel_l2=parent, cosine_min=1, cosine_mean=1, label_flips=0, compared=10)
    figures = {name: fields.pop(name) for name in list(fields) if name in Case.model_fields}
    return StageMeasurements(**{"cases": [case(**figures)], "vs_parent": between, "changed": True, **fields})
