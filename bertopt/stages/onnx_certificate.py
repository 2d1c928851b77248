"""Certify an ONNX graph: an exported graph has the network's weights; a cast or quantised graph is its parent's with rounded weights."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bertopt.core import Eager, Model, Onnx
from bertopt.quantization.qdq import NORMS
from bertopt.results.fidelity import Certificate, contradiction
from bertopt.stages import onnx_smoothing
from bertopt.stages.fingerprint import functions_hash
from bertopt.stages.onnx_products import Product, constant_of, dequantised, product_of, rescaled, through, unquantised

if TYPE_CHECKING:
    from bertopt.core import Array

#: Constants of at most this many elements are shapes, scales and epsilons, which exporters compute.
SMALL = 16
#: Tolerance, relative to half a quantisation step, for the float32 arithmetic of quantisers.
ROOM = 1e-3
#: Fewest quantisation steps between zero and a channel's largest weight: 8 bits have 127, and 63 with `reduce_range`.
_LEAST_STEPS = 50

#: Relative difference of two calibrations on the same texts, which kernels of another CPU may cause.
_RANGE = 0.01
#: Attributes that an operator computes with, and no pass changes.
_NUMBERS = ("epsilon", "approximate")
#: Largest change of a number by rounding to half precision, relative, and absolute for numbers too small for float16.
HALF, TINY = 2**-8, 1e-6


class Differs(Exception):
    """The graphs have different structures."""


class Contradicted(Exception):
    """A weight is not the parent's rounded weight."""


def exported(model: Onnx, parent: Eager) -> Certificate:
    """Return `certified` where every large constant of the graph is a tensor of the network, transposed or not, and every
    matrix of the network that its products read is there.

    `contradicted` where a graph of reduced precision reads a table of embeddings of which some rows are not the network's, rounded.
    """
    import onnx_ir as ir

    known: set[Any] = set()
    for tensor in (*parent.network.parameters(), *parent.network.buffers()):
        array: Array = tensor.detach().float().numpy()
        known |= {content(array), *([content(array.T)] if array.ndim == 2 else [])}
    values = [value for value in ir.load(model.path).graph.initializers.values() if value.dtype.is_floating_point() and value.const_value.size > SMALL]
    constants = {value.name: value.const_value.numpy().astype(np.float32) for value in values}
    foreign = [name for name, array in constants.items() if content(array) not in known]
    read = {value.name for value in values if any(node.op_type == "Gather" and index == 0 for node, index in value.uses())}
    if other := next((name for name in foreign if name in read and _has_other_rows(constants[name], parent.network)), None):
        return Certificate(status=contradiction(model.precision), reason=f"rows of the table '{other}' are not the network's, rounded", weights=len(constants))
    if foreign:
        reason = f"the constant '{foreign[0]}' is no tensor of the network ({len(foreign)} of {len(constants)} constants)"
        return Certificate(status="none", reason=reason, weights=len(constants))
    return Certificate(status="certified", reason="every weight of the graph is the network's, bit for bit", weights=len(constants))


def _has_other_rows(array: Array, network: Any) -> bool:
    """Return whether most rows, but not all, are those of an embedding table of the network, rounded to half precision or not. (A pass that
    folds one table into another changes all rows.)"""
    from torch import nn

    tables = [module.weight.detach().float().numpy() for module in network.modules() if isinstance(module, nn.Embedding)]
    alike = [float(np.isclose(array, table, rtol=HALF, atol=TINY).all(axis=1).mean()) for table in tables if table.shape == array.shape]
    return 0.5 <= max(alike, default=0.0) < 1.0


def rewritten(model: Onnx, parent: Onnx, same_build: bool = False) -> Certificate:
    """Return `certified` where `model` is its parent's graph except for casts, quantisation, rounded weights, and the channels that
    SmoothQuant scaled in normalisations and weights. `parent` may be quantised too, as another artefact of the checkpoint is.

    `contradicted` where a weight, or a number that an operator computes with, is not its parent's in a graph with the same structure. A graph
    that was fused or rebuilt has no certificate, except where both are of the `same_build`, whose structure is one. Scales of activations,
    which come from calibration, are compared only there.
    """
    import onnx_ir as ir

    walk = _Walk()
    mine, theirs = ir.load(model.path), ir.load(parent.path)
    outputs = {value.name: value for value in theirs.graph.outputs}

    def compare() -> None:
        if functions_hash(mine) != functions_hash(theirs):
            raise Differs("functions that its nodes call are others")
        for value in mine.graph.outputs:
            if value.name not in outputs:
                raise Differs(f"the parent has no output '{value.name}'")
            walk.equal(value, outputs[value.name])
        if same_build and (name := other_range(*(_scales(graph) for graph in (mine, theirs)))) is not None:
            raise Contradicted(f"the scale of activations of '{name}' is not the parent's")

    found = concluded(compare, model, parent, same_build, "the parent's graph, every weight rounded or equal")
    return found.model_copy(update={"weights": walk.weights})


def concluded(compare: Callable[[], None], model: Model, parent: Model, same_build: bool, certified: str) -> Certificate:
    """Return the certificate of two graphs by what `compare` raises, with the reason `certified` where that is nothing; it counts no weights."""
    precision = parent.precision if model.precision == "float32" else model.precision
    try:
        compare()
    except Differs as error:
        status = contradiction(precision) if same_build else "none"
        return Certificate(status=status, reason=f"the graph is built otherwise than the parent's: {error}")
    except Contradicted as error:
        return Certificate(status=contradiction(precision), reason=str(error))
    return Certificate(status="certified", reason=certified)


def other_range(mine: Mapping[str, Sequence[Array]], theirs: Mapping[str, Sequence[Array]]) -> str | None:
    """Return the first name of which two graphs hold other ranges of activations, None where there is none."""
    return next((name for name in mine if name in theirs and not all(map(_near, mine[name], theirs[name]))), None)


def _near(mine: Array, theirs: Array) -> bool:
    return mine.shape == theirs.shape and np.allclose(mine, theirs, rtol=_RANGE, atol=0)


def _scales(model: Any) -> dict[str, list[Array]]:
    """Return the scale by which each value that is not a constant is quantised, by the quantising node's name."""
    nodes = (node for node in model.graph if node.op_type == "QuantizeLinear")
    return {node.name or "": [scale] for node in nodes if (scale := constant_of(through(node.inputs[1]))) is not None}


class _Pair(NamedTuple):
    """A value and the parent's; `divisor` [H] is what SmoothQuant divided the channels of `mine` by, None where nothing."""

    mine: Any
    theirs: Any
    divisor: Array | None = None


class _Walk:
    """One walk over two graphs, from their outputs to their inputs."""

    def __init__(self) -> None:
        self.met: set[tuple[Any, Any, bytes | None]] = set()
        self.weights = 0

    def equal(self, mine: Any, theirs: Any) -> None:
        """Follow two values back until both are inputs, constants, or met before. Raises Differs, Contradicted."""
        waiting = [_Pair(mine, theirs)]
        while waiting:
            mine, theirs, divisor = waiting.pop()
            if mine is None or theirs is None:
                if mine is not theirs:
                    raise Differs("a node has other inputs")
                continue
            pair = _Pair(through(mine), through(theirs), divisor)
            key = (pair.mine, pair.theirs, None if divisor is None else divisor.tobytes())
            if key not in self.met:
                self.met.add(key)
                waiting += self._step(pair)

    def _step(self, pair: _Pair) -> list[_Pair]:
        mine, theirs, divisor = pair
        before = unquantised(mine), unquantised(theirs)
        if before[0] is not mine and before[1] is not theirs:
            return [_Pair(*before, divisor)]
        if rescaled(mine) and not rescaled(theirs):
            raise Contradicted(f"'{mine.name}' is multiplied by another scale than it was divided by")
        first, second = constant_of(mine), constant_of(theirs)
        if first is not None or second is not None:
            if first is None or second is None:
                raise Differs(f"'{theirs.name if second is not None else mine.name}' is a constant in one of the graphs alone")
            self._constants(mine.name or "", first, second, 0.0)
            return []
        if mine.producer() is None or theirs.producer() is None:
            if mine.name != theirs.name or mine.producer() is not theirs.producer():
                raise Differs(f"input '{mine.name}' is read where the parent reads '{theirs.name}'")
            return []
        if divisor is None and (back := onnx_smoothing.multiplied_back(mine, theirs)) is not None:
            return [_Pair(*back)]
        product, source = product_of(mine), product_of(theirs)
        if product is not None and source is not None:
            # SmoothQuant divides a normalisation only in quantised graphs; in half precision it is only rounded.
            quantised = np.any(product.step) or np.any(source.step)
            moved = onnx_smoothing.divisor(product.reads, source.reads) if quantised else None
            factor = 1 if moved is None else moved[:, None]
            room = sum(_half_room(each.weights) for each in (product, source)) if quantised else 0.0
            self._constants(
                f"weights of '{theirs.producer().name}'", product.weights, source.weights * factor, product.step, source.step * factor, room * factor
            )  # fmt: skip
            return [_Pair(product.reads, source.reads, moved), *self._bias(product, source)]
        return self._nodes(pair)

    def _bias(self, product: Product, source: Product) -> list[_Pair]:
        """Compare an integer bias, as integer products have, with the parent's; return any other bias as a pair to compare."""
        (mine, step), (whole, its_step) = ((None, 0.0) if one.bias is None else dequantised(one.bias) for one in (product, source))
        if whole is None or mine is None or not (np.any(step) or np.any(its_step)):
            return [_Pair(product.bias, source.bias)] if product.bias or source.bias else []
        if np.any(step > product.step) or np.any(its_step > source.step):
            raise Differs("a bias has larger steps than the weights beside it")
        self.weights += 1
        room = step + its_step + 2 * (_half_room(mine) + _half_room(whole))
        if mine.shape != whole.shape or not _half_steps(mine, whole, room) <= 1:
            raise Contradicted(f"'{source.bias.name}' is not the parent's, rounded")
        return []

    def _nodes(self, pair: _Pair) -> list[_Pair]:
        import onnx_ir as ir

        one, other = pair.mine.producer(), pair.theirs.producer()
        if (one.domain, one.op_type) != (other.domain, other.op_type) or len(one.inputs) != len(other.inputs):
            raise Differs(f"{one.op_type} '{one.name}' stands where the parent has {other.op_type} '{other.name}'")
        if pair.mine.index() != pair.theirs.index():
            raise Differs(f"another output of {other.op_type} '{other.name}' is read")
        if set(one.attributes) != set(other.attributes):
            raise Differs(f"{one.op_type} '{one.name}' has other attributes")
        for name, attribute in one.attributes.items():
            before = other.attributes[name].value
            if hasattr(attribute.value, "numpy"):
                self._constants(f"{one.name}.{name}", attribute.value.numpy(), before.numpy(), 0.0)
            elif attribute.value != before:
                inside = "holds a graph" if isinstance(before, ir.Graph) else f"is {attribute.value}, the parent's {before}"
                raise (Contradicted if name in _NUMBERS else Differs)(f"{name} of {one.op_type} '{one.name}' {inside}")
        pairs = list(zip(one.inputs, other.inputs, strict=True))
        # The other outputs of a normalisation, such as its mean, do not depend on its weight and bias.
        affine = NORMS.get(one.op_type, ()) if pair.divisor is not None or pair.mine.index() else ()
        if pair.divisor is not None:
            self.weights += len(affine)
            if not onnx_smoothing.is_divided(one, other, pair.divisor):
                raise Contradicted(f"weight and bias of '{other.name}' are not the parent's, divided as what reads them is multiplied")
        return [_Pair(*each) for at, each in enumerate(pairs) if at not in affine]

    def _constants(
        self, name: str, mine: Array, theirs: Array, step: Array | float, its_step: Array | float = 0.0, room: Array | float = 0.0
    ) -> None:
        """Compare two constants, either of which may be quantised; these may differ by `room` more than by half a step of each."""
        self.weights += 1
        if mine.shape != theirs.shape:
            raise Contradicted(f"{name}: shape {list(mine.shape)}; the parent's {list(theirs.shape)}")
        if not np.any(step) and not np.any(its_step):
            rounded, whole = (theirs, mine) if mine.dtype == np.float32 else (mine, theirs)
            if rounded.dtype != whole.dtype and whole.dtype == np.float32:
                with np.errstate(over="ignore"):
                    whole = _clipped(whole, rounded.dtype).astype(rounded.dtype)
            if rounded.tobytes() != whole.tobytes() and not np.array_equal(rounded, whole):
                raise Contradicted(f"{name}: not the parent's, rounded to {rounded.dtype}")
            return
        if np.any(step) and coarse(theirs, step):
            raise Contradicted(f"{name}: steps of its quantisation of more than a {_LEAST_STEPS}th of its largest weight")
        # The checkpoint's weight lies within half a step of either.
        far = _half_steps(mine, theirs, step + its_step + 2 * room)
        if not far <= 1:
            raise Contradicted(f"{name}: {far / 2:.3g} steps of its quantisation from the parent's; at most 0.5 is rounding")


def _half_room(weights: Array) -> Array | float:
    """Return what half precision may have changed of `weights`; 0 where they are in another one."""
    return HALF * np.abs(weights.astype(np.float64)) + TINY if weights.dtype.itemsize == 2 else 0.0


def _half_steps(mine: Array, theirs: Array, step: Array | float) -> float:
    """Return the largest difference of two arrays in half quantisation steps; rounding explains at most 1."""
    return float((np.abs(theirs.astype(np.float64) - mine) / (0.5 * step * (1 + ROOM) + 1e-12)).max())


def coarse(weights: Array, step: Array | float) -> bool:
    """Return whether a quantisation step is so large, compared with the weights that share it, that most weights are within half of it.

    `step` is one value, or has the shape of `weights` [..., N] and one value for each index of one axis.
    """
    steps = np.broadcast_to(np.asarray(step, np.float64), weights.shape)
    shared = tuple(axis for axis in range(steps.ndim) if not np.ptp(steps, axis=axis).any())
    largest = np.abs(weights).max(axis=shared, keepdims=True)
    return bool(((_LEAST_STEPS * steps > largest) & (largest > 0)).any())


def _clipped(array: Array, dtype: Any) -> Array:
    """Return values clipped to the range of float16, as casts of masks are."""
    if dtype != np.float16:
        return array
    largest = float(np.finfo(np.float16).max)
    return np.clip(array, -largest, largest)


def content(array: Array) -> tuple[int, bytes]:
    """Return a key that is equal for arrays with the same elements in the same order, whatever their shape."""
    flat = np.ascontiguousarray(array)
    return (flat.size, hashlib.sha256(flat.tobytes()).digest())
