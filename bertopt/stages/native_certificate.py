"""Certify a file of the native encoder: its weights are the parent's, rounded to their format, and its task head is the parent's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from bertopt.core import Eager, Native
from bertopt.modeling.float_head import FILE, FloatHead, plain
from bertopt.results.fidelity import Certificate
from bertopt.system import native_import

if TYPE_CHECKING:
    from bertopt.core import Array

    #: Between which values weights lie.
    Span = tuple[Array, Array]

#: The number of the tensor that holds the biases of a feed-forward layer's neurons: FFN_IN + BIAS.
_FFN_IN_BIAS = 31
#: How far, relative to their largest element, tables may be off that two CPUs computed: sines, cosines, products of positions.
_COMPUTED = 1e-5
#: A weight at the end of the range of INT8 may be beyond it: scales go down to this share of the largest weight.
_LEAST_SCALE = 0.7
#: What rounding in float32 adds to half a step, and the largest change by rounding to bf16, relative.
_SLACK, _BF16 = 1e-4, 2**-8


def certify(model: Native, parent: Eager) -> Certificate:
    """Return `certified` where every table, bias and norm is the parent's, bit for bit, and every weight of a product is rounded to bf16 or
    within half a step of INT8; otherwise `contradicted`.

    Not seen: the order of channels, which shows in the outputs, and what the encoder does with the file.
    """
    module = native_import.native()
    config, tensors, after_pooling = plain(parent.network)
    with native_import.native_errors(module):
        compared, difference = module.compare(model.path, config, tensors, vocabulary_head=model.spec.over_vocabulary)
    if difference is None:
        expected, path = FloatHead.of(model.spec, {**tensors, **after_pooling}, config), model.path.with_name(FILE)
        found = FloatHead.read(path) if path.exists() else None
        compared += len(expected.tensors) if expected is not None else 0
        if not _equal(found, expected):
            difference = f"the task head in '{FILE}' is not the checkpoint's"
    if difference is not None:
        return Certificate(status="contradicted", reason=difference, weights=compared)
    return Certificate(status="certified", reason="every weight is the checkpoint's, equal or rounded to its format", weights=compared)


def _equal(found: FloatHead | None, expected: FloatHead | None) -> bool:
    if found is None or expected is None:
        return found is expected
    same = found.steps == expected.steps and found.tensors.keys() == expected.tensors.keys()
    return same and all(np.array_equal(found.tensors[name], tensor) for name, tensor in expected.tensors.items())


def certify_beside(model: Native, baseline: Native) -> Certificate:
    """Return `certified` where two files can be of one checkpoint: numbers, tables, norms, biases and task heads are equal, weights in bf16 are
    equal, and each INT8 weight is within half a step of what the other file may have rounded; else `contradicted`.

    Neurons of the feed-forward layers that one of them repeats, as packing does for INT8, are added up; `none` where these are gated, whose
    weights are then not compared.
    """
    module = native_import.native()
    with native_import.native_errors(module):
        (mine, tensors), (theirs, others) = _read(model), _read(baseline)
    sizes = {name: value for name, value in asdict(mine).items() if name != "intermediate"}
    difference = next((f"{name} is {value}, the parent's {getattr(theirs, name)}" for name, value in sizes.items() if value != getattr(theirs, name)), None)
    repeated, compared = mine.intermediate != theirs.intermediate, 0
    differences = [] if difference is not None else [_differences(tensors, others, repeated)]
    if differences and repeated and not mine.gated:
        differences += [_of_neurons(tensors, others, layer, min(mine.intermediate, theirs.intermediate)) for layer in range(mine.stored_layers)]
    for name in chain.from_iterable(differences):
        compared += 1
        if name is not None:
            difference = f"{name} cannot be the parent's, rounded"
            break
    paths = (model.path.with_name(FILE), baseline.path.with_name(FILE))
    if difference is None and not _equal(*(FloatHead.read(path) if path.exists() else None for path in paths)):
        difference = f"the task head in '{FILE}' is not the parent's"
    if difference is not None:
        return Certificate(status="contradicted", reason=difference, weights=compared)
    if repeated and mine.gated:
        reason = "one of the files repeats neurons of the feed-forward layers, whose weights were not compared; all others agree"
        return Certificate(status="none", reason=reason, weights=compared)
    return Certificate(status="certified", reason="every weight can be the parent's, equal or rounded to its format", weights=compared)


def _read(model: Native) -> Any:
    from bertopt_native import layout

    return layout.read(model.path)


def _differences(mine: Any, theirs: Any, repeated: bool) -> Iterator[str | None]:
    """Yield for each tensor of either file None where the two agree, else its name; without feed-forward weights if neurons are `repeated`."""
    from bertopt_native.layout import PRODUCTS, Part, Tensor, Type

    computed = (Tensor.ROTARY, Tensor.DISTANCE_KEYS, Tensor.DISTANCE_QUERIES)
    neurons = (Tensor.FFN_IN, Tensor.FFN_OUT)
    parts = {number + part: (number, part) for number in PRODUCTS for part in Part}
    for number, layer in sorted(mine.keys() | theirs.keys()):
        product, part = parts.get(number, (Tensor(number) if number not in parts else None, None))
        if repeated and product in neurons and not (product == Tensor.FFN_OUT and part == Part.BIAS):
            continue
        one, other = mine.get((number, layer)), theirs.get((number, layer))
        name = f"{product.name}{f' ({part.name})' if part else ''} of layer {layer}"
        if part in (Part.SCALE, Part.SUM):  # only INT8 has these: `_spans` reads them with the weight
            continue
        if one is None or other is None or (one.rows, one.cols) != (other.rows, other.cols):
            yield name
        elif part == Part.WEIGHT:
            rounded_alike = one.type == other.type == Type.BF16
            agree = np.array_equal(one.data, other.data) if rounded_alike else _meet(_span(mine, number, layer), _span(theirs, number, layer))
            yield None if agree else name
        elif number in computed:
            room = _COMPUTED * np.abs(other.data).max(initial=0.0)
            yield None if (np.abs(one.data - other.data) <= room).all() else name
        else:
            yield None if np.array_equal(one.data, other.data) else name


def _of_neurons(mine: Any, theirs: Any, layer: int, neurons: int) -> Iterator[str | None]:
    """Yield for both products of a feed-forward layer None where they agree once repeated neurons are added up, else the product's name."""
    one, other = (_added_up(tensors, layer, neurons) for tensors in (mine, theirs))
    for product, name in enumerate(("FFN_IN", "FFN_OUT")):
        agree = one is not None and other is not None and _meet(one[product], other[product])
        if agree and not product:
            agree = np.array_equal(*(tensors[_FFN_IN_BIAS, layer].data[:neurons] for tensors in (mine, theirs)))
        yield None if agree else f"{name} of layer {layer}"


def _added_up(tensors: Any, layer: int, neurons: int) -> tuple[Span, Span] | None:
    """Return the spans of both products for the first `neurons`, to which their repetitions behind them are added; None where one of these is
    no repetition."""
    from bertopt_native.layout import Tensor

    before, after = (_span(tensors, product, layer) for product in (Tensor.FFN_IN, Tensor.FFN_OUT))
    if before is None or after is None:
        return None
    bias, (low, high) = tensors[_FFN_IN_BIAS, layer].data, (each.copy() for each in after)
    for again in range(neurons, len(bias)):
        same = np.flatnonzero((before[0][:neurons] == before[0][again]).all(axis=1) & (bias[:neurons] == bias[again]))
        if same.size:
            low[:, same[0]] += low[:, again]
            high[:, same[0]] += high[:, again]
        elif bias[again] or not ((before[0][again] <= 0) & (before[1][again] >= 0)).all():
            return None
    return (before[0][:neurons], before[1][:neurons]), (low[:, :neurons], high[:, :neurons])


def _span(tensors: Any, number: int, layer: int) -> Span | None:
    """Return between which values [N, K] the checkpoint's weights lie, by those in the file; None where the file contradicts itself."""
    from bertopt_native import layout
    from bertopt_native.layout import Part, Type

    weight = tensors[number, layer]
    if weight.type is Type.BF16:
        bits = layout.from_panels(weight.data, weight.rows, weight.cols, 2)
        values = (bits.astype(np.uint32) << 16).view(np.float32)
        return values - _BF16 * np.abs(values), values + _BF16 * np.abs(values)
    scale, sums = (tensors.get((number + part, layer)) for part in (Part.SCALE, Part.SUM))
    whole = layout.from_panels(weight.data, weight.rows, weight.cols, 4)
    if scale is None or sums is None or not np.array_equal(sums.data, whole.sum(axis=1, dtype=np.int64)):
        return None
    step = scale.data[:, None]
    beyond = step * np.float32(127 / _LEAST_SCALE)
    low, high = ((whole + side * (0.5 + _SLACK)) * step for side in (-1, 1))
    return np.where(whole == -127, -beyond, low), np.where(whole == 127, beyond, high)


def _meet(one: Span | None, other: Span | None) -> bool:
    if one is None or other is None:
        return False
    return bool((one[0] <= other[1]).all() and (other[0] <= one[1]).all())
