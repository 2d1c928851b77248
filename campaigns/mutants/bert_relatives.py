"""Faults of what ERNIE, data2vec and RemBERT have and BERT lacks: types of tasks, counted positions, projected embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from campaigns.mutants.newer_families import _FORMS, _plant
from campaigns.mutants.plant import Checkpoint

ERNIE = Checkpoint("ernie")
DATA2VEC = Checkpoint("data2vec-text")
REMBERT = Checkpoint("rembert")


def task_lost(network: Any) -> None:
    """The task is not added to the tokens."""
    network.base.embeddings.task_type_embeddings.weight.zero_()


def another_task(network: Any) -> None:
    """The tokens have the second task, not the first."""
    table = network.base.embeddings.task_type_embeddings.weight
    table.copy_(table.roll(-1, 0))


def positions_from_zero(network: Any) -> None:
    """Positions are counted from 0, not from behind the padding id."""
    embeddings = network.base.embeddings
    table = embeddings.position_embeddings.weight
    table.copy_(table.roll(int(embeddings.padding_idx) + 1, 0))


def projection_bias_lost(network: Any) -> None:
    """What makes narrow embeddings as wide as the layers has lost its bias."""
    network.base.encoder.embedding_hidden_mapping_in.bias.zero_()


def embedding_norm_lost(network: Any) -> None:
    """The norm of the narrow embeddings has lost its weights."""
    network.base.embeddings.LayerNorm.weight.fill_(1)


FAULTS: dict[Checkpoint, tuple[Callable[[Any], None], ...]] = {
    ERNIE: (task_lost, another_task),
    DATA2VEC: (positions_from_zero,),
    REMBERT: (projection_bias_lost, embedding_norm_lost),
}

for _on, _faults in FAULTS.items():
    for _fault in _faults:
        for _form in _FORMS:
            _plant(_fault, _on, _form)
