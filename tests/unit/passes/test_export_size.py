"""An exported graph holds every weight once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bertopt.errors import Unsupported
from bertopt.passes.export_onnx import _check_size


def graph(*sizes: int) -> Any:
    values = {str(i): SimpleNamespace(const_value=SimpleNamespace(nbytes=size)) for i, size in enumerate(sizes)}
    return SimpleNamespace(graph=SimpleNamespace(initializers=values))


def test_a_layer_that_is_written_many_times_is_refused_and_shared_embeddings_are_not() -> None:
    network = torch.nn.Module()
    network.embeddings, network.layer = torch.nn.Linear(1024, 4096, bias=False), torch.nn.Linear(1024, 1024, bias=False)
    network.again = network.layer
    embeddings, layer = 16 * 2**20, 4 * 2**20
    _check_size(graph(embeddings, layer), network)
    _check_size(graph(embeddings, embeddings, layer), network)
    with pytest.raises(Unsupported, match="wrote 64 MiB of weights where the network has 20: it stored some of them several times"):
        _check_size(graph(embeddings, *[layer] * 12), network)
