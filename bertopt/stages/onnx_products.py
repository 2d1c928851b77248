"""Find products with a constant matrix in an ONNX graph, plain or quantised: their input, weights and quantisation step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from bertopt.core import Array

#: Operators that change at most the type of a value.
_CASTS = ("Cast", "Identity")


class Product:
    """A product with a constant matrix: its input, the weights [H, N] as floats, their quantisation step (0 if there is none), a bias."""

    def __init__(self, reads: Any, weights: Array, step: Array | float, bias: Any) -> None:
        self.reads, self.weights, self.step, self.bias = reads, weights, step, bias


def product_of(value: Any) -> Product | None:
    """Return the product x · W + b that gives `value`: a MatMul, a Gemm, a MatMul and an Add, or a quantised form of these; else None."""
    node = value.producer()
    if node.op_type == "Add" and not node.domain:
        # A Gemm that was split, or any MatMul with a bias: the same form either way.
        for index in (0, 1):
            made = through(node.inputs[index])
            inner = _plain_product(made)
            if inner is not None and constant_of(through(node.inputs[1 - index])) is not None:
                inner.bias = node.inputs[1 - index]
                return inner
        return None
    return _plain_product(value)


def _plain_product(value: Any) -> Product | None:
    node = value.producer()
    fused = node is not None and (node.op_type, node.domain) == ("FusedMatMul", "com.microsoft")
    if node is None or (node.domain and not fused):
        return None
    if node.op_type == "Mul":
        return _dynamic(node)
    if node.op_type not in ("MatMul", "Gemm", "FusedMatMul"):
        return None
    weights, step = dequantised(node.inputs[1])
    if weights is None or weights.ndim != 2:
        return None
    flags = {name: attribute.value for name, attribute in node.attributes.items()}
    if any(flags.get(name) for name in ("transA", "transBatchA", "transBatchB")) or any(flags.get(name, 1.0) != 1.0 for name in ("alpha", "beta")):
        return None
    if flags.get("transB"):
        weights, step = weights.T, step.T if isinstance(step, np.ndarray) else step
    return Product(unquantised(node.inputs[0]), weights, step, node.inputs[2] if len(node.inputs) > 2 else None)


def _dynamic(node: Any) -> Product | None:
    """ONNX Runtime's dynamic quantisation: Cast(MatMulInteger(q(x), W, zx, zw)) · (sx · sw)."""
    for index in (0, 1):
        product, scale = through(node.inputs[index]).producer(), through(node.inputs[1 - index]).producer()
        if product is None or scale is None or product.op_type != "MatMulInteger" or scale.op_type != "Mul":
            continue
        source = through(product.inputs[0]).producer()
        if source is None or source.op_type != "DynamicQuantizeLinear":
            return None
        scales = [constant_of(through(value)) for value in scale.inputs]
        sides = [i for i, known in enumerate(scales) if known is not None]
        stored = constant_of(product.inputs[1])
        zero = constant_of(product.inputs[3]) if len(product.inputs) > 3 else None
        if len(sides) != 1 or stored is None or scale.inputs[1 - sides[0]] is not source.outputs[1]:
            return None
        known = scales[sides[0]]
        assert known is not None
        step = np.broadcast_to(known, stored.shape).astype(np.float64)
        shift = 0 if zero is None else zero.astype(np.int32)
        return Product(source.inputs[0], (stored.astype(np.int32) - shift) * step, step, None)
    return None


def dequantised(value: Any) -> tuple[Array | None, Array | float]:
    """Return a constant as floats and its quantisation step [H, N], 0 where it is not quantised; None where it is not a constant."""
    value = through(value)
    if (known := constant_of(value)) is not None:
        return known, 0.0
    node = value.producer()
    if node is None or node.op_type not in ("DequantizeLinear", "Transpose"):
        return None, 0.0
    if node.op_type == "Transpose":
        weights, step = dequantised(node.inputs[0])
        return (None, 0.0) if weights is None or weights.ndim != 2 else (weights.T, step.T if isinstance(step, np.ndarray) else step)
    stored, scale = constant_of(node.inputs[0]), constant_of(node.inputs[1])
    if stored is None or scale is None:
        return None, 0.0
    zero = constant_of(node.inputs[2]) if len(node.inputs) > 2 else None
    zero = np.zeros_like(scale) if zero is None else zero
    axis = node.attributes["axis"].value if "axis" in node.attributes else 1
    shape = [-1 if dim == axis % stored.ndim else 1 for dim in range(stored.ndim)] if scale.ndim else []
    step = np.broadcast_to(scale.astype(np.float64).reshape(shape), stored.shape)
    return (stored.astype(np.int32) - zero.astype(np.int32).reshape(shape)) * step, step


def unquantised(value: Any) -> Any:
    """Return the value before it was quantised and dequantised by the same scale, or the value itself."""
    nodes = _down_and_up(value)
    return value if nodes is None or rescaled(value) else nodes[0].inputs[0]


def rescaled(value: Any) -> bool:
    """Return whether a value was quantised, and then dequantised by other constants, which changes more than it rounds."""
    nodes = _down_and_up(value)
    if nodes is None:
        return False
    pairs = [tuple(constant_of(through(one)) for one in pair) for pair in zip(nodes[0].inputs[1:], nodes[1].inputs[1:], strict=False)]
    return any(one is not None and other is not None and not np.array_equal(one, other) for one, other in pairs)


def _down_and_up(value: Any) -> tuple[Any, Any] | None:
    """Return the nodes that quantised and dequantised a value; None where it was not."""
    up = through(value).producer()
    down = up.inputs[0].producer() if up is not None and up.op_type == "DequantizeLinear" else None
    return (down, up) if down is not None and down.op_type == "QuantizeLinear" else None


def through(value: Any) -> Any:
    """Return the value before casts and identities."""
    while (node := value.producer()) is not None and node.op_type in _CASTS and not node.domain:
        value = node.inputs[0]
    return value


def constant_of(value: Any) -> Array | None:
    if value is not None and value.is_initializer() and value.const_value is not None:
        found: Array = value.const_value.numpy()
        return found
    return None
