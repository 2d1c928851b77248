"""Eager attention over some queries at a time: the family's numbers, without the scores of all queries at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bertopt.modeling import checkpoint, query_blocks
from tests.support.tiny_models import FAMILIES, Tiny

BATCH, SEQUENCE, HEADS = 3, 40, 2


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most numbers of a result with a row for each head."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dim() == 4 and result.shape[1] == HEADS and result.shape[3] == SEQUENCE:
            self.numbers = max(self.numbers, result.numel())
        return result


def run(network: Any, masked: bool) -> tuple[torch.Tensor, int]:
    inputs = dict(zip(network.inputs, network.example(BATCH, SEQUENCE), strict=True))
    if not masked:
        inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
    with torch.inference_mode(), Largest() as largest:  # type: ignore[no-untyped-call]
        return network(*inputs.values())[0], largest.numbers


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("family", [*FAMILIES, "albert", "modernbert"])
def test_a_long_row_is_attended_in_blocks(family: str, masked: bool, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    # Every token is compared: with a window, the first one sees none of the later blocks.
    network = checkpoint.load(tiny(family, "token-classification")).network
    whole, scores = run(network, masked)
    # Blocks of 23 queries and of 17.
    monkeypatch.setattr(query_blocks, "LONG_BYTES", 4 * HEADS * SEQUENCE**2 - 1)
    monkeypatch.setattr(query_blocks, "BLOCK_BYTES", 4 * 23 * BATCH * HEADS * SEQUENCE)
    parts, block = run(network, masked)
    assert torch.allclose(parts, whole, atol=1e-6) and (scores, block) == (BATCH * HEADS * SEQUENCE**2, 23 * BATCH * HEADS * SEQUENCE)
    assert network.base.config._attn_implementation == "eager"


@pytest.mark.parametrize("family", ["mpnet", "deberta", "deberta-v2", "rembert", "megatron-bert"])
def test_families_without_an_interface_attend_as_ever(family: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    network = checkpoint.load(tiny(family)).network
    whole, _ = run(network, True)
    monkeypatch.setattr(query_blocks, "LONG_BYTES", 1)
    assert torch.equal(run(network, True)[0], whole)


def test_many_short_rows_run_as_transformers_runs_them(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are timed: BERT-base's 128 × 512 has more scores than one long row."""
    network = checkpoint.load(tiny()).network
    monkeypatch.setattr(query_blocks, "LONG_BYTES", 4 * HEADS * SEQUENCE**2)
    monkeypatch.setattr(query_blocks, "BLOCK_BYTES", 1)
    assert run(network, True)[1] == BATCH * HEADS * SEQUENCE**2


def test_a_graph_is_made_of_the_whole(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number of blocks would be that of the traced sizes."""
    network = checkpoint.load(tiny()).network
    monkeypatch.setattr(query_blocks, "LONG_BYTES", 1)
    batch, sequence = torch.export.Dim("batch"), torch.export.Dim("sequence", max=64)
    inputs = network.example(2, 16)
    program = torch.export.export(network, inputs, dynamic_shapes={"tensors": tuple({0: batch, 1: sequence} for _ in inputs)})
    larger = network.example(3, 24)
    with torch.inference_mode():
        assert torch.allclose(program.module()(*larger)[0], network(*larger)[0], atol=1e-6)


def test_an_error_leaves_the_attention_as_it_was(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    network = checkpoint.load(tiny()).network
    monkeypatch.setattr(query_blocks, "LONG_BYTES", 1)
    with pytest.raises(RuntimeError):
        network(*(tensor[:, :1].expand(1, 65) for tensor in network.example(1, 4)))
    assert network.base.config._attn_implementation == "eager"
