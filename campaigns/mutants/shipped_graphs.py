"""Bugs of graphs that engineers ship: attributes and ranges behind the limits of reduced precision, fusions' own defaults, weak masks, and
hidden states that other loaders read. All were caught."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from bertopt.core import Context, Onnx, OpenVino, Result
from campaigns.mutants.heads import Graph
from campaigns.mutants.onnx_forms import nodes as nodes_of
from campaigns.mutants.own_passes import OPENVINO_LINE, _saved
from campaigns.mutants.plant import INT8_LINE, MEAN, ONNX_LINE, Step, behind, mutant, write_graph

FUSED: tuple[Step, ...] = (*ONNX_LINE, {"pass": "fuse_ort"})
OPENVINO_INT8: tuple[Step, ...] = (*ONNX_LINE, {"pass": "convert_openvino", "precision": "int8"})


@mutant("load", "plant_onnx", line=ONNX_LINE)
def older_opset(graph: Any) -> None:
    """The graph says an older opset than its nodes are of."""
    graph.graph.opset_imports[""] = 21


@mutant("parity", "plant_onnx", line=ONNX_LINE)
def norm_over_two_axes(graph: Any) -> None:
    """Norms are over the last two axes."""
    import onnx_ir as ir

    for node in nodes_of(graph, "LayerNormalization"):
        node.attributes["axis"] = ir.AttrInt64("axis", 1)


@mutant("parity", "plant_onnx", line=FUSED)
def fast_gelu(graph: Any) -> None:
    """Fused GELU is the fast one, by tanh."""
    for node in nodes_of(graph, "BiasGelu"):
        node.op_type = "FastGelu"


@mutant("rounding", "plant_onnx", line=INT8_LINE)
def causal_behind_int8(graph: Any) -> None:
    """Behind INT8: The last layer's attention is causal."""
    import onnx_ir as ir

    nodes_of(graph, "Attention")[-1].attributes["is_causal"] = ir.AttrInt64("is_causal", 1)


@mutant("rounding", "plant_graph", line=INT8_LINE)
def padding_minus_2_behind_int8(model: Onnx, ctx: Context) -> Result[Onnx]:
    """Behind INT8: Padding has 2 less in scores, not infinity less."""
    import onnx_ir as ir

    graph = ir.load(model.path)
    less, none = (ir.val(name, const_value=ir.tensor(np.float32(number), name=name)) for name, number in (("planted_less", -2), ("planted_none", 0)))
    for value in (less, none):
        graph.graph.register_initializer(value)
    for node in nodes_of(graph, "Attention"):
        where = ir.node("Where", [node.inputs[3], none, less])
        graph.graph.insert_before(node, where)
        node.replace_input_with(3, where.outputs[0])
    return Result(replace(model, path=write_graph(graph, ctx)), {"planted": 1})


@mutant("rounding", "plant_ir", line=OPENVINO_INT8)
def half_a_range_in_openvino(model: OpenVino, ctx: Context) -> Result[OpenVino]:
    """One range of activations is half as wide."""

    def change(graph: Any) -> None:
        import openvino.opset13 as ops

        node = [each for each in graph.get_ordered_ops() if each.get_type_name() == "FakeQuantize"][-1]
        for port in range(1, 5):
            array = node.input_value(port).get_node().data * np.float32(0.5)
            node.input(port).replace_source_output(ops.constant(array).output(0))

    return _saved(model, ctx, change, compress_to_fp16=False)


@mutant("load", "plant_ir", line=OPENVINO_LINE)
def static_shape_in_openvino(model: OpenVino, ctx: Context) -> Result[OpenVino]:
    """The graph takes one text of 64 tokens."""
    return _saved(model, ctx, lambda graph: graph.reshape({one.get_any_name(): [1, 64] for one in graph.inputs}), compress_to_fp16=False)


def _hidden(name: str, about: str, wrong: Callable[[Graph], str]) -> None:
    """Enter a graph whose `last_hidden_state` is what `wrong` makes of `right`; the embedding is right."""

    def plant(model: Onnx, ctx: Context) -> Result[Onnx]:
        from onnx import helper

        graph = Graph()
        changed = wrong(graph)
        return behind(model, ctx, lambda output: [*graph.nodes, helper.make_node("Identity", [changed], [output])], graph.constants, 1)

    plant.__name__, plant.__doc__ = f"{name}_of_hidden_states_in_int8", f"In int8: {about} The embedding is right."
    mutant("coverage", "plant_graph", MEAN, INT8_LINE)(plant)


def _one(column: int, number: float, others: float) -> Any:
    return np.array([number if place == column else others for place in range(32)], np.float32)


_hidden("size", "`last_hidden_state` is 8 % too large.", lambda graph: graph("Mul", "right", graph.const(np.float32(1.08))))
_hidden("lost_column", "`last_hidden_state` has lost one dimension.", lambda graph: graph("Mul", "right", graph.const(_one(5, 0, 1))))
_hidden("shifted_column", "One dimension of `last_hidden_state` is 0.4 more.", lambda graph: graph("Add", "right", graph.const(_one(7, 0.4, 0))))
_hidden(
    "swapped_columns", "Two dimensions of `last_hidden_state` stand in each other's place.",
    lambda graph: graph("Gather", "right", graph.const(np.array([1, 0, *range(2, 32)])), axis=2),
)  # fmt: skip
