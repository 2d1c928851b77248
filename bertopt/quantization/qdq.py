"""QuantizeLinear and DequantizeLinear written into a graph: one pair before every product, INT8 weights behind it.

Only what a product reads is quantised. ONNX Runtime's `quantize_static` lets everything that reads the same value read
the quantised one, residual sums included, which costs accuracy; and where a value has no type, as after fused operators,
it quantises the weights alone, which runs in float.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bertopt.errors import Unsupported
from bertopt.quantization.activation_ranges import Range

if TYPE_CHECKING:
    from bertopt.core import Array

PRODUCTS = ("MatMul", "Gemm")
#: Where a normalisation has its weight and its bias.
NORMS = {"LayerNormalization": (1, 2), "SkipLayerNormalization": (2, 3)}
#: Largest magnitude of a bias in units of its scale: int32 holds it with room for the sum.
_BIAS_LEVELS = 2**30


def products(graph: Any) -> list[Any]:
    """The products of a float32 graph with a constant matrix as second factor, but those after pooling: one a text, they stay float32."""
    return [node for node in fed(graph) if node.op_type in PRODUCTS and not node.domain and _plain(node) and not pools(node)]


def pools(node: Any) -> bool:
    """Whether a node is of pooling, or of what follows it. The exporter recorded which module each node came from."""
    return "Pooling" in node.metadata_props.get("namespace", "")


def fed(graph: Any) -> list[Any]:
    """The nodes, in order, that depend on the graph's inputs. Runtimes compute the others once, when they load it:
    DeBERTa's products of its relative positions are of constants alone."""
    reached, found = set(graph.inputs), []
    for node in graph:
        if not reached.isdisjoint(node.inputs):
            reached.update(node.outputs)
            found.append(node)
    return found


def _plain(node: Any) -> bool:
    """Whether a product is x · W (+ b) with constant float32 W [H, N] and b, nothing scaled."""
    import onnx_ir as ir

    scaled = any(name in node.attributes and node.attributes[name].value != 1.0 for name in ("alpha", "beta"))
    constants = [value for value in node.inputs[1:] if value is not None]
    constant = all(value.is_initializer() and value.dtype == ir.DataType.FLOAT for value in constants)
    return constant and len(constants[0].shape or ()) == 2 and not scaled and not _flag(node, "transA")


def check_matrices(graph: Any, family: str) -> None:
    """Raise Unsupported where products of a graph multiply by a matrix for each group of channels: those have no kernels in INT8 here, and
    what quantises the others alone would leave most of the network in float32."""
    grouped = [node for node in fed(graph) if _grouped(node)]
    if grouped:
        every = len(grouped) + len(products(graph))
        raise Unsupported(
            f"INT8 is for products with one matrix; {len(grouped)} of {every} products of this {family} have one for each group of channels, such as "
            f"{grouped[0].op_type} '{grouped[0].name}': use convert_openvino with precision: bf16 or f32"
        )


def _grouped(node: Any) -> bool:
    """Whether a node multiplies every token by constant matrices of its groups: [G, H, N], or [N, H, 1] of a convolution over one token."""
    weight = node.inputs[1] if node.op_type in ("MatMul", "Conv") else None
    if weight is None or not weight.is_initializer() or len(shape := [*weight.shape]) != 3:
        return False
    return node.op_type == "MatMul" or bool(shape[2] == 1 and shape[1] > 1)


def excluded(nodes: Sequence[Any], patterns: Sequence[str]) -> list[Any]:
    """The nodes that some pattern names. Raises Unsupported for a pattern that names none."""
    for pattern in patterns:
        if not any(named(node.name, [pattern]) for node in nodes):
            names = ", ".join(node.name for node in nodes[:3])
            raise Unsupported(f"keep_fp32 must name products of the graph, such as {names}; got '{pattern}'")
    return [node for node in nodes if named(node.name, patterns)]


def named(name: str, patterns: Sequence[str]) -> bool:
    """Whether one of the patterns is the name, or matches it."""
    return any(name == pattern or fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def smooth(graph: Any, nodes: Sequence[Any], ranges: Mapping[str, Range], alpha: float) -> int:
    """Move large channels from a normalisation's answer into the weights of the products that read it; how many answers.

    SmoothQuant (Xiao et al. 2022): channel j is divided by max|X_j|^alpha / max|W_j|^(1 - alpha). Whatever else reads the
    answer, such as the residual sum, reads it multiplied back.
    """
    import onnx_ir as ir

    done = 0
    for name, readers in _by_input(nodes).items():
        value = readers[0].inputs[0]
        norm = value.producer()
        if norm is None or norm.op_type not in NORMS or value is not norm.outputs[0] or value.is_graph_output():
            continue
        seen = np.asarray(ranges[name].channels)
        largest = np.max([np.abs(_matrix(node)).max(axis=1) for node in readers], axis=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            factor = seen**alpha / largest ** (1 - alpha)
        factor = np.where(np.isfinite(factor) & (factor > 0), factor, 1.0).astype(np.float32)
        others = [(user, at) for user, at in value.uses() if user not in readers]
        for at in NORMS[norm.op_type]:
            if len(norm.inputs) > at and norm.inputs[at] is not None:
                scaled = norm.inputs[at].const_value.numpy() / factor
                norm.replace_input_with(at, constant(graph, f"{name}_smoothed_{at}", scaled))
        for node in readers:
            weight = _matrix(node) * factor[:, None]
            weight = weight.T if _flag(node, "transB") else weight
            node.replace_input_with(1, constant(graph, f"{node.name}_smoothed_weight", weight))
        if others:
            back = ir.node("Mul", [value, constant(graph, f"{name}_smoothing", factor)], name=f"{name}_unsmoothed")
            back.outputs[0].name = back.name
            graph.insert_after(norm, back)
            for user, at in others:
                user.replace_input_with(at, back.outputs[0])
        done += 1
    drop_unused(graph)
    return done


def quantize(
    graph: Any, nodes: Sequence[Any], ranges: Mapping[str, Range], per_channel: bool, reduce_range: bool,
    symmetric: bool = False,
) -> None:  # fmt: skip
    """Let `nodes` read uint8 activations, quantised by their ranges, and int8 weights (7 bits with `reduce_range`).

    With `symmetric`, activations are int8 with zero point 0 and biases stay float32: TensorRT takes nothing else.
    """
    written = _Writer(graph, per_channel, 64 if reduce_range else 127, integer_bias=not symmetric)
    for name, readers in _by_input(nodes).items():
        seen = ranges[name]
        width = 2 * max(seen.high, -seen.low) * 255 / 254 if symmetric else seen.high - seen.low
        scale = max(width / 255, float(np.finfo(np.float32).tiny) * 255)
        zero = np.int8(0) if symmetric else np.uint8(round(-seen.low / scale))
        read = written.activation(readers[0].inputs[0], scale, zero)
        for node in readers:
            written.weights(node, scale)
            node.replace_input_with(0, read)
    drop_unused(graph)


class _Writer:
    """Quantised constants, each written once however many nodes read it."""

    def __init__(self, graph: Any, per_channel: bool, levels: int, integer_bias: bool) -> None:
        self.graph, self.per_channel, self.levels, self.integer_bias = graph, per_channel, levels, integer_bias
        self.shared: dict[Any, Any] = {}

    def activation(self, value: Any, scale: float, zero: Any) -> Any:
        import onnx_ir as ir

        name = value.name
        how = [
            constant(self.graph, f"{name}_scale", np.float32(scale)),
            constant(self.graph, f"{name}_zero_point", zero),
        ]
        down = ir.node("QuantizeLinear", [value, *how], name=f"{name}_quantize")
        up = ir.node("DequantizeLinear", [down.outputs[0], *how], name=f"{name}_dequantize")
        down.outputs[0].name, up.outputs[0].name = f"{name}_quantized", f"{name}_dequantized"
        up.outputs[0].dtype, up.outputs[0].shape = ir.DataType.FLOAT, value.shape
        down.outputs[0].dtype, down.outputs[0].shape = ir.DataType.from_numpy(zero.dtype), value.shape
        self.graph.insert_after(value.producer(), [down, up])
        return up.outputs[0]

    def weights(self, node: Any, scale: float) -> None:
        """Write the weights [H, N] of a product and, where it is to be in integers, the bias [N] of a Gemm, whose input has that scale."""
        import onnx_ir as ir

        biased = self.integer_bias and len(node.inputs) > 2 and node.inputs[2] is not None
        # A bias is in units of the input's scale, so no other product shares it.
        key = (node.inputs[1], node if biased else None)
        if key not in self.shared:
            matrix = _matrix(node)
            steps = np.abs(matrix).max(axis=0 if self.per_channel else None) / self.levels
            bias = node.inputs[2].const_value.numpy() if biased else np.zeros(1, np.float32)
            bias = np.broadcast_to(bias.reshape(-1), matrix.shape[1:])
            largest = np.abs(bias) if self.per_channel else np.abs(bias).max()
            steps = np.maximum(steps, largest / (scale * _BIAS_LEVELS))
            steps = np.where(steps > 0, steps, 1.0).astype(np.float32)
            whole = np.clip(np.rint(matrix / steps), -self.levels, self.levels).astype(np.int8)
            name = f"{node.inputs[1].name}_{len(self.shared)}"
            units = steps * np.float32(scale)
            # ONNX Runtime multiplies a Gemm in integers only where its bias is int32.
            offset = np.rint(bias / units).astype(np.int32)
            self.shared[key] = (
                self._up(node, name, whole, steps, 1),
                self._up(node, f"{name}_bias", offset, units, 0) if biased else None,
            )
        weight, offset = self.shared[key]
        node.replace_input_with(1, weight)
        if offset is not None:
            node.replace_input_with(2, offset)
        if _flag(node, "transB"):
            node.attributes["transB"] = ir.AttrInt64("transB", 0)

    def _up(self, node: Any, name: str, whole: Array, steps: Array, axis: int) -> Any:
        """The dequantised constant, before `node`."""
        import onnx_ir as ir

        how = [
            constant(self.graph, f"{name}_quantized", whole),
            constant(self.graph, f"{name}_scale", np.asarray(steps, np.float32)),
            constant(self.graph, f"{name}_zero_point", np.zeros(np.shape(steps), whole.dtype)),
        ]
        up = ir.node("DequantizeLinear", how, {"axis": axis} if np.ndim(steps) else {}, name=f"{name}_dequantize")
        up.outputs[0].name, up.outputs[0].dtype = f"{name}_dequantized", ir.DataType.FLOAT
        up.outputs[0].shape = ir.Shape(whole.shape)
        self.graph.insert_before(node, up)
        return up.outputs[0]


def _by_input(nodes: Sequence[Any]) -> dict[str, list[Any]]:
    """Products by the value that they read first."""
    found: dict[str, list[Any]] = {}
    for node in nodes:
        found.setdefault(node.inputs[0].name, []).append(node)
    return found


def _matrix(node: Any) -> Array:
    """The weights [H, N] of a product."""
    weight = node.inputs[1].const_value.numpy()
    return np.asarray(weight.T if _flag(node, "transB") else weight)


def _flag(node: Any, name: str) -> bool:
    return name in node.attributes and bool(node.attributes[name].value)


def constant(graph: Any, name: str, array: Any) -> Any:
    import onnx_ir as ir

    # `ascontiguousarray` would make a scalar a vector.
    value = ir.val(name, const_value=ir.tensor(np.asarray(array, order="C"), name=name))
    graph.register_initializer(value)
    return value


def drop_unused(graph: Any) -> None:
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del graph.initializers[name]
