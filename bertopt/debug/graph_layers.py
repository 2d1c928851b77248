"""Which encoder layer each node of a graph belongs to, by how values flow; names need not have survived."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bertopt.report.profile import AFTER, BEFORE

ATTENTION = frozenset({
    "Attention", "MultiHeadAttention", "QAttention", "PackedMultiHeadAttention", "ScaledDotProductAttention",
})  # fmt: skip
SOFTMAX = frozenset({"Softmax", "SoftMax"})
_PRODUCT = frozenset({"MatMul", "FusedMatMul", "MatMulInteger", "QLinearMatMul", "MatMulIntegerToFloat"})
_NORM = frozenset({"LayerNormalization", "SkipLayerNormalization", "MVN"})


@dataclass(frozen=True)
class Node:
    """One node; `inputs` are the names of the nodes whose values it reads."""

    name: str
    kind: str
    inputs: tuple[str, ...]


def layers_of(nodes: Sequence[Node], layers: int) -> dict[str, str]:
    """Return the layer of every node of a graph in topological order; nothing where there are not `layers` attentions.

    What is computed only to be read by an attention belongs to the layer of that attention, whatever else follows an
    attention to the layer of the last one before it. After the last normalisation begins the head.
    """
    readers = _readers(nodes)
    kinds = {node.name: node.kind for node in nodes}
    marks = list(dict.fromkeys(mark for node in nodes if (mark := _attention(node, readers, kinds))))
    if len(marks) != layers:
        return {}
    ends = [node.name for node in nodes if not readers[node.name]]
    inputs = {node.name: node.inputs for node in nodes}
    around = [_reaching(ends, inputs, mark) for mark in marks]
    normed = _reaching([name for name, kind in kinds.items() if kind in _NORM], inputs, None)
    found: dict[str, str] = {}
    for name, passed in _attentions_passed(nodes, marks).items():
        if name in marks:
            found[name] = f"layer {passed - 1}"
        elif passed < layers and name not in around[passed]:
            found[name] = f"layer {passed}"
        elif passed == layers and normed and name not in normed:
            found[name] = AFTER
        else:
            found[name] = f"layer {passed - 1}" if passed else BEFORE
    return found


def _readers(nodes: Sequence[Node]) -> dict[str, list[str]]:
    """The names of the nodes that read each node's values."""
    readers: dict[str, list[str]] = {node.name: [] for node in nodes}
    for node in nodes:
        for name in node.inputs:
            if name in readers:
                readers[name].append(node.name)
    return readers


def _attentions_passed(nodes: Sequence[Node], marks: Sequence[str]) -> dict[str, int]:
    """How many of `marks` lie on a way to each node, itself included; on the way with most of them."""
    passed: dict[str, int] = {}
    for node in nodes:
        passed[node.name] = max((passed.get(name, 0) for name in node.inputs), default=0) + (node.name in marks)
    return passed


def _attention(node: Node, readers: Mapping[str, list[str]], kinds: Mapping[str, str]) -> str | None:
    """The node that gives an attention's values: the operator itself, or the product behind a softmax."""
    if node.kind in ATTENTION:
        return node.name
    if node.kind not in SOFTMAX:
        return None
    waiting, seen = [node.name], {node.name}
    for name in waiting:
        for reader in readers[name]:
            if kinds[reader] in _PRODUCT:
                return reader
            if reader not in seen:
                seen.add(reader)
                waiting.append(reader)
    return None


def _reaching(ends: Iterable[str], inputs: Mapping[str, tuple[str, ...]], but: str | None) -> set[str]:
    """Every node from which one of `ends` is reached, itself included, without passing `but`."""
    waiting = [name for name in ends if name != but]
    seen = set(waiting)
    while waiting:
        for name in inputs.get(waiting.pop(), ()):
            if name != but and name not in seen:
                seen.add(name)
                waiting.append(name)
    return seen


def onnx_nodes(graph: Any) -> list[Node]:
    """Return the nodes of an ONNX model (`onnx_ir.Model`), each under the name of its first output."""
    return [
        Node(node.outputs[0].name, node.op_type, tuple(
            value.producer().outputs[0].name for value in node.inputs if value is not None and value.producer() is not None
        ))
        for node in graph.graph
    ]  # fmt: skip


def openvino_nodes(model: Any) -> list[Node]:
    """Return the nodes of an OpenVINO model (`openvino.Model`), by friendly name."""
    return [
        Node(node.get_friendly_name(), node.get_type_name(),
             tuple(value.get_source_output().get_node().get_friendly_name() for value in node.inputs()))
        for node in model.get_ordered_ops()
    ]  # fmt: skip
