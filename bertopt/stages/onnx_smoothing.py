"""Recognise SmoothQuant in an ONNX graph: it divides the output of a normalisation and multiplies the weights that read it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from bertopt.quantization.qdq import NORMS
from bertopt.stages.onnx_products import constant_of, through

if TYPE_CHECKING:
    from bertopt.core import Array

#: Relative tolerance for a division and a multiplication in float32, and in half precision.
_RELATIVE, _RELATIVE_HALF = 1e-6, 2**-8


def divisor(mine: Any, theirs: Any) -> Array | None:
    """Return what the channels [H] of a normalisation's output are divided by, judging by its weight and bias; None where the value is not
    such an output, or is not divided."""
    one, other = _norm(mine), _norm(theirs)
    if one is None or other is None or one.op_type != other.op_type:
        return None
    found: Array | None = None
    relative = 0.0
    for divided, whole in reversed(_affine(one, other)):
        if divided is None or whole is None or divided.shape != whole.shape:
            continue
        relative = _rounding(divided, whole)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = whole / divided
        # A channel whose weight is 0 is divided as its bias is; one whose bias is 0 too is not divided.
        found = np.where(divided != 0, ratio, np.ones_like(ratio) if found is None else found)
    exact = relative < _RELATIVE_HALF
    return None if found is None or ((found == 1).all() if exact else np.allclose(found, 1, rtol=relative)) else found


def multiplied_back(mine: Any, theirs: Any) -> tuple[Any, Any, Array] | None:
    """Return two normalisations and the factor [H] by which the first is divided relative to the second, where one value or both are such an
    output multiplied again, for its readers other than products; else None."""
    back, its = _factor(mine), _factor(theirs)
    if (back is None and its is None) or (back is None and _norm(mine) is None) or (its is None and _norm(theirs) is None):
        return None
    one = np.float32(1)
    values = (value if factor is None else value.producer().inputs[0] for value, factor in ((mine, back), (theirs, its)))
    return (*values, (one if back is None else back) / (one if its is None else its))


def _factor(value: Any) -> Array | None:
    """Return the factor [H] by which the output of a normalisation is multiplied, if `value` is such a product."""
    node = value.producer()
    if node is None or node.op_type != "Mul" or node.domain or _norm(node.inputs[0]) is None:
        return None
    return constant_of(node.inputs[1])


def is_divided(mine: Any, theirs: Any, by: Array) -> bool:
    """Return whether weight and bias of a normalisation are those of `theirs`, divided."""
    for divided, whole in _affine(mine, theirs):
        if divided is None or whole is None:
            if divided is not whole:
                return False
        elif divided.shape != whole.shape or not np.allclose(divided * by, whole, rtol=_rounding(divided, whole), atol=0):
            return False
    return True


def _rounding(*arrays: Array) -> float:
    return _RELATIVE_HALF if any(array.dtype.itemsize == 2 for array in arrays) else _RELATIVE


def _norm(value: Any) -> Any:
    """Return the normalisation whose first output a value is, or None."""
    value = through(value)
    node = value.producer()
    return node if node is not None and node.op_type in NORMS and value.index() == 0 else None


def _affine(one: Any, other: Any) -> list[tuple[Array | None, Array | None]]:
    """Return weight and bias of two normalisations of one kind, in pairs; None for one that is missing or not constant."""

    def held(node: Any, at: int) -> Array | None:
        return constant_of(through(node.inputs[at])) if len(node.inputs) > at and node.inputs[at] is not None else None

    return [(held(one, at), held(other, at)) for at in NORMS[one.op_type]]
