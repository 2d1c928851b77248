"""Faults behind the looser limits of reduced precision: in the very pass that casts or quantises, and in one behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from bertopt.core import Context, Onnx, Result
from campaigns.mutants.onnx_forms import put, weights
from campaigns.mutants.plant import INT8_LINE, ONNX_LINE, SDPA, Step, mutant, write_graph
from campaigns.mutants.torch_forms import attention, swap

BF16: Step = {"pass": "cast_half", "dtype": "bfloat16"}
FP16: Step = {"pass": "cast_onnx_half"}


def temperature(network: Any) -> None:
    """Logits are 6 % too large."""
    for parameter in network.encoder.classifier.parameters():
        parameter.mul_(1.06)


def class_bias(network: Any) -> None:
    """One class gets 0.15 more."""
    network.encoder.classifier.bias[1] += 0.15


def three_bit_fractions(network: Any) -> None:
    """Matrices keep 3 bits of their fraction, as in float8."""
    import torch

    for parameter in network.base.encoder.parameters():
        parameter.copy_(parameter.to(torch.float8_e4m3fn).to(parameter.dtype))


def a_head_is_lost(network: Any) -> None:
    """The first layer's first head gives nothing."""
    attention(network).self.value.weight[: attention(network).self.value.weight.shape[0] // 2] = 0


def swapped_positions(network: Any) -> None:
    """Positions 5 and 6 stand in each other's place."""
    swap(network.base.embeddings.position_embeddings.weight, 5, 6)


def dropped_value_bias(network: Any) -> None:
    """One value projection lost its bias."""
    attention(network).self.value.bias.zero_()


def swapped_hidden(network: Any) -> None:
    """Two hidden units of a feed-forward layer stand in each other's place on one side of it."""
    swap(network.base.encoder.layer[0].intermediate.dense.weight, 0, 1)


def softer_attention(network: Any) -> None:
    """One layer's scores are 10 % too small."""
    attention(network).self.query.weight.mul_(0.9)


def no_token_types(network: Any) -> None:
    """Both segments count as the first."""
    table = network.base.embeddings.token_type_embeddings.weight
    table[1] = table[0]


def shifted_norm(network: Any) -> None:
    """The last LayerNorm's bias is 0.03 too large."""
    network.base.encoder.layer[-1].output.LayerNorm.bias.add_(0.03)


def linear_pooler(network: Any) -> None:
    """The pooler's activation is left out."""
    from torch import nn

    network.base.pooler.activation = nn.Identity()


def relu_for_gelu(network: Any) -> None:
    """One layer's GELU is a ReLU."""
    from torch import nn

    network.base.encoder.layer[1].intermediate.intermediate_act_fn = nn.ReLU()


def swapped_rare_labels(network: Any) -> None:
    """The last two labels change places."""
    swap(network.encoder.classifier.weight, 1, 2)
    swap(network.encoder.classifier.bias, 1, 2)


def noise(network: Any) -> None:
    """Every matrix of the layers carries noise of 1 % of its size."""
    import torch

    generator = torch.Generator().manual_seed(0)
    for parameter in network.base.encoder.parameters():
        if parameter.dim() == 2:
            size = float(parameter.float().std())
            parameter.add_((0.01 * size * torch.randn(parameter.shape, generator=generator)).to(parameter.dtype))


TORCH: tuple[Callable[[Any], None], ...] = (
    temperature, class_bias, three_bit_fractions, a_head_is_lost, swapped_positions, dropped_value_bias, swapped_hidden,
    softer_attention, no_token_types, shifted_norm, linear_pooler, relu_for_gelu, swapped_rare_labels, noise,
)  # fmt: skip


def _named(fault: Callable[..., Any], name: str, about: str, plant: Callable[..., Any]) -> Callable[..., Any]:
    plant.__name__, plant.__doc__ = f"{fault.__name__}_{name}", f"{(fault.__doc__ or '').strip()} {about}"
    return plant


def _cast(fault: Callable[[Any], None]) -> Callable[[Any], None]:
    def plant(network: Any) -> None:
        import torch

        fault(network)
        network.encoder.to(torch.bfloat16)

    return _named(fault, "in_a_cast", "Committed by what casts to bfloat16.", plant)


for _fault in TORCH:
    mutant("rounding", "plant_torch", line=(SDPA,), claims="bfloat16")(_cast(_fault))

    def _behind(network: Any, fault: Any = _fault) -> None:
        fault(network)

    mutant("rounding", "plant_torch", line=(SDPA, BF16))(
        _named(_fault, "behind_bf16", "Committed after a right cast to bfloat16.", _behind)
    )


def _matrix(graph: Any, kind: Any, place: int) -> Any:
    return weights(graph, kind, 2)[place]


def rows_swapped(graph: Any, kind: Any) -> None:
    """Two inputs of a product stand in each other's place."""
    value = _matrix(graph, kind, -1)
    array = value.const_value.numpy().copy()
    array[[0, 1]] = array[[1, 0]]
    put(value, array)


def matrix_scaled(graph: Any, kind: Any) -> None:
    """One product's weights are an eighth too small."""
    value = _matrix(graph, kind, -2)
    array = value.const_value.numpy()
    put(value, (array.astype(np.float32) * 0.875).round(4 if array.dtype != np.int8 else 0).astype(array.dtype))


def low_bits_lost(graph: Any, kind: Any) -> None:
    """Every matrix has lost its lowest bits: 4 of 7, or 6 of 10 of a fraction."""
    for value in weights(graph, kind, 2):
        array = value.const_value.numpy()
        bits = array.view(np.uint8 if array.dtype == np.int8 else np.uint16)
        put(value, (bits & (0xF0 if array.dtype == np.int8 else 0xFFC0)).astype(bits.dtype).view(array.dtype))


def last_bias_shifted(graph: Any, kind: Any) -> None:
    """The classifier's bias of one class is 0.15 too large."""
    found = [v for v in graph.graph.initializers.values() if v.const_value.numpy().shape == (3,) and v.dtype.is_floating_point()]
    array = found[-1].const_value.numpy().copy()
    array[1] += 0.15
    put(found[-1], array)


def column_dropped(graph: Any, kind: Any) -> None:
    """One output of a product is zero."""
    value = _matrix(graph, kind, 0)
    array = value.const_value.numpy().copy()
    array[:, 3] = 0
    put(value, array)


GRAPH: tuple[Callable[[Any, Any], None], ...] = (rows_swapped, matrix_scaled, low_bits_lost, last_bias_shifted, column_dropped)


def _written(model: Onnx, ctx: Context, fault: Any, kind: Any) -> Result[Onnx]:
    import onnx_ir as ir

    graph = ir.load(model.path)
    fault(graph, kind)
    loaded = ir.external_data.load_to_model(graph)
    for path in ctx.workdir.glob("onnx/*"):
        path.unlink()
    if (ctx.workdir / "onnx").exists():
        (ctx.workdir / "onnx").rmdir()
    return Result(replace(model, path=write_graph(loaded, ctx)), {"planted": 1})


def _by(maker: str, kind: Any, fault: Any) -> Any:
    def plant(model: Onnx, ctx: Context) -> Result[Onnx]:
        from bertopt import passes

        made = getattr(passes, maker)()(model, ctx).model
        return _written(made, ctx, fault, kind)

    return _named(fault, f"by_{'int8' if kind == np.int8 else 'fp16'}", f"Committed by what {maker} stands for.", plant)


for _graph_fault in GRAPH:
    for _maker, _kind, _line in (
        ("CastOnnxHalf", np.float16, (*ONNX_LINE, FP16)), ("QuantizeInt8", np.int8, INT8_LINE),
    ):  # fmt: skip
        mutant("certificate", "plant_graph", line=ONNX_LINE)(_by(_maker, _kind, _graph_fault))

        def _later(model: Onnx, ctx: Context, fault: Any = _graph_fault, kind: Any = _kind) -> Result[Onnx]:
            return _written(model, ctx, fault, kind)

        _short = "int8" if _kind == np.int8 else "fp16"
        mutant("rounding", "plant_graph", line=_line)(
            _named(_graph_fault, f"behind_{_short}", f"Committed after a right pass to {_short}.", _later)
        )
