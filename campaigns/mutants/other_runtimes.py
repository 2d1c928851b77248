"""Faults of what packs weights for the native encoder and of what converts a graph to OpenVINO."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from bertopt.core import Context, Eager, Native, Onnx, OpenVino, Result
from bertopt.passes import BuildNative, ConvertOpenvino, register
from campaigns.mutants import loose_limits
from campaigns.mutants.plant import LABELS, ONNX_LINE, SDPA, Fault, Gate, fault_of, mutant, write_graph
from campaigns.mutants.torch_forms import swap


class PlantNative(BuildNative):
    """Packs the weights of a network with a fault in it."""

    mutant: str

    def __call__(self, model: Eager, ctx: Context) -> Result[Native]:
        import torch

        with torch.no_grad():
            fault_of(self.mutant)(model.network)
        return super().__call__(model, ctx)


class PlantNativeBf16(PlantNative):
    """The same in bfloat16."""

    precision: Literal["int8", "bf16"] = "bf16"


class PlantOpenvino(ConvertOpenvino):
    """Converts a graph with a fault in it to INT8."""

    mutant: str
    precision: Literal["f32", "bf16", "int8"] = "int8"

    def __call__(self, model: Onnx, ctx: Context) -> Result[OpenVino]:
        import onnx_ir as ir

        graph = ir.load(model.path)
        fault_of(self.mutant)(graph)
        made = write_graph(ir.external_data.load_to_model(graph), ctx)
        try:
            return super().__call__(replace(model, path=made), ctx)
        finally:
            shutil.rmtree(made.parent)


for _pass in (PlantNative, PlantNativeBf16, PlantOpenvino):
    register(_pass)


def another_rare_word(network: Any) -> None:
    """Two rare tokens have each other's embedding."""
    table = network.base.embeddings.word_embeddings.weight
    swap(table, len(table) - 3, len(table) - 2)


def another_late_position(network: Any) -> None:
    """Positions 77 and 78 stand in each other's place."""
    swap(network.base.embeddings.position_embeddings.weight, 77, 78)


def one_wrong_scale(network: Any) -> None:
    """One output channel's weights are a fifth too large, as by another channel's scale."""
    network.base.encoder.layer[0].output.dense.weight[5].mul_(1.2)


def relu_in_all_layers(network: Any) -> None:
    """The activation function is a ReLU."""
    network.encoder.config.hidden_act = "relu"


@mutant("unsupported", "plant_torch", line=(SDPA,), steps=({"pass": "build_native", "precision": "bf16"},))
def scaled_twice(network: Any) -> None:
    """A pass of one's own folds attention's scale into the query; the native encoder, which takes weights alone, scales again."""
    for layer in network.base.encoder.layer:
        attention = layer.attention.self
        for parameter in attention.query.parameters():
            parameter.mul_(attention.scaling)
        attention.scaling = 1.0


_MODULES = ("linear_pooler", "relu_for_gelu")
NATIVE: tuple[Callable[[Any], None], ...] = (
    *(fault for fault in loose_limits.TORCH if fault.__name__ not in _MODULES),
    another_rare_word, another_late_position, one_wrong_scale, relu_in_all_layers,
)  # fmt: skip


def _planted(fault: Fault, step: str, name: str, about: str, line: Any, gate: Gate = "certificate") -> None:
    def plant(of: Any) -> None:
        fault(of)

    plant.__name__, plant.__doc__ = f"{fault.__name__}_{name}", f"{(fault.__doc__ or '').strip()} {about}"
    mutant(gate, step, LABELS, line)(plant)


for _fault in NATIVE:
    _planted(_fault, "plant_native", "in_native_int8", "Committed by what packs INT8.", (SDPA,))
    _planted(_fault, "plant_native_bf16", "in_native_bf16", "Committed by what packs bfloat16.", (SDPA,))


def _float(fault: Callable[[Any, Any], None]) -> Callable[[Any], None]:
    def plant(graph: Any) -> None:
        fault(graph, np.float32)

    plant.__name__, plant.__doc__ = fault.__name__, fault.__doc__
    return plant


for _graph_fault in loose_limits.GRAPH:
    if _graph_fault.__name__ != "low_bits_lost":
        _planted(_float(_graph_fault), "plant_openvino", "in_openvino", "Committed by what converts to OpenVINO in INT8.", ONNX_LINE, "rounding")
