"""Faults of passes that stand before or behind bertopt's own: in graphs of OpenVINO, in files beside a graph, in what another pass reads."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from bertopt.core import Context, Onnx, OpenVino, Pass, Result
from bertopt.passes import register
from bertopt.system import openvino_import
from campaigns.mutants.plant import ONNX_LINE, SDPA, Step, fault_of, mutant
from tests.support.tiny_models import VOCABULARY

OPENVINO_LINE: tuple[Step, ...] = (*ONNX_LINE, {"pass": "convert_openvino"})


class PlantIr(Pass[OpenVino, OpenVino]):
    """Gives back what the fault makes of an OpenVINO graph: `fault(model, ctx) -> Result`."""

    mutant: str

    def __call__(self, model: OpenVino, ctx: Context) -> Result[OpenVino]:
        return cast("Result[OpenVino]", fault_of(self.mutant)(model, ctx))


register(PlantIr)


def _saved(model: OpenVino, ctx: Context, change: Callable[[Any], None], **how: Any) -> Result[OpenVino]:
    openvino = openvino_import.openvino()
    graph = openvino.Core().read_model(model.path)
    change(graph)
    path = ctx.workdir / "openvino" / "openvino_model.xml"
    path.parent.mkdir()
    openvino.save_model(graph, path, **how)
    return Result(replace(model, path=path), {"planted": 1})


@mutant("parity", "plant_ir", line=OPENVINO_LINE)
def weights_saved_as_the_library_does(model: OpenVino, ctx: Context) -> Result[OpenVino]:
    """Saves an OpenVINO graph with the library's default, which rounds weights to float16, and claims float32."""
    return _saved(model, ctx, lambda graph: None)


@mutant("parity", "plant_ir", line=OPENVINO_LINE)
def another_epsilon_in_openvino(model: OpenVino, ctx: Context) -> Result[OpenVino]:
    """One normalisation of an OpenVINO graph has an epsilon of 1e-3."""

    def change(graph: Any) -> None:
        norm = next(node for node in graph.get_ordered_ops() if node.get_type_name() == "MVN")
        norm.set_attribute("eps", 1e-3)

    return _saved(model, ctx, change, compress_to_fp16=False)


@mutant("load", "plant_graph", line=ONNX_LINE)
def weights_left_behind(model: Onnx, ctx: Context) -> Result[Onnx]:
    """The graph's weights lie in a file of another name, in a folder of the pass's own, which no stage takes along."""
    import onnx

    folder = Path(tempfile.mkdtemp(prefix="bertopt-left-behind-"))
    onnx.save_model(onnx.load(model.path), folder / "model.onnx", save_as_external_data=True, location="weights.bin", size_threshold=100)
    return Result(replace(model, path=folder / "model.onnx"), {"nodes": 1})


@mutant("load", "plant_onnx", line=ONNX_LINE)
def inputs_of_32_bits(graph: Any) -> None:
    """The graph takes ids of 32 bits."""
    import onnx_ir as ir

    for value in graph.graph.inputs:
        whole = ir.node("Cast", [value], {"to": ir.DataType.INT64}, name=f"{value.name}_as_before")
        for use in list(value.uses()):
            if use.node is not whole:
                use.node.replace_input_with(use.idx, whole.outputs[0])
        graph.graph.insert_before(next(iter(graph.graph)), whole)
        value.dtype = ir.DataType.INT32


@mutant("unsupported", "plant_torch", line=(SDPA,), steps=({"pass": "build_native", "precision": "bf16"},))
def another_activation_in_the_configuration(network: Any) -> None:
    """The configuration names another GELU, which torch's layers no longer read, and the native encoder does."""
    network.encoder.config.hidden_act = "gelu_new"


@mutant("parity", "plant_onnx", line=ONNX_LINE, steps=({"pass": "quantize_int8"},))
def rare_ids_unknown_before_int8(graph: Any) -> None:
    """Ids from the last three of the vocabulary on are read as unknown, before the graph is quantised."""
    import onnx_ir as ir

    ids = graph.graph.inputs[0]
    numbers = {"first": len(VOCABULARY) - 3, "unknown": VOCABULARY.index("[UNK]")}
    first, unknown = (ir.val(name, const_value=ir.tensor(np.int64(number), name=name)) for name, number in numbers.items())
    for value in (first, unknown):
        graph.graph.register_initializer(value)
    rare = ir.node("GreaterOrEqual", [ids, first], name="rare")
    known = ir.node("Where", [rare.outputs[0], unknown, ids], name="known")
    for use in list(ids.uses()):
        if use.node not in (rare, known):
            use.node.replace_input_with(use.idx, known.outputs[0])
    graph.graph.insert_before(next(iter(graph.graph)), [rare, known])
