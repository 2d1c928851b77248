"""Compare a packed file with the checkpoint that it was made from: numbers and tables equal, weights rounded and no more.

The order of channels and what is folded into weights are taken from `packing`; that they are right is for outputs to show.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from bertopt_native import layout, packing, quantize
from bertopt_native.checkpoint import read
from bertopt_native.layout import Part, Stored, Tensor, Type
from bertopt_native.packing import Linear

#: A weight at the end of the range of INT8 may be beyond it: scales go down to this share of the largest weight.
_LEAST_SCALE = 0.7
#: What rounding in float32 adds to half a step.
_SLACK = 1e-4
#: Tables that packing computes by a matrix product, and how far, of their largest element, another BLAS may be off.
_COMPUTED, _PRODUCT_SLACK = (Tensor.DISTANCE_KEYS, Tensor.DISTANCE_QUERIES), 1e-6
#: How far another CPU's sines and cosines may be off, a position: its powers in float32, the frequencies, end in another digit.
_TURN_SLACK = 2**-22


def compare(
    path: str | os.PathLike[str], config: Mapping[str, Any], tensors: Mapping[str, Any], vocabulary_head: bool = False
) -> tuple[int, str | None]:
    """Return how many tensors of a packed file were compared with a checkpoint's, and the first difference, if any.

    `config`, `tensors` and `vocabulary_head` are as `pack` takes them. Tables, norms and biases must be equal (tables
    by distance, which are computed, to 1e-6 of the largest element, sines and cosines to what two CPUs compute); a bf16 weight
    the checkpoint's, rounded; an INT8 weight within half a step of its scale, or at the end of the range. Which products are in INT8 is not
    compared. Raises what `pack` raises, and `BadFile`.
    """
    sizes, stored = layout.read(Path(path))
    network = read(config, tensors, vocabulary_head)
    expected = packing.content(network, copies=False)
    if sizes.intermediate != expected.sizes.intermediate:
        expected = packing.content(network, copies=True)
    for name, value in asdict(expected.sizes).items():
        # The header's epsilon is a float32.
        said = getattr(sizes, name)
        if (np.float32(value) if isinstance(value, float) else value) != said:
            return 0, f"the file's {name} is {said}, the checkpoint's {value}"
    compared = 0
    for table in expected.tables:
        compared += 1
        found = stored.get((table.tensor, table.layer))
        if not _is_table(found, table):
            return compared, f"{layout.Tensor(table.tensor).name} of layer {table.layer} is not the checkpoint's"
    for product in expected.products:
        compared += 1
        if not _rounds(product, stored):
            return compared, f"{product.tensor.name} of layer {product.layer} is not the checkpoint's, rounded"
    return compared, None


def _is_table(found: Stored | None, expected: Stored) -> bool:
    if expected.tensor in _COMPUTED:
        return _near(found, expected.data, _PRODUCT_SLACK * np.abs(expected.data).max())
    if expected.tensor == Tensor.ROTARY:
        return _near(found, expected.data, _TURN_SLACK * np.repeat(np.arange(1, expected.rows + 1), expected.cols))
    return _equal(found, expected.data)


def _equal(found: Stored | None, data: Any) -> bool:
    flat = np.ascontiguousarray(data).reshape(-1)
    return found is not None and found.data.dtype == flat.dtype and np.array_equal(found.data, flat)


def _near(found: Stored | None, data: Any, room: Any) -> bool:
    flat = np.ascontiguousarray(data).reshape(-1)
    if found is None or found.data.dtype != flat.dtype or found.data.shape != flat.shape:
        return False
    return bool((np.abs(found.data - flat) <= room).all())


def _rounds(product: Linear, stored: Mapping[tuple[int, int], Stored]) -> bool:
    """Whether the weight, its scales and sums, and the bias are those of `product`."""
    weight, scale, sums, bias = (stored.get((product.tensor + part, product.layer)) for part in (Part.WEIGHT, Part.SCALE, Part.SUM, Part.BIAS))
    if weight is None or (weight.rows, weight.cols) != product.weight.shape or not _equal(bias, product.bias):
        return False
    if weight.type is Type.BF16:
        return np.array_equal(weight.data, layout.panels(quantize.to_bf16(product.weight), 2))
    if weight.type is not Type.INT8 or scale is None or sums is None or len(scale.data) != weight.rows:
        return False
    q, step = layout.from_panels(weight.data, weight.rows, weight.cols, 4), scale.data[:, None]
    half = step * np.float32(0.5 + _SLACK)
    largest = np.abs(product.weight).max(axis=1, keepdims=True)
    inside = np.abs(product.weight - q * step) <= half
    beyond = (np.abs(q) == 127) & (product.weight * np.sign(q) > 127 * step)
    # A scale that is too large would let any weight be within half a step.
    range_ = step * np.float32(127)
    fitting = (range_ * np.float32(1 + _SLACK) >= np.float32(_LEAST_SCALE) * largest) & (range_ * np.float32(1 - _SLACK) <= largest)
    fitting |= (largest == 0) & (step > 0)
    return bool((inside | beyond).all() and fitting.all() and np.array_equal(sums.data, q.sum(axis=1, dtype=np.int64)))
