"""Wrong graphs: what exporters, fusions and quantisers get wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bertopt.core import Context, Onnx, Result
from campaigns.mutants.plant import INT8_LINE, LABELS, ONNX_LINE, SPAN, Checkpoint, Fault, Gate, mutant, write_graph


def planted(gate: Gate = "parity", on: Checkpoint = LABELS, int8: bool = False) -> Callable[[Fault], Fault]:
    return mutant(gate, "plant_onnx", on, INT8_LINE if int8 else ONNX_LINE)


def nodes(graph: Any, kind: str) -> list[Any]:
    found = [node for node in graph.graph if node.op_type == kind]
    assert found, f"the graph has no {kind}: {sorted({node.op_type for node in graph.graph})}"
    return found


def weights(graph: Any, kind: type, dims: int) -> list[Any]:
    """Initialisers of a type and a number of dimensions, in the order the graph has them."""
    found = [
        value
        for value in graph.graph.initializers.values()
        if value.const_value.numpy().dtype == kind and value.const_value.numpy().ndim == dims
    ]
    assert found, f"the graph has no {kind} initialiser of {dims} dimensions"
    return found


def put(value: Any, array: Any) -> None:
    import onnx_ir as ir

    value.const_value = ir.tensor(np.ascontiguousarray(array), name=value.name)


@planted()
def disconnected_mask(graph: Any) -> None:
    """Every attention node runs without its mask; the graph still has it as an input."""
    for node in nodes(graph, "Attention"):
        node.replace_input_with(3, None)


@planted()
def one_layer_without_mask(graph: Any) -> None:
    """The last layer's attention has lost its mask."""
    nodes(graph, "Attention")[-1].replace_input_with(3, None)


@planted()
def causal_node(graph: Any) -> None:
    """One attention node is causal."""
    import onnx_ir as ir

    node = nodes(graph, "Attention")[0]
    node.attributes["is_causal"] = ir.AttrInt64("is_causal", 1)


@planted()
def wrong_scale_attribute(graph: Any) -> None:
    """One attention node scales by 1/d, not 1/sqrt(d)."""
    import onnx_ir as ir

    nodes(graph, "Attention")[0].attributes["scale"] = ir.AttrFloat32("scale", 1 / 16)


@planted()
def tanh_gelu_node(graph: Any) -> None:
    """Gelu nodes approximate by tanh."""
    import onnx_ir as ir

    for node in nodes(graph, "Gelu"):
        node.attributes["approximate"] = ir.AttrString("approximate", "tanh")


@planted()
def layer_norm_epsilon_attribute(graph: Any) -> None:
    """LayerNormalization nodes lost their epsilon: ONNX's default is 1e-5."""
    for node in nodes(graph, "LayerNormalization"):
        node.attributes.pop("epsilon", None)


@planted()
def transposed_initialiser(graph: Any) -> None:
    """One square weight is stored transposed."""
    square = next(w for w in weights(graph, np.float32, 2) if len(set(w.const_value.shape.numpy())) == 1)
    put(square, square.const_value.numpy().T)


@planted()
def rounded_initialisers(graph: Any) -> None:
    """Weights went through bfloat16 in a graph that claims float32."""
    import ml_dtypes

    for value in weights(graph, np.float32, 2):
        put(value, value.const_value.numpy().astype(ml_dtypes.bfloat16).astype(np.float32))


@planted(on=SPAN)
def renamed_outputs(graph: Any) -> None:
    """Start and end logits carry each other's name."""
    start, end = graph.graph.outputs
    start.name, end.name = end.name, "spare"
    end.name = "start_logits"


@planted("load")
def fixed_batch(graph: Any) -> None:
    """The graph takes batches of two and no other."""
    import onnx_ir as ir

    for value in graph.graph.inputs:
        value.shape = ir.Shape([2, *list(value.shape)[1:]])


@planted("load")
def missing_input(graph: Any) -> None:
    """Exported without the attention mask."""
    import onnx_ir as ir

    mask = next(value for value in graph.graph.inputs if value.name == "attention_mask")
    ids = graph.graph.inputs[0]
    ones = ir.node("Equal", [ids, ids], name="all_ones")
    cast = ir.node("Cast", ones.outputs, {"to": ir.DataType.INT64}, name="as_mask")
    first = next(iter(graph.graph))
    graph.graph.insert_before(first, [ones, cast])
    ones.outputs[0].name, cast.outputs[0].name = "all_ones", "as_mask"
    mask.replace_all_uses_with(cast.outputs[0])
    graph.graph.inputs.remove(mask)


@planted("load")
def unknown_operator(graph: Any) -> None:
    """One node is an operator that no runtime here has."""
    nodes(graph, "Gelu")[0].domain = "com.acme"


@mutant("load", "plant_graph", line=ONNX_LINE)
def truncated_external_data(model: Onnx, ctx: Context) -> Result[Onnx]:
    """The external data lost its last kilobyte before it was committed."""
    from dataclasses import replace

    import onnx_ir as ir

    path = write_graph(ir.load(model.path), ctx, external=True)
    data = path.with_name("model.onnx_data")
    data.write_bytes(data.read_bytes()[:-1024])
    return Result(replace(model, path=path), {"files": 1})


@planted(int8=True)
def bad_scale(graph: Any) -> None:
    """One weight's scale is another's: the classifier's logits come out three times too large."""
    scale = quantised(graph)[-1][1]
    put(scale, scale.const_value.numpy() * 1.5)


@planted(int8=True)
def saturated_weights(graph: Any) -> None:
    """Scales are a quarter of what they need to be: large weights saturate."""
    for weight, scale in quantised(graph):
        put(weight, np.clip(weight.const_value.numpy().astype(np.int32) * 4, -127, 127).astype(np.int8))
        put(scale, scale.const_value.numpy() / 4)


@planted(int8=True)
def scale_of_one(graph: Any) -> None:
    """One product forgets to scale back by the activation's scale."""
    import onnx_ir as ir

    quantise = nodes(graph, "DynamicQuantizeLinear")[0]
    one = ir.val("one", const_value=ir.tensor(np.float32(0.05), name="one"))
    graph.graph.register_initializer(one)
    quantise.outputs[1].replace_all_uses_with(one)


def quantised(graph: Any) -> list[tuple[Any, Any]]:
    """Each quantised weight with its scale."""
    pairs = []
    for weight in weights(graph, np.int8, 2):
        scale = graph.graph.initializers.get(weight.name.replace("_quantized", "_scale"))
        assert scale is not None, f"{weight.name} has no scale among {sorted(graph.graph.initializers)}"
        pairs.append((weight, scale))
    return pairs
