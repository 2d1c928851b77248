"""Wrong sparse embeddings: SPLADE's pooling, and single weights of its thousands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bertopt.core import Context, Onnx, Result
from campaigns.mutants.plant import INT8_LINE, SPLADE, Step, behind, mutant

BF16: tuple[Step, ...] = ({"pass": "cast_half"},)
#: Two ids of the vocabulary.
FIRST, SECOND = 40, 41


def _pooled(network: Any, other: Callable[[Any, Any], Any]) -> None:
    """Let the pooling give `other(logits [B, S, V], mask [B, S, 1])`."""

    def forward(logits: Any, rows: Any, **_: Any) -> Any:
        return other(logits.float(), rows.named["attention_mask"].unsqueeze(-1))

    network.pooling.forward = forward


def _behind_pooling(network: Any, other: Callable[[Any], Any]) -> None:
    right = network.pooling.forward
    network.pooling.forward = lambda *inputs, **options: other(right(*inputs, **options))


@mutant("parity", "plant_torch", SPLADE)
def splade_over_padding(network: Any) -> None:
    """Logits of padding count too."""
    _pooled(network, lambda logits, mask: logits.amax(dim=1).relu().log1p())


@mutant("parity", "plant_torch", SPLADE)
def splade_by_the_sum(network: Any) -> None:
    """Weights of tokens are added up, as the first SPLADE did."""
    _pooled(network, lambda logits, mask: (logits * mask).relu().log1p().sum(dim=1))


@mutant("parity", "plant_torch", SPLADE)
def splade_with_two_logarithms(network: Any) -> None:
    """Weights are log(1 + log(1 + relu(x))), as OpenSearch's third version has them."""
    _behind_pooling(network, lambda weights: weights.log1p())


@mutant("rounding", "plant_torch", SPLADE, BF16)
def an_id_without_weight_behind_bf16(network: Any) -> None:
    """One id of the vocabulary never gets a weight."""

    def other(weights: Any) -> Any:
        weights = weights.clone()
        weights[..., FIRST] = 0
        return weights

    _behind_pooling(network, other)


@mutant("rounding", "plant_torch", SPLADE, BF16)
def swapped_ids_behind_bf16(network: Any) -> None:
    """Two ids have each other's weight."""

    def other(weights: Any) -> Any:
        weights = weights.clone()
        weights[..., [FIRST, SECOND]] = weights[..., [SECOND, FIRST]]
        return weights

    _behind_pooling(network, other)


def _node(kind: str, inputs: list[str], output: str, **attributes: Any) -> Any:
    from onnx import helper

    return helper.make_node(kind, inputs, [output], **attributes)


@mutant("rounding", "plant_graph", SPLADE, INT8_LINE)
def small_weights_left_out_behind_int8(model: Onnx, ctx: Context) -> Result[Onnx]:
    """Behind INT8: Weights below 0.2 are 0."""

    def nodes(name: str) -> Any:
        return [_node("Less", ["right", "least"], "small"), _node("Where", ["small", "none", "right"], name)]

    return behind(model, ctx, nodes, {"least": np.float32(0.2), "none": np.float32(0)})


@mutant("rounding", "plant_graph", SPLADE, INT8_LINE)
def large_weights_cut_off_behind_int8(model: Onnx, ctx: Context) -> Result[Onnx]:
    """Behind INT8: Weights are at most 0.9."""
    return behind(model, ctx, lambda name: [_node("Min", ["right", "most"], name)], {"most": np.float32(0.9)})


@mutant("rounding", "plant_graph", SPLADE, INT8_LINE)
def swapped_ids_behind_int8(model: Onnx, ctx: Context) -> Result[Onnx]:
    """Behind INT8: Two ids have each other's weight."""
    order = np.arange(model.spec.vocabulary)
    order[[FIRST, SECOND]] = SECOND, FIRST
    return behind(model, ctx, lambda name: [_node("Gather", ["right", "order"], name, axis=-1)], {"order": order})
