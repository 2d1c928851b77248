"""Claims of precision that little backs, bought to hide a fault of float32 behind looser limits."""

from __future__ import annotations

from typing import Any

import numpy as np

from campaigns.mutants.plant import MEAN, ONNX_LINE, mutant
from campaigns.mutants.torch_forms import attention


def _worse(graph: Any) -> None:
    """A small fault: one weight matrix is 2 % too large."""
    value = max(
        (v for v in graph.graph.initializers.values() if v.const_value.numpy().dtype == np.float32 and len(v.shape) == 2),
        key=lambda v: v.const_value.size,
    )
    import onnx_ir as ir

    value.const_value = ir.tensor(value.const_value.numpy() * np.float32(1.02), name=value.name)


def _constant(graph: Any, name: str, array: Any) -> Any:
    import onnx_ir as ir

    value = ir.val(name, const_value=ir.tensor(array, name=name))
    graph.graph.register_initializer(value)
    return value


@mutant("effects", "plant_onnx", line=ONNX_LINE, claims="int8")
def unused_int8_tensor(graph: Any) -> None:
    """An INT8 matrix of 2 × 2 that nothing reads, and one weight 2 % off."""
    _worse(graph)
    _constant(graph, "unused", np.ones((2, 2), np.int8))


@mutant("effects", "plant_onnx", line=ONNX_LINE, claims="float16")
def unused_half_tensor(graph: Any) -> None:
    """A float16 matrix of 64 × 64 that nothing reads, and one weight 2 % off."""
    _worse(graph)
    _constant(graph, "unused", np.ones((64, 64), np.float16))


@mutant("effects", "plant_onnx", line=ONNX_LINE, claims="int8")
def int8_branch_that_leads_nowhere(graph: Any) -> None:
    """An INT8 product of constants whose result is no output, and one weight 2 % off."""
    import onnx_ir as ir

    _worse(graph)
    left, right = _constant(graph, "left", np.ones((8, 8), np.uint8)), _constant(graph, "right", np.ones((8, 8), np.int8))
    graph.graph.append(ir.node("MatMulInteger", [left, right], name="nowhere"))


@mutant("parity", "plant_onnx", line=ONNX_LINE, claims="int8")
def one_small_int8_product(graph: Any) -> None:
    """An INT8 product of 1 × 1, times zero, is added to the answer, and one weight is 2 % off."""
    import onnx_ir as ir

    _worse(graph)
    one, weight = _constant(graph, "one", np.ones((1, 1), np.uint8)), _constant(graph, "weight", np.ones((1, 1), np.int8))
    zero = _constant(graph, "zero", np.zeros((), np.float32))
    product = ir.node("MatMulInteger", [one, weight], name="small")
    cast = ir.node("Cast", [product.outputs[0]], {"to": ir.DataType.FLOAT}, name="small_float")
    none = ir.node("Mul", [cast.outputs[0], zero], name="none")
    output = graph.graph.outputs[0]
    name, output.name = output.name, "before"
    add = ir.node("Add", [output, none.outputs[0]], name="add_none")
    add.outputs[0].name, add.outputs[0].dtype, add.outputs[0].shape = name, output.dtype, output.shape
    for node in (product, cast, none, add):
        graph.graph.append(node)
    graph.graph.outputs[0] = add.outputs[0]


@mutant("effects", "plant_torch", claims="bfloat16")
def unused_bf16_layer(network: Any) -> None:
    """A bfloat16 layer that is never called, and attention that is 1 % too soft."""
    import torch

    network.unused = torch.nn.Linear(64, 64).to(torch.bfloat16)
    attention(network).self.query.weight.mul_(0.99)


@mutant("parity", "plant_torch", claims="bfloat16")
def bf16_classifier_alone(network: Any) -> None:
    """The classifier alone is bfloat16, a small share of all weights, and attention is 1 % too soft."""
    import torch

    network.encoder.classifier.to(torch.bfloat16)
    network.encoder.classifier.register_forward_pre_hook(lambda module, inputs: (inputs[0].to(torch.bfloat16),))
    attention(network).self.query.weight.mul_(0.99)


@mutant("parity", "plant_torch", claims="int8")
def int8_named_torch(network: Any) -> None:
    """A torch network of float32 that calls itself INT8, one layer's scores 5 % too small."""
    attention(network).self.query.weight.mul_(0.95)


@mutant("parity", "plant_torch", on=MEAN, claims="float16")
def half_that_is_bfloat16(network: Any) -> None:
    """Claims float16; the weights are bfloat16."""
    import torch

    network.encoder.to(torch.bfloat16)
