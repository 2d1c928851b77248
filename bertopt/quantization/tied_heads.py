"""Heads that share their matrix with the embeddings, which the export stores once and lets them read transposed: quantisers pass those by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bertopt.core import Onnx
from bertopt.quantization import onnx_files, qdq


def untied(model: Onnx, keep_fp32: Sequence[str], folder: Path) -> Onnx:
    """Return the model with a separate matrix for each of these heads but those that `keep_fp32` names, written to `folder`; the same model where
    there are none."""
    import onnx_ir

    whole = onnx_ir.load(model.path)
    nodes = [node for node in transposed(whole.graph) if not qdq.named(node.name, keep_fp32)]
    if not nodes:
        return model
    untie(whole.graph, nodes)
    return replace(model, path=onnx_files.save(whole, folder))


def transposed(graph: Any) -> list[Any]:
    """The products of a float32 graph with the transpose of a constant matrix that is stored once for other readers too, as a head's over the
    vocabulary with the embeddings: a MatMul behind a Transpose, or what `fuse_ort` makes of the two."""
    return [node for node in qdq.fed(graph) if _stored(node) is not None and not qdq.pools(node)]


def untie(graph: Any, nodes: Sequence[Any]) -> None:
    """Give each of these products, which `transposed` found, a separate matrix as it reads it, which can be quantised."""
    written: dict[Any, Any] = {}
    for node in nodes:
        source = _stored(node)
        if source not in written:
            written[source] = qdq.constant(graph, f"{source.name}_transposed", source.const_value.numpy().T)
        node.replace_input_with(1, written[source])
        node.op_type, node.domain = "MatMul", ""
        node.attributes.clear()
    unread = [node for node in graph if node.op_type == "Transpose" and not any(value.uses() or value.is_graph_output() for value in node.outputs)]
    graph.remove(unread, safe=True)
    qdq.drop_unused(graph)


def _stored(node: Any) -> Any:
    """The constant float32 matrix [N, H] whose transpose a product multiplies by, and nothing else; None for any other node."""
    import onnx_ir as ir

    numbers = {name: attribute.value for name, attribute in node.attributes.items()}
    value = None
    if (node.op_type, node.domain) == ("FusedMatMul", "com.microsoft"):
        if numbers.pop("transB", 0) == 1 and numbers.pop("alpha", 1.0) == 1 and not any(numbers.values()):
            value = node.inputs[1]
    elif (node.op_type, node.domain) == ("MatMul", ""):
        made = node.inputs[1].producer()
        if made is not None and made.op_type == "Transpose" and ("perm" not in made.attributes or [*made.attributes["perm"].value] == [1, 0]):
            value = made.inputs[0]
    constant = value is not None and value.is_initializer() and value.dtype == ir.DataType.FLOAT and len(value.shape or ()) == 2
    return value if constant else None
