"""Certify an OpenVINO graph against another one of the same checkpoint: the same operators, whose weights are equal or rounded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bertopt.core import OpenVino
from bertopt.results.fidelity import Certificate
from bertopt.stages.onnx_certificate import HALF, ROOM, TINY, Contradicted, Differs, coarse, concluded, other_range
from bertopt.stages.openvino_certificate import constant, data, is_smoothing, smoothed_by
from bertopt.system import openvino_import

if TYPE_CHECKING:
    from bertopt.core import Array

#: Attributes that an operator computes with, and no conversion changes.
_NUMBERS = ("eps", "epsilon", "approximation_mode")
#: Relative tolerance for float32 weights that SmoothQuant divided, and that are multiplied back here.
_FLOAT = 2**-21


class _Stored(NamedTuple):
    """A constant as operators read it, how far its rounding may have moved it, its INT8 step on disk (0 where it is in floats), and what
    SmoothQuant divided it by there."""

    values: Array
    room: Array | float
    step: Array | float
    factor: Array | float = 1.0


def certify(model: OpenVino, baseline: OpenVino, same_build: bool = False) -> Certificate:
    """Return `certified` where both graphs have the same operators, apart from quantisation, and every constant of one can be the other's:
    equal, or both within half a step of one weight, SmoothQuant's factors included.

    `contradicted` where a constant cannot be, or an operator computes with another number; `none` for other operators, except where both are
    of the `same_build`. Ranges of activations, which come from calibration, are compared only there.
    """
    core = openvino_import.openvino().Core()
    mine, theirs = (core.read_model(each.path) for each in (model, baseline))
    walk = _Walk()

    def compare() -> None:
        if len(mine.outputs) != len(theirs.outputs):
            raise Differs(f"{len(mine.outputs)} outputs instead of {len(theirs.outputs)}")
        for one, other in zip(mine.outputs, theirs.outputs, strict=True):
            if one.get_names() != other.get_names():
                raise Differs("outputs have other names")
            walk.equal(one.get_node().input_value(0), other.get_node().input_value(0))
        if same_build and (name := other_range(*(_ranges(graph) for graph in (mine, theirs)))) is not None:
            raise Contradicted(f"the range of activations of '{name}' is not the parent's")

    found = concluded(compare, model, baseline, same_build, "the parent's operators, every weight equal or rounded")
    return found.model_copy(update={"weights": walk.weights})


def _ranges(graph: Any) -> dict[str, list[Array]]:
    """Return the range to which each value is quantised, by the operator's name."""
    nodes = (node for node in graph.get_ops() if node.get_type_name() == "FakeQuantize")
    return {node.get_friendly_name(): [value for port in (1, 2) if (value := constant(node, port)) is not None] for node in nodes}


class _Walk:
    """One walk over two graphs, from their outputs to their inputs."""

    def __init__(self) -> None:
        self.met: set[tuple[Any, Any]] = set()
        self.weights = 0

    def equal(self, mine: Any, theirs: Any) -> None:
        """Follow two values back until both are inputs, constants, or met before. Raises Differs, Contradicted."""
        waiting = [(mine, theirs)]
        while waiting:
            one, other = map(_through, waiting.pop())
            key = _place(one), _place(other)
            if key not in self.met:
                self.met.add(key)
                waiting += self._step(one, other)

    def _step(self, mine: Any, theirs: Any) -> list[tuple[Any, Any]]:
        first, second = _stored(mine), _stored(theirs)
        one, other = mine.get_node(), theirs.get_node()
        if first is not None or second is not None:
            if first is None or second is None:
                raise Differs(f"'{(other if first is None else one).get_friendly_name()}' is a constant in one of the graphs alone")
            self._constants(one.get_friendly_name(), first, second)
            return []
        kind = one.get_type_name()
        if kind != other.get_type_name() or one.get_input_size() != other.get_input_size() or mine.get_index() != theirs.get_index():
            raise Differs(f"{kind} '{one.get_friendly_name()}' stands where the parent has {other.get_type_name()} '{other.get_friendly_name()}'")
        if kind == "Parameter" and mine.get_names() != theirs.get_names():
            raise Differs(f"input '{mine.get_any_name()}' is read where the parent reads '{theirs.get_any_name()}'")
        self._attributes(one, other)
        pairs = list(zip(one.input_values(), other.input_values(), strict=True))
        if kind == "MatMul" and (weights := _weights(one)) is not None and (others := _weights(other)) is not None:
            self._constants(one.get_friendly_name(), weights, others)
            return [(_unsmoothed(one), _unsmoothed(other))]
        return pairs

    def _attributes(self, one: Any, other: Any) -> None:
        before = other.get_attributes()
        for name, value in one.get_attributes().items():
            if value != before.get(name):
                where = f"{name} of {one.get_type_name()} '{one.get_friendly_name()}' is {value}, the parent's {before.get(name)}"
                raise (Contradicted if name in _NUMBERS else Differs)(where)

    def _constants(self, name: str, mine: _Stored, theirs: _Stored) -> None:
        self.weights += 1
        if mine.values.shape != theirs.values.shape:
            raise Contradicted(f"'{name}': shape {list(mine.values.shape)}; the parent's {list(theirs.values.shape)}")
        if np.any(mine.step) and coarse(theirs.values / mine.factor, mine.step):
            raise Contradicted(f"'{name}': steps of its quantisation are too large for its weights")
        with np.errstate(invalid="ignore"):
            near = (np.abs(mine.values - theirs.values) <= mine.room + theirs.room) | (mine.values == theirs.values)
        if not near.all():
            raise Contradicted(f"'{name}' cannot be the parent's, rounded")


def _place(value: Any) -> tuple[str, int]:
    return value.get_node().get_friendly_name(), value.get_index()


def _through(value: Any) -> Any:
    """Return the value before it was quantised, or cast from one floating type to another."""
    while True:
        node = value.get_node()
        if node.get_type_name() == "FakeQuantize":
            _check_range(node)
        elif node.get_type_name() != "Convert" or not all(each.get_element_type().is_real() for each in (node.input_value(0), value)):
            return value
        if node.input_value(0).get_node().get_type_name() == "Constant":
            return value
        value = node.input_value(0)


def _check_range(node: Any) -> None:
    """Raise Contradicted where quantised activations are multiplied by another scale than they were divided by."""
    for taken, given in ((1, 3), (2, 4)):
        low, high = constant(node, taken), constant(node, given)
        if low is not None and high is not None and not np.array_equal(low, high):
            raise Contradicted(f"'{node.get_friendly_name()}' gives another range of activations than it takes")


def _stored(value: Any) -> _Stored | None:
    """Return a constant, or one that is dequantised; None for any other value."""
    node = value.get_node()
    kind = node.get_type_name()
    if kind == "Constant":
        values, stored_in = data(node), node.get_output_element_type(0)
        return _Stored(values, HALF * np.abs(values) + TINY if stored_in.is_real() and stored_in.size == 2 else 0.0, 0.0)
    if kind == "Convert":
        return _stored(node.input_value(0))
    if kind != "Multiply":
        return None
    zero: Array | None = np.zeros((), np.float32)
    whole, step = node.input_value(0).get_node(), constant(node, 1)
    if whole.get_type_name() == "Subtract":
        zero, whole = constant(whole, 1), whole.input_value(0).get_node()
    source = whole.input_value(0).get_node() if whole.get_type_name() == "Convert" else None
    if step is None or zero is None or source is None or source.get_type_name() != "Constant" or source.get_output_element_type(0).is_real():
        return None
    values = data(source)
    return _Stored((values - zero) * step, 0.5 * (1 + ROOM) * np.abs(step) + 1e-12, np.broadcast_to(step, values.shape))


def _weights(product: Any) -> _Stored | None:
    """Return the weights of a product, with SmoothQuant's factor of its other input multiplied back."""
    found, factor = _stored(product.input_value(1)), smoothed_by(product)
    if found is None or found.values.ndim != 2:
        return None
    if factor.ndim == 0 and factor == 1:
        return found
    values = found.values * factor
    return _Stored(values, found.room * factor + _FLOAT * np.abs(values), found.step, factor)


def _unsmoothed(product: Any) -> Any:
    """Return a product's first input before SmoothQuant divided it."""
    value = _through(product.input_value(0))
    node = value.get_node()
    return node.input_value(0) if is_smoothing(node) else value
