"""Numbers in graphs that no certificate compares, behind the limits of float16 and INT8: scores, and masks that are only weak.

Left out is what costs less than the rounding that hides it (see `docs/checks.md`): a norm's epsilon, GELU by tanh, scores 4 % too small.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from bertopt.core import Context, Onnx, OpenVino, Result
from campaigns.mutants.loose_limits import FP16
from campaigns.mutants.onnx_forms import nodes as nodes_of
from campaigns.mutants.own_passes import _saved
from campaigns.mutants.plant import INT8_LINE, MEAN, ONNX_LINE, Step, mutant, write_graph
from campaigns.mutants.shipped_graphs import OPENVINO_INT8


def _scale_doubled(graph: Any) -> None:
    import onnx_ir as ir

    for node in nodes_of(graph, "Attention"):
        now = node.attributes["scale"].value if "scale" in node.attributes else 0.25
        node.attributes["scale"] = ir.AttrFloat32("scale", float(now) * 2)


def weak_mask(number: float) -> Callable[[Any], None]:
    """Padding has `number` added to its scores."""

    def fault(graph: Any) -> None:
        import onnx_ir as ir

        attention = nodes_of(graph, "Attention")
        kind = np.float16 if attention[0].inputs[0].dtype == ir.DataType.FLOAT16 else np.float32
        less, none = (ir.val(name, const_value=ir.tensor(kind(value), name=name)) for name, value in (("planted_less", number), ("planted_none", 0)))
        for value in (less, none):
            graph.graph.register_initializer(value)
        for node in attention:
            where = ir.node("Where", [node.inputs[3], none, less])
            graph.graph.insert_before(node, where)
            node.replace_input_with(3, where.outputs[0])

    return fault


def _enter(name: str, about: str, line: tuple[Step, ...], fault: Callable[[Any], None]) -> None:
    def plant(model: Onnx, ctx: Context) -> Result[Onnx]:
        import onnx_ir as ir

        graph = ir.load(model.path)
        fault(graph)
        return Result(replace(model, path=write_graph(ir.external_data.load_to_model(graph), ctx)), {"planted": 1})

    plant.__name__, plant.__doc__ = name, about
    mutant("rounding", "plant_graph", MEAN, line)(plant)


_enter("padding_minus_4_behind_int8", "Behind INT8: Padding has 4 less in scores, not infinity less.", INT8_LINE, weak_mask(-4))
_enter("padding_minus_6_behind_fp16", "Behind float16: Padding has 6 less in scores, not infinity less.", (*ONNX_LINE, FP16), weak_mask(-6))
_enter("scores_doubled_behind_int8", "Behind INT8: Attention's scores are twice as large.", INT8_LINE, _scale_doubled)


@mutant("rounding", "plant_ir", MEAN, OPENVINO_INT8)
def padding_minus_4_in_openvino_int8(model: OpenVino, ctx: Context) -> Result[OpenVino]:
    """In OpenVINO's INT8: The number that masks attention is -4."""

    def change(graph: Any) -> None:
        import openvino.opset13 as ops

        masks = [node for node in graph.get_ops() if node.get_type_name() == "Constant" and node.data.size == 1 and float(node.data.ravel()[0]) == -3e4]
        assert masks, "the graph masks otherwise"
        for node in masks:
            for target in list(node.output(0).get_target_inputs()):
                target.replace_source_output(ops.constant(np.full(node.data.shape, -4, np.float32)).output(0))

    return _saved(model, ctx, change, compress_to_fp16=False)
