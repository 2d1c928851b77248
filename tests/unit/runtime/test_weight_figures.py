"""Figures of weights: the same for the same weights, others where a row is another's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from bertopt.runtime import weight_figures
from bertopt.runtime.weight_figures import Figures


def figures(network: nn.Module) -> Figures:
    session: Any = SimpleNamespace(network=network)
    found = weight_figures.figures(session)
    assert found is not None
    return found


@pytest.fixture
def table() -> nn.Embedding:
    torch.manual_seed(0)
    return nn.Embedding(30_000, 32)


def test_files_have_none() -> None:
    assert weight_figures.figures(SimpleNamespace(path="model.onnx")) is None  # type: ignore[arg-type]


def test_the_last_bits_make_no_difference(table: nn.Embedding) -> None:
    before = figures(table)
    assert weight_figures.difference(before, figures(table)) is None
    with torch.no_grad():
        table.weight.mul_(1 + 1e-6 * torch.randn(table.weight.shape))
    assert weight_figures.difference(before, figures(table)) is None


def test_a_row_that_is_anothers_is_named(table: nn.Embedding) -> None:
    before = figures(table)
    with torch.no_grad():
        table.weight[77] = table.weight[78]
    assert weight_figures.difference(before, figures(table)) == "weight"


def test_a_tensor_that_is_missing_or_nan_is_named(table: nn.Embedding) -> None:
    before = figures(table)
    assert weight_figures.difference(before, {}) == "weight"
    assert weight_figures.difference({"weight": [float("nan")] * 5}, before) == "weight"


def test_masks_of_the_least_numbers_equal_themselves() -> None:
    network = nn.Module()
    network.register_buffer("mask", torch.full((4, 4), torch.finfo(torch.float32).min))
    network.register_buffer("infinite", torch.full((4,), float("-inf")))
    network.register_buffer("ids", torch.arange(8)[None])
    assert weight_figures.difference(figures(network), figures(network)) is None


def test_checksums_show_a_last_bit(table: nn.Embedding) -> None:
    session: Any = SimpleNamespace(network=table.bfloat16())
    before = weight_figures.checksums(session)
    assert before == weight_figures.checksums(session) and list(before) == ["weight"]
    with torch.no_grad():
        table.weight[7, 7] = torch.nextafter(table.weight[7, 7], table.weight.new_tensor(9.0))
    assert weight_figures.checksums(session) != before
    path: Any = SimpleNamespace(path="model.onnx")
    assert not weight_figures.checksums(path)


def test_a_buffer_that_each_call_moves_is_seen(table: nn.Embedding) -> None:
    """A quantiser's ranges that were still measured when the model was delivered: after a million calls they are others."""
    session: Any = SimpleNamespace(network=table)
    table.register_buffer("range", torch.ones(()))
    table.register_buffer("cache", torch.ones(3), persistent=False)
    before = weight_figures.checksums(session)
    table.cache = torch.zeros(5)
    assert weight_figures.checksums(session) == before, "what is not stored may be kept for the next call"
    table.range.mul_(1 + 1e-6)
    after = weight_figures.checksums(session)
    assert {name for name in before if before[name] != after[name]} == {"range"}
