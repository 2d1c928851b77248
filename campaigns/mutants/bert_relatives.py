"""Faults of what ERNIE has and BERT lacks: types of tasks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from campaigns.mutants.newer_families import _FORMS, _plant
from campaigns.mutants.plant import Checkpoint

ERNIE = Checkpoint("ernie")


def task_lost(network: Any) -> None:
    """The task is not added to the tokens."""
    network.base.embeddings.task_type_embeddings.weight.zero_()


def another_task(network: Any) -> None:
    """The tokens have the second task, not the first."""
    table = network.base.embeddings.task_type_embeddings.weight
    table.copy_(table.roll(-1, 0))


FAULTS: dict[Checkpoint, tuple[Callable[[Any], None], ...]] = {
    ERNIE: (task_lost, another_task),
}

for _on, _faults in FAULTS.items():
    for _fault in _faults:
        for _form in _FORMS:
            _plant(_fault, _on, _form)
