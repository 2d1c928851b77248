"""Quality: the task metric on labelled texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from bertopt.core import Spec
from bertopt.results import Quality

if TYPE_CHECKING:
    from bertopt.core import Array


def accuracy(spec: Spec, logits: Array, labels: Sequence[str]) -> float:
    """Share of texts whose best label [N, C] is the given one."""
    best = logits.argmax(axis=-1)
    return float(np.mean([spec.labels[i] == label for i, label in zip(best, labels, strict=True)]))


def measure(spec: Spec, logits: Array, reference: float | None, labels: Sequence[str]) -> Quality:
    """Accuracy and its change against the reference's."""
    value = accuracy(spec, logits, labels)
    base = value if reference is None else reference
    return Quality(metric="accuracy", value=value, reference=base, change=value - base, n=len(labels))
