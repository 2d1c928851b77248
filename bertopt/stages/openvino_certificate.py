"""Certify an OpenVINO graph: its weights are the ONNX graph's, bit for bit or within half a step of INT8."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bertopt.core import Eager, Onnx, OpenVino
from bertopt.results.fidelity import Certificate, contradiction
from bertopt.stages.onnx_certificate import HALF, ROOM, SMALL, TINY, coarse, content
from bertopt.system import openvino_import

if TYPE_CHECKING:
    from bertopt.core import Array

#: Relative tolerance for two roundings in float32, of a quotient and of the product that undoes it.
_FLOAT = 2**-22
#: In the names of the multiplications that NNCF inserts for SmoothQuant; the weights of the product were multiplied by the inverse.
_SMOOTH = "nncf_smooth_quant"


def certify(model: OpenVino, parent: Onnx) -> Certificate:
    """Return `certified` where every large floating-point constant is one of the ONNX graph's, transposed or not, and every INT8 weight is
    within half a step of one, apart from SmoothQuant's factors.

    `contradicted` where INT8 weights match none of the graph's weights of that shape. Operators and scales of activations are not compared.
    """
    weights = _Weights(parent)
    graph = openvino_import.openvino().Core().read_model(model.path)
    compared, unknown = 0, ""
    for node in graph.get_ops():
        kind = node.get_output_element_type(0).to_string() if node.get_type_name() == "Constant" else ""
        if kind in ("i8", "u8"):
            compared += 1
            user, found = _stored(node, weights)
            if found is False:
                reason = f"the INT8 weights of '{user}' are further than half a step from the ONNX graph's"
                return Certificate(status="contradicted", reason=reason, weights=compared)
            if found is None:
                unknown = unknown or f"the INT8 weights of '{user}' have no counterpart in the ONNX graph"
        elif kind.startswith(("f", "bf")) and not _of_quantisation(node):
            array = data(node)
            if array.size > SMALL:
                compared += 1
                if content(array) not in weights.contents and not _divided(node, array, weights):
                    unknown = unknown or f"the constant '{node.get_friendly_name()}' is none of the ONNX graph's"
    if unknown:
        return Certificate(status="none", reason=unknown, weights=compared)
    how = "bit for bit" if model.precision != "int8" else "equal or within half a step of INT8"
    return Certificate(status="certified", reason=f"every weight is the ONNX graph's, {how}; operators are not compared", weights=compared)


def certify_by_rows(model: OpenVino, checkpoint: Eager) -> Certificate:
    """Return `contradicted` where a graph of reduced precision has a matrix of which some rows or columns are not the checkpoint's, rounded,
    and at least half are.

    Nothing is certified: passes between the two may have folded one weight into another, which changes all of its rows.
    """
    tables: dict[tuple[int, ...], list[Array]] = {}
    for tensor in checkpoint.network.parameters():
        if tensor.dim() == 2:
            array: Array = tensor.detach().float().numpy()
            for each in (array, array.T):
                tables.setdefault(each.shape, []).append(each)
    graph = openvino_import.openvino().Core().read_model(model.path)
    compared = 0
    for node in graph.get_ops():
        kind = node.get_output_element_type(0).to_string() if node.get_type_name() == "Constant" else ""
        if len(node.get_output_shape(0) if kind else ()) != 2:
            continue
        reads = _dequantised(node) if kind in ("i8", "u8") else []
        found = [(read.user, read.weights, read.room) for read in reads]
        if kind.startswith(("f", "bf")) and not _of_quantisation(node):
            array = data(node)
            found = [(user, array * (moved := smoothed_by(user)), HALF * np.abs(array * moved) + TINY) for user in _users(node)]
        for user, array, room in found:
            candidates = tables.get(array.shape, [])
            compared += bool(candidates)
            if 0.5 <= max((_alike(array, each, room) for each in candidates), default=0.0) < 1:
                reason = f"rows of the weights of '{user.get_friendly_name()}' are not the checkpoint's, rounded"
                return Certificate(status=contradiction(model.precision), reason=reason, weights=compared)
    reason = "no weights differ from the checkpoint's in some rows alone; what passes between the two changed is not known"
    return Certificate(status="none", reason=reason, weights=compared)


def _alike(mine: Array, theirs: Array, room: Array) -> float:
    """Return the share of rows, or of columns if that is larger, in which two matrices differ by no more than `room`."""
    near = np.abs(mine - theirs) <= room
    return max(float(near.all(axis=axis).mean()) for axis in (0, 1))


class _Weights:
    """The floating initialisers of an ONNX graph: their contents, those of each shape, and those of each node by its name."""

    def __init__(self, model: Onnx) -> None:
        import onnx_ir as ir

        graph = ir.load(model.path).graph
        self.contents: set[Any] = set()
        self.by_shape: dict[tuple[int, ...], list[Array]] = {}
        self.by_node: dict[str, list[Array]] = {}
        for value in graph.initializers.values():
            if not value.dtype.is_floating_point():
                continue
            array: Array = value.const_value.numpy().astype(np.float32)
            forms = [array, *([array.T] if array.ndim == 2 else [])]
            self.contents |= {content(each) for each in forms}
            for each in forms:
                self.by_shape.setdefault(each.shape, []).append(each)
            for node, _ in value.uses():
                self.by_node.setdefault(node.name or "", []).extend(forms)

    def of(self, node: Any, shape: tuple[int, ...]) -> list[Array]:
        """Return the weights of `shape` that the ONNX node of the same name reads, or of any node where none has its name."""
        own = [each for each in self.by_node.get(node.get_friendly_name(), []) if each.shape == shape]
        return own or self.by_shape.get(shape, [])


class _Read(NamedTuple):
    """INT8 weights as an operator reads them: in float32, what rounding may change of them, their step, and what SmoothQuant
    multiplies the operator's other input by."""

    user: Any
    weights: Array
    room: Array
    step: Array
    moved: Array


def _dequantised(node: Any) -> list[_Read]:
    """Return INT8 weights for each operator that reads them; none where they are scaled otherwise than NNCF does."""
    values = data(node)
    zero: Array | None = np.zeros((), np.float32)
    scaled = _only_user(_only_user(node, "Convert"))
    if scaled is not None and scaled.get_type_name() == "Subtract":
        zero = constant(scaled, 1)
        scaled = _only_user(scaled)
    step = None if scaled is None else constant(scaled, 1)
    if scaled is None or scaled.get_type_name() != "Multiply" or step is None or zero is None:
        return []
    found = []
    for user in _users(scaled):
        # SmoothQuant divided the weights by the factor of the product's input.
        moved = smoothed_by(user)
        room = 0.5 * (1 + ROOM) * np.abs(step * moved) + 1e-12
        found.append(_Read(user, (values - zero) * step * moved, room, step, moved))
    return found


def _stored(node: Any, weights: _Weights) -> tuple[str, bool | None]:
    """Return the name of the node that reads INT8 weights, and whether they are the ONNX graph's within half a step; None where the graph
    has none of their shape."""
    name, right = node.get_friendly_name(), None
    for read in _dequantised(node):
        name = read.user.get_friendly_name()
        candidates = weights.of(read.user, read.weights.shape)
        if not candidates:
            return name, None
        near = (bool((np.abs(read.weights - each) <= read.room).all()) and not coarse(each / read.moved, read.step) for each in candidates)
        if not any(near):
            return name, False
        right = True
    return name, right


def _divided(node: Any, array: Array, weights: _Weights) -> bool:
    """Return whether float weights are the ONNX graph's, divided by SmoothQuant's factor of the inputs of all products that read them."""
    factors = [(smoothed_by(user), weights.of(user, array.shape)) for user in _users(node)]
    return bool(factors) and all(
        factor.ndim > 0 and any(np.allclose(array * factor, each, rtol=_FLOAT, atol=0) for each in found) for factor, found in factors
    )


def smoothed_by(product: Any) -> Array:
    """Return SmoothQuant's factor of a product's input, in a shape to multiply weights [K, N] or [N, K] by; 1 if there is none."""
    one = np.ones((), np.float32)
    if product.get_type_name() != "MatMul":
        return one
    source = product.input_value(0).get_node()
    if source.get_type_name() == "FakeQuantize":
        source = source.input_value(0).get_node()
    factor = constant(source, 1) if is_smoothing(source) else None
    if factor is None:
        return one
    transposed = product.get_attributes()["transpose_b"]
    return factor.reshape((1, -1) if transposed else (-1, 1)) if factor.size > 1 else factor.reshape(())


def is_smoothing(node: Any) -> bool:
    """Return whether an operator multiplies activations by SmoothQuant's factor."""
    return node.get_type_name() == "Multiply" and _SMOOTH in node.get_friendly_name()


def _of_quantisation(node: Any) -> bool:
    """Whether a constant is a scale of weights, of SmoothQuant, or a bound of a range."""
    for user in _users(node):
        kind, source = user.get_type_name(), user.input_value(0).get_node()
        of_weights = kind in ("Multiply", "Subtract") and source.get_type_name() in ("Convert", "Subtract")
        if not (kind == "FakeQuantize" or of_weights or is_smoothing(user)):
            return False
    return True


def constant(node: Any, port: int) -> Array | None:
    """Return the values of an input that is a constant, in float32; None where it is none."""
    if port >= len(node.inputs()):
        return None
    source = node.input_value(port).get_node()
    if source.get_type_name() == "Convert":
        source = source.input_value(0).get_node()
    return data(source) if source.get_type_name() == "Constant" else None


def data(node: Any) -> Array:
    return np.asarray(node.get_data() if hasattr(node, "get_data") else node.data, np.float32)


def _users(node: Any) -> list[Any]:
    return [target.get_node() for target in node.output(0).get_target_inputs()]


def _only_user(node: Any, kind: str | None = None) -> Any:
    """Return the only operator that reads a node, if it is of `kind` (if given); None where there are none or several."""
    users = [] if node is None else _users(node)
    return users[0] if len(users) == 1 and kind in (None, users[0].get_type_name()) else None
