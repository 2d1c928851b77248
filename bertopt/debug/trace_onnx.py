"""Record, and replace, values inside an ONNX graph: more outputs, and inputs that stand in for a value."""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertopt.core import Device, Onnx
from bertopt.debug.tensor_difference import relative
from bertopt.debug.trace_points import Point, bare
from bertopt.sessions import open_session

if TYPE_CHECKING:
    from bertopt.core import Array

#: Where the exporter keeps the modules a node came from, outermost first, the operation last.
_SCOPES = "pkg.torch.onnx.name_scopes"


class Tapped:
    """A graph that also outputs some inner values, and in which some inner values are replaced by given ones for everything after them."""

    def __init__(self, model: Onnx, names: Sequence[str], given: Sequence[str], folder: Path, device: Device) -> None:
        import onnx_ir as ir

        graph = ir.load(model.path)
        values = values_of(graph)
        for name in given:
            _replace(ir, graph.graph, values[name], f"{name}.given")
        for name in names:
            _tap(ir, graph.graph, values[name], f"{name}.tap")
        folder.mkdir(parents=True)
        path = folder / "model.onnx"
        big = (model.path.parent / "model.onnx_data").exists()
        ir.save(graph, path, external_data="model.onnx_data" if big else None)
        spec = model.spec.model_copy(
            update={
                "inputs": (*model.spec.inputs, *(f"{name}.given" for name in given)),
                "outputs": tuple(f"{name}.tap" for name in names),
            }
        )
        self.names, self.given = list(names), list(given)
        self.session = open_session(replace(model, spec=spec, path=path), device)

    def run(self, inputs: Mapping[str, Array], given: Mapping[str, Array]) -> dict[str, Array]:
        """The tapped values, float32."""
        found = self.session.run({**inputs, **{f"{name}.given": given[name] for name in self.given}})
        return {name: found[f"{name}.tap"] for name in self.names}


def values_of(graph: Any) -> dict[str, Any]:
    """Every value that a node computes, by name."""
    return {value.name: value for node in graph.graph for value in node.outputs if value.name}


def halves_of(path: Path) -> dict[str, str]:
    """Every value of the graph that a named node computes in half precision, and the node."""
    import onnx_ir as ir

    half = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    return {
        value.name: value.producer().name
        for value in values_of(ir.load(path)).values()
        if value.dtype in half and value.producer().name
    }


def quantised_of(before: Path, after: Path) -> dict[str, str]:
    """Every value that a product with constant weights gives in the graph `before` and one of integers in `after`, and
    the product's name before."""
    import onnx_ir as ir

    there = values_of(ir.load(after))
    return {
        value.name: node.name
        for node in ir.load(before).graph
        if _float_product(ir, node) and (value := node.outputs[0]).name in there
        if not _float_product(ir, there[value.name].producer())
    }


def _float_product(ir: Any, node: Any) -> bool:
    weight = node.inputs[1] if node.op_type in ("MatMul", "Gemm") else None
    return weight is not None and weight.is_initializer() and weight.dtype == ir.DataType.FLOAT


def _replace(ir: Any, graph: Any, value: Any, name: str) -> None:
    """Let everything that reads `value` read a new float32 input instead, cast to its type."""
    given = ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT))
    graph.inputs.append(given)
    users = list(value.uses())
    # The value itself says the type: int8 graphs come without type information.
    like = ir.node("CastLike", [given, value], name=name)
    like.outputs[0].name = f"{name}.like"
    graph.insert_after(value.producer(), like)
    for user, index in users:
        user.replace_input_with(index, like.outputs[0])


def _tap(ir: Any, graph: Any, value: Any, name: str) -> None:
    cast = ir.node("Cast", [value], {"to": ir.DataType.FLOAT}, name=name)
    cast.outputs[0].name, cast.outputs[0].dtype = name, ir.DataType.FLOAT
    graph.append(cast)
    graph.outputs.append(cast.outputs[0])


def match(points: Sequence[Point], calls: Mapping[str, int], stage: Path, origin: Path) -> dict[int, str]:
    """The graph value for each point, by index. `origin` is the line's first graph, which the exporter wrote.

    Passes over graphs keep the names of the values they do not fuse away, even where they drop the nodes' records.
    """
    import onnx_ir as ir

    graph = ir.load(stage)
    there = values_of(graph)
    by_origin, by_own = _by_module(ir.load(origin)), _by_module(graph)
    found: dict[int, str] = {}
    for index, point in enumerate(points):
        # An answer is a module's name, or the graph output itself.
        for name in reversed(point.names):
            named = [name, _of_call(by_origin, name, calls)]
            if not _lost_bias(by_origin, by_own, name):
                named.append(_of_call(by_own, name, calls))
            value = next((value for value in named if value in there), None)
            if value is not None and value not in found.values():
                found[index] = value
                break
    return found


def _by_module(graph: Any) -> dict[str, list[tuple[tuple[str, ...], str, str]]]:
    """For each module its nodes in order: (scopes, operator, first output)."""
    nodes: dict[str, list[tuple[tuple[str, ...], str, str]]] = {}
    for node in graph.graph:
        scopes = tuple(ast.literal_eval(node.metadata_props.get(_SCOPES, "[]"))[:-1])
        for scope in scopes:
            nodes.setdefault(scope, []).append((scopes, node.op_type, node.outputs[0].name))
    return nodes


def _lost_bias(before: Mapping[str, list[Any]], after: Mapping[str, list[Any]], key: str) -> bool:
    """Whether the sum that ended a module was fused with what follows: what is left of it, its product, is not its answer."""
    name = bare(key)
    return name in before and name in after and before[name][-1][1] == "Add" != after[name][-1][1]


def _of_call(nodes: Mapping[str, list[tuple[tuple[str, ...], str, str]]], key: str, calls: Mapping[str, int]) -> str:
    """The value that a module's call gives: what its last node computes."""
    name, _, number = key.partition("@")
    if name not in nodes:
        return ""
    last = nodes[name][-1]
    # A shared module leaves its nodes once a call, alike.
    alike = [node for node in nodes[name] if node[:2] == last[:2]]
    if calls.get(name, 1) == 1:
        return last[2]
    return alike[int(number or 0)][2] if len(alike) == calls[name] else ""


def floats_of(path: Path) -> list[str]:
    """Return every value that a node computes and that is floating-point, or whose type the graph does not give."""
    import onnx_ir as ir

    floats = (None, ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    return [name for name, value in values_of(ir.load(path)).items() if value.dtype in floats]


def nearest(
    reference: Mapping[str, Array], tapped: Mapping[str, Mapping[str, Array]], taken: Collection[str]
) -> str | None:
    """Among values of the same shape, the one nearest to the reference's on every probe; None beyond half its size.

    `reference` and `tapped` are by probe.
    """
    import numpy as np

    best: tuple[float, str | None] = (0.5, None)
    for name in next(iter(tapped.values()), {}):
        pairs = [(tapped[probe][name], reference[probe]) for probe in tapped]
        if name in taken or any(a.shape != b.shape for a, b in pairs):
            continue
        with np.errstate(all="ignore"):
            error = max(relative(a - b, b) for a, b in pairs)
        if error < best[0]:
            best = (error, name)
    return best[1]
