"""Certify an ONNX graph: weights of an export are the network's; a cast or quantised graph is its parent's, rounded."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np

from bertopt.core import Eager, Onnx
from bertopt.results.fidelity import Certificate, contradiction

if TYPE_CHECKING:
    from bertopt.core import Array

#: Constants of up to this number of elements are shapes, scales and epsilons, which exporters compute themselves.
SMALL = 16
#: Room over half a step of quantisation for the float32 arithmetic of quantisers.
ROOM = 1e-3
#: Steps of quantisation between zero and a channel's largest weight, at least: 8 bits have 127, with half of the range 63.
_LEAST_STEPS = 50
#: Operators that carry a value through: its type changes at most.
_CASTS = ("Cast", "Identity")


class _Differs(Exception):
    """The graphs are not built alike."""


class _Contradicted(Exception):
    """A weight is not the parent's, rounded."""


def exported(model: Onnx, parent: Eager) -> Certificate:
    """Return `certified` where every large constant of the graph is a tensor of the network, transposed or not, and every
    matrix of the network that its products read is there."""
    import onnx_ir as ir

    known: set[Any] = set()
    for tensor in (*parent.network.parameters(), *parent.network.buffers()):
        array: Array = tensor.detach().float().numpy()
        known |= {content(array), *([content(array.T)] if array.ndim == 2 else [])}
    constants = {
        name: value.const_value.numpy()
        for name, value in ir.load(model.path).graph.initializers.items()
        if value.dtype.is_floating_point() and value.const_value.size > SMALL
    }
    foreign = [name for name, array in constants.items() if content(array.astype(np.float32)) not in known]
    if foreign:
        reason = f"the constant '{foreign[0]}' is no tensor of the network ({len(foreign)} of {len(constants)} constants)"
        return Certificate(status="none", reason=reason, weights=len(constants))
    return Certificate(status="certified", reason="every weight of the graph is the network's, bit for bit", weights=len(constants))


def rewritten(model: Onnx, parent: Onnx) -> Certificate:
    """Return `certified` where `model` is its parent's graph but for casts, quantisation and rounded weights.

    `contradicted` where a weight of a graph that is built alike is not its parent's, rounded. A graph that was fused or
    rebuilt has no certificate. Scales of activations are not compared: they are measured.
    """
    import onnx_ir as ir

    walk = _Walk()
    mine, theirs = ir.load(model.path).graph, ir.load(parent.path).graph
    outputs = {value.name: value for value in theirs.outputs}
    try:
        for value in mine.outputs:
            if value.name not in outputs:
                raise _Differs(f"the parent has no output '{value.name}'")
            walk.equal(value, outputs[value.name])
    except _Differs as error:
        return Certificate(status="none", reason=f"the graph is built otherwise than its parent's: {error}", weights=walk.weights)
    except _Contradicted as error:
        return Certificate(status=contradiction(model.precision), reason=str(error), weights=walk.weights)
    return Certificate(
        status="certified", reason="the parent's graph, every weight rounded or equal", weights=walk.weights
    )


class _Walk:
    """One walk over two graphs, from their outputs to their inputs."""

    def __init__(self) -> None:
        self.met: set[tuple[Any, Any]] = set()
        self.weights = 0

    def equal(self, mine: Any, theirs: Any) -> None:
        """Follow two values back until both are inputs, constants, or met before. Raises _Differs, _Contradicted."""
        waiting = [(mine, theirs)]
        while waiting:
            mine, theirs = waiting.pop()
            if mine is None or theirs is None:
                if mine is not theirs:
                    raise _Differs("a node has other inputs")
                continue
            mine, theirs = _through(mine), _through(theirs)
            if (mine, theirs) in self.met:
                continue
            self.met.add((mine, theirs))
            waiting += self._step(mine, theirs)

    def _step(self, mine: Any, theirs: Any) -> list[tuple[Any, Any]]:
        first, second = _value(mine), _value(theirs)
        if first is not None or second is not None:
            if first is None or second is None:
                raise _Differs(f"'{theirs.name if second is not None else mine.name}' is a constant in one of the graphs alone")
            self._constants(mine.name or "", first, second, 0.0)
            return []
        if mine.producer() is None or theirs.producer() is None:
            if mine.name != theirs.name or mine.producer() is not theirs.producer():
                raise _Differs(f"input '{mine.name}' is read where the parent reads '{theirs.name}'")
            return []
        product, source = _product(mine), _product(theirs)
        if product is not None and source is not None:
            self._constants(f"weights of '{theirs.producer().name}'", product.weights, source.weights, product.step)
            return [(product.reads, source.reads), *([(product.bias, source.bias)] if product.bias or source.bias else [])]
        return self._nodes(mine, theirs)

    def _nodes(self, mine: Any, theirs: Any) -> list[tuple[Any, Any]]:
        one, other = mine.producer(), theirs.producer()
        if (one.domain, one.op_type) != (other.domain, other.op_type) or len(one.inputs) != len(other.inputs):
            raise _Differs(f"{one.op_type} '{one.name}' stands where the parent has {other.op_type} '{other.name}'")
        if mine.index() != theirs.index():
            raise _Differs(f"another output of {other.op_type} '{other.name}' is read")
        if set(one.attributes) != set(other.attributes):
            raise _Differs(f"{one.op_type} '{one.name}' has other attributes")
        for name, attribute in one.attributes.items():
            before = other.attributes[name].value
            if hasattr(attribute.value, "numpy"):
                self._constants(f"{one.name}.{name}", attribute.value.numpy(), before.numpy(), 0.0)
            elif attribute.value != before:
                raise _Differs(f"{name} of {one.op_type} '{one.name}' is {attribute.value}, the parent's {before}")
        return list(zip(one.inputs, other.inputs, strict=True))

    def _constants(self, name: str, mine: Array, theirs: Array, step: Array | float) -> None:
        self.weights += 1
        if mine.shape != theirs.shape:
            raise _Contradicted(f"{name}: shape {list(mine.shape)}; the parent's {list(theirs.shape)}")
        if not np.any(step) and mine.dtype != theirs.dtype and theirs.dtype == np.float32:
            with np.errstate(over="ignore"):
                theirs = _clipped(theirs, mine.dtype).astype(mine.dtype)
        if not np.any(step):
            if mine.tobytes() != theirs.tobytes() and not np.array_equal(mine, theirs):
                raise _Contradicted(f"{name}: not the parent's, rounded to {mine.dtype}")
            return
        if coarse(theirs, step):
            raise _Contradicted(f"{name}: steps of its quantisation of more than a {_LEAST_STEPS}th of its largest weight")
        far = np.abs(theirs.astype(np.float64) - mine) / (0.5 * step * (1 + ROOM) + 1e-12)
        if not far.max() <= 1:
            raise _Contradicted(f"{name}: {far.max() / 2:.3g} steps of its quantisation from the parent's; at most 0.5 is rounding")


def coarse(weights: Array, step: Array | float) -> bool:
    """Whether a step is so large for the weights that share it that most values are within half of it.

    `step` has one value, or is of the form of `weights` [..., N] with one value an index of one axis.
    """
    steps = np.broadcast_to(np.asarray(step, np.float64), weights.shape)
    shared = tuple(axis for axis in range(steps.ndim) if not np.ptp(steps, axis=axis).any())
    largest = np.abs(weights).max(axis=shared, keepdims=True)
    return bool(((_LEAST_STEPS * steps > largest) & (largest > 0)).any())


class _Product:
    """A product by a constant matrix: what it reads, the weights [H, N] as floats, one step of theirs, a bias."""

    def __init__(self, reads: Any, weights: Array, step: Array | float, bias: Any) -> None:
        self.reads, self.weights, self.step, self.bias = reads, weights, step, bias


def _product(value: Any) -> _Product | None:
    """What gives `value`, as x · W + b: a MatMul, a Gemm, a MatMul and an Add, or what quantises one of them."""
    node = value.producer()
    if node.op_type == "Add" and not node.domain:
        # A Gemm that was split, or any MatMul with a bias: the same form either way.
        for index in (0, 1):
            made = _through(node.inputs[index])
            inner = _plain_product(made)
            if inner is not None and _value(_through(node.inputs[1 - index])) is not None:
                inner.bias = node.inputs[1 - index]
                return inner
        return None
    return _plain_product(value)


def _plain_product(value: Any) -> _Product | None:
    node = value.producer()
    if node is None or node.domain:
        return None
    if node.op_type == "Mul":
        return _dynamic(node)
    if node.op_type not in ("MatMul", "Gemm"):
        return None
    weights, step = _dequantised(node.inputs[1])
    if weights is None or weights.ndim != 2:
        return None
    flags = {name: attribute.value for name, attribute in node.attributes.items()}
    if flags.get("transA") or any(flags.get(name, 1.0) != 1.0 for name in ("alpha", "beta")):
        return None
    if flags.get("transB"):
        weights, step = weights.T, step.T if isinstance(step, np.ndarray) else step
    return _Product(_unquantised(node.inputs[0]), weights, step, node.inputs[2] if len(node.inputs) > 2 else None)


def _dynamic(node: Any) -> _Product | None:
    """ONNX Runtime's dynamic quantisation: Cast(MatMulInteger(q(x), W, zx, zw)) · (sx · sw)."""
    for index in (0, 1):
        product, scale = _through(node.inputs[index]).producer(), _through(node.inputs[1 - index]).producer()
        if product is None or scale is None or product.op_type != "MatMulInteger" or scale.op_type != "Mul":
            continue
        source = _through(product.inputs[0]).producer()
        if source is None or source.op_type != "DynamicQuantizeLinear":
            return None
        scales = [_value(_through(value)) for value in scale.inputs]
        sides = [i for i, known in enumerate(scales) if known is not None]
        stored = _value(product.inputs[1])
        zero = _value(product.inputs[3]) if len(product.inputs) > 3 else None
        if len(sides) != 1 or stored is None or scale.inputs[1 - sides[0]] is not source.outputs[1]:
            return None
        known = scales[sides[0]]
        assert known is not None
        step = np.broadcast_to(known, stored.shape).astype(np.float64)
        shift = 0 if zero is None else zero.astype(np.int32)
        return _Product(source.inputs[0], (stored.astype(np.int32) - shift) * step, step, None)
    return None


def _dequantised(value: Any) -> tuple[Array | None, Array | float]:
    """A constant as floats and its quantisation's step [H, N], 0 where it is not quantised; None where it is no constant."""
    value = _through(value)
    if (known := _value(value)) is not None:
        return known, 0.0
    node = value.producer()
    if node is None or node.op_type not in ("DequantizeLinear", "Transpose"):
        return None, 0.0
    if node.op_type == "Transpose":
        weights, step = _dequantised(node.inputs[0])
        return (None, 0.0) if weights is None or weights.ndim != 2 else (weights.T, step.T if isinstance(step, np.ndarray) else step)
    stored, scale = _value(node.inputs[0]), _value(node.inputs[1])
    if stored is None or scale is None:
        return None, 0.0
    zero = _value(node.inputs[2]) if len(node.inputs) > 2 else None
    zero = np.zeros_like(scale) if zero is None else zero
    axis = node.attributes["axis"].value if "axis" in node.attributes else 1
    shape = [-1 if dim == axis % stored.ndim else 1 for dim in range(stored.ndim)] if scale.ndim else []
    step = np.broadcast_to(scale.astype(np.float64).reshape(shape), stored.shape)
    return (stored.astype(np.int32) - zero.astype(np.int32).reshape(shape)) * step, step


def _unquantised(value: Any) -> Any:
    """What a value was before it was quantised and dequantised, or the value."""
    made = _through(value).producer()
    if made is not None and made.op_type == "DequantizeLinear":
        source = made.inputs[0].producer()
        if source is not None and source.op_type == "QuantizeLinear":
            return source.inputs[0]
    return value


def _through(value: Any) -> Any:
    """The value that casts and identities only carry."""
    while (node := value.producer()) is not None and node.op_type in _CASTS and not node.domain:
        value = node.inputs[0]
    return value


def _value(value: Any) -> Array | None:
    if value is not None and value.is_initializer() and value.const_value is not None:
        found: Array = value.const_value.numpy()
        return found
    return None


def _clipped(array: Array, dtype: Any) -> Array:
    """Values beyond float16's range, such as a mask's, are clipped to it."""
    if dtype != np.float16:
        return array
    largest = float(np.finfo(np.float16).max)
    return np.clip(array, -largest, largest)


def content(array: Array) -> tuple[int, bytes]:
    """Return what is equal for arrays of the same elements in the same order, whatever their shape."""
    flat = np.ascontiguousarray(array)
    return (flat.size, hashlib.sha256(flat.tobytes()).digest())
