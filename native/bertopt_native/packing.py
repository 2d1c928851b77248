"""Pack a checkpoint into the file that `Encoder` opens."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bertopt_native import distances, families, layout, quantize
from bertopt_native.checkpoint import Network, read
from bertopt_native.distances import Distances
from bertopt_native.errors import Unsupported
from bertopt_native.layout import Part, Sizes, Stored, Tensor, Type

Precision = Literal["int8", "bf16"]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Linear:
    """A linear product in float32: `weight` [N, K], `bias` [N]."""

    tensor: Tensor
    layer: int
    weight: Floats
    bias: Floats


@dataclass(frozen=True)
class Content:
    """What a packed file holds before anything is rounded: its numbers, tables as they are stored, and products, which are
    made one at a time and can be asked for once."""

    sizes: Sizes
    tables: list[Stored]
    products: Iterator[Linear]


PRODUCTS: Mapping[str, Tensor] = {
    "qkv": Tensor.QKV,
    "attention_out": Tensor.ATTENTION_OUT,
    "ffn_in": Tensor.FFN_IN,
    "ffn_out": Tensor.FFN_OUT,
}
#: What `keep_bf16` calls the head over the vocabulary, and its products.
HEAD = "head"
HEAD_PRODUCTS: Mapping[str, Tensor] = {"dense": Tensor.HEAD_DENSE, "decoder": Tensor.DECODER}
#: A weight is far beyond the others of its row from this many times their root mean square; and how often a neuron is there.
_FAR, _MOST_COPIES = 10, 4
_ACTIVATIONS = ("gelu_erf", "gelu_tanh", "relu", "silu")
_LANES = layout.PANEL // 2


def _up(n: int) -> int:
    return -(-n // layout.PANEL) * layout.PANEL


def _bf16_products(keep: Iterable[int | str], network: Network) -> set[tuple[int, Tensor]]:
    """Return (stored layer, product) of what stays bf16: `keep` has layers, or 'layer.product'; the head counts as a layer."""
    out: set[tuple[int, Tensor]] = set()
    layers = len(network.layer_map)
    for item in keep:
        layer, _, product = str(item).partition(".")
        products = HEAD_PRODUCTS if layer == HEAD and network.head_activation else PRODUCTS
        known = (products is HEAD_PRODUCTS or (layer.isdecimal() and int(layer) < layers)) and (not product or product in products)
        if not known or isinstance(item, bool):
            raise ValueError(
                f"keep_bf16 must have layers from 0 to {layers - 1} or 'layer.product' with a product of {list(PRODUCTS)}; got {item!r}"
            )
        stored = 0 if products is HEAD_PRODUCTS else network.layer_map[int(layer)]
        out |= {(stored, products[name]) for name in ([product] if product else products)}
    return out


def _qkv(network: Network, layer: int, head: int, stride: int) -> tuple[Floats, Floats]:
    """Return weight and bias of query, key and value, head by head, heads padded with zeros to `stride`."""
    factor = distances.factor(head, network.distances)
    parts = []
    for name in ("query", "key", "value"):
        w, b = (network.tensors[f"layers.{layer}.{name}.{part}"] for part in ("weight", "bias"))
        both = np.concatenate([w, b[:, None]], 1).reshape(network.heads, head, -1)
        both = both * factor if name == "query" else both
        if not network.angles or name == "value":
            parts.append(np.pad(both, ((0, 0), (0, stride - head), (0, 0))))
        else:  # what is turned together lies in one panel
            low, high = (np.pad(half, ((0, 0), (0, (stride - head) // 2), (0, 0))) for half in np.split(both, 2, axis=1))
            parts.append(_interleaved(low, high, axis=1))
    rows = np.stack(parts, 1).reshape(3 * network.heads * stride, -1)
    return np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, -1])


def _interleaved(low: Floats, high: Floats, axis: int = 0) -> Floats:
    """Return panels of sixteen entries of `low` and sixteen of `high`, one after the other."""
    shape = (*low.shape[:axis], low.shape[axis] // _LANES, _LANES, *low.shape[axis + 1 :])
    both = np.stack([low.reshape(shape), high.reshape(shape)], axis + 1)
    return both.reshape(*low.shape[:axis], 2 * low.shape[axis], *low.shape[axis + 1 :])


def _copies(ffn_out: Floats) -> NDArray[np.int64]:
    """Return which inputs [n] of `ffn_out` [H, K] to have again, one entry a copy, at most a panel of them.

    A weight far beyond the others of its row takes the 8 bits of all of them: in most networks a few neurons, which the
    first token sets off, have one. Such a neuron is computed several times and its weights are divided.
    """
    ratio = (np.abs(ffn_out) / np.sqrt((ffn_out**2).mean(1, keepdims=True) + np.float32(1e-30))).max(0)
    again = np.minimum(np.ceil(ratio / _FAR).astype(np.int64), _MOST_COPIES) - 1
    far = np.argsort(-ratio, kind="stable")[: layout.PANEL]
    return np.repeat(far, np.maximum(again[far], 0))[: layout.PANEL]


def _divided(ffn_in: Sequence[Floats], ffn_out: Floats, copies: NDArray[np.int64]) -> tuple[list[Floats], Floats]:
    """Return weights and biases of the first product and the weight of the second with `copies` of neurons behind the others."""
    counts = 1 + np.bincount(copies, minlength=ffn_out.shape[1])
    shared = ffn_out / counts.astype(np.float32)
    return [np.concatenate([part, part[copies]]) for part in ffn_in], np.concatenate([shared, shared[:, copies]], 1)


def _products(
    network: Network, layer: int, head: int, stride: int, inner: int
) -> dict[str, tuple[Floats, Floats]]:
    """Return weight [N, K] and bias [N] of a layer's four products, padded with zeros."""
    t = {
        name: network.tensors[f"layers.{layer}.{name}"]
        for name in (f"{p}.{q}" for p in network.products[3:] for q in ("weight", "bias"))
    }
    out = t["attention_out.weight"]
    spread = np.pad(out.reshape(len(out), network.heads, head), ((0, 0), (0, 0), (0, stride - head)))
    gated = [families.GATED] if families.GATED in network.products else []
    ffn_in, ffn_out = [t[f"{name}.{part}"] for name in ("ffn_in", *gated) for part in ("weight", "bias")], t["ffn_out.weight"]
    if inner - ffn_out.shape[1] >= layout.PANEL:
        ffn_in, ffn_out = _divided(ffn_in, ffn_out, _copies(ffn_out))
    more = inner - ffn_out.shape[1]
    ffn_in = [np.pad(part, ((0, more), *[(0, 0)] * (part.ndim - 1))) for part in ffn_in]
    weight, bias = map(_interleaved, ffn_in[:2], ffn_in[2:]) if gated else ffn_in
    return {
        "qkv": _qkv(network, layer, head, stride),
        "attention_out": (spread.reshape(len(out), -1), t["attention_out.bias"]),
        "ffn_in": (weight, bias),
        "ffn_out": (np.pad(ffn_out, ((0, 0), (0, more))), t["ffn_out.bias"]),
    }


def _rounded(product: Linear, int8: bool) -> list[Stored]:
    """Return the tensors of one product."""
    (n, k), tensor, layer = product.weight.shape, product.tensor, product.layer
    vectors = {Part.BIAS: product.bias}
    if int8:
        q, vectors[Part.SCALE] = quantize.to_int8(product.weight)
        vectors[Part.SUM] = q.sum(1, dtype=np.int64).astype(np.float32)
        stored = [Stored(tensor, layer, Type.INT8, n, k, layout.panels(q, 4))]
    else:
        stored = [Stored(tensor, layer, Type.BF16, n, k, layout.panels(quantize.to_bf16(product.weight), 2))]
    return stored + [Stored(tensor + part, layer, Type.F32, 1, n, v.astype(np.float32)) for part, v in vectors.items()]


def _table(tensor: Tensor, values: Floats, number: int = 0) -> Stored:
    rows, cols = values.shape
    return Stored(tensor, number, Type.F32, rows, cols, values)


def _vector(tensor: Tensor, values: Floats, layer: int = 0) -> Stored:
    return Stored(tensor, layer, Type.F32, 1, len(values), values)


def _whole_numbers(tensor: Tensor, values: Sequence[int] | NDArray[Any]) -> Stored:
    return Stored(tensor, 0, Type.U32, 1, len(values), np.array(values, np.uint32))


def content(network: Network, copies: bool) -> Content:
    """Return what the file of a network holds, with `copies` of neurons that have a far weight.

    Raises `Unsupported` for sizes that the library does not run.
    """
    sizes = _sizes(network, copies)
    return Content(sizes, _tables(network, sizes), _linear(network, sizes.head_size, sizes.head_stride, sizes.intermediate))


def _sizes(network: Network, copies: bool) -> Sizes:
    t = network.tensors
    hidden, width = len(t["layers.0.attention_norm.bias"]), len(t["embeddings.norm.bias"])
    head = hidden // network.heads
    if head > 1024:
        raise Unsupported(f"head size must be at most 1024; got {head}: use another runtime")
    stride, inner = _up(head), _up(len(t["layers.0.ffn_in.bias"]))
    if copies and any(len(_copies(t[f"layers.{i}.ffn_out.weight"])) for i in set(network.layer_map)):
        inner += layout.PANEL
    widths = {"hidden size": hidden, "embedding size": width, "intermediate size": inner, "heads times head size, padded,": network.heads * stride}
    for name, size in widths.items():
        if size % layout.PANEL:
            raise Unsupported(f"{name} must be a multiple of {layout.PANEL}; got {size}: use another runtime")
        if size > layout.WIDEST:
            raise Unsupported(f"{name} must be at most {layout.WIDEST}; got {size}: use another runtime")
    return Sizes(
        activation=_ACTIVATIONS.index(network.activation),
        hidden=hidden,
        embedding=width,
        heads=network.heads,
        head_size=head,
        head_stride=stride,
        intermediate=inner,
        layers=len(network.layer_map),
        stored_layers=len(set(network.layer_map)),
        vocabulary=len(t["embeddings.word"]),
        token_types=len(t.get("embeddings.token_type", ())),
        positions=network.positions,
        position_offset=network.position_offset,
        position_rule=int(network.pad_rule),
        pad_id=network.pad_id,
        relative_bias=int(network.relative_bias is not None),
        epsilon=network.epsilon,
        family=network.family,
        rotary=len(network.angles),
        gated=int(families.GATED in network.products),
        norm_first=network.norm_first,
        window=network.window,
        distances=_rows(network.distances) if network.distances else 0,
        uncentred=int(network.uncentred),
        vocabulary_head=sum(f"head.{product}.weight" in t for product in HEAD_PRODUCTS),
        head_activation=_ACTIVATIONS.index(network.head_activation) if network.head_activation else 0,
        dropped=network.dropped,
    )


def _tables(network: Network, sizes: Sizes) -> list[Stored]:
    """Return all tensors but the products'."""
    t = network.tensors
    stored = [_table(Tensor.WORD, t["embeddings.word"])]
    if "embeddings.position" in t:
        stored.append(_table(Tensor.POSITION, t["embeddings.position"]))
    stored += [_table(Tensor.ROTARY, _rotary(angles, sizes.head_stride), i) for i, angles in enumerate(network.angles)]
    if network.distances is not None:
        stored += _by_distance(network.distances, network.heads, sizes.head_size, sizes.head_stride)
    if network.window:
        stored.append(_whole_numbers(Tensor.LAYER_WINDOW, network.windowed))
    if "embeddings.token_type" in t:
        stored.append(_table(Tensor.TOKEN_TYPE, t["embeddings.token_type"]))
    stored.append(_vector(Tensor.EMBEDDING_GAIN, t["embeddings.norm.weight"]))
    stored.append(_vector(Tensor.EMBEDDING_SHIFT, t["embeddings.norm.bias"]))
    if "embeddings.first_norm.weight" in t:
        stored += [_vector(Tensor.FIRST_GAIN, t["embeddings.first_norm.weight"]), _vector(Tensor.FIRST_SHIFT, t["embeddings.first_norm.bias"])]
    stored.append(_whole_numbers(Tensor.LAYER_MAP, network.layer_map))
    if network.relative_bias is not None:
        count = network.relative_bias.shape[1]
        columns = (count + 1 + 31) // 16 * 16 + 16  # as model.cpp: what vectors of keys read behind the last distance
        bias = np.pad(network.relative_bias * np.float32(math.log2(math.e)), ((0, 0), (0, columns - count)))
        stored.append(_table(Tensor.RELATIVE_BIAS, bias))
    for i in sorted(set(network.layer_map)):
        for gain, shift, name in (
            (Tensor.ATTENTION_GAIN, Tensor.ATTENTION_SHIFT, "attention_norm"),
            (Tensor.FFN_GAIN, Tensor.FFN_SHIFT, "ffn_norm"),
        ):
            stored.append(_vector(gain, t[f"layers.{i}.{name}.weight"], i))
            stored.append(_vector(shift, t[f"layers.{i}.{name}.bias"], i))
    if "head.norm.weight" in t:
        stored += [_vector(Tensor.HEAD_GAIN, t["head.norm.weight"]), _vector(Tensor.HEAD_SHIFT, t["head.norm.bias"])]
    return stored


def _rows(by_distance: Distances) -> int:
    """How many rows the tables by distance have, whole panels."""
    return _up(len(next(iter(by_distance.keys.values()))))


def _by_distance(by_distance: Distances, heads: int, head: int, stride: int) -> list[Stored]:
    """Return the place of every distance, and for each layer the tables of its heads [heads * rows, stride], padded with zeros."""
    stored = [_whole_numbers(Tensor.PLACES, by_distance.places)]
    factor, rows = distances.factor(head, by_distance), _rows(by_distance)
    for tensor, tables, scale in ((Tensor.DISTANCE_KEYS, by_distance.keys, np.float32(1)), (Tensor.DISTANCE_QUERIES, by_distance.queries, factor)):
        for layer, table in tables.items():
            by_head = (table * scale).reshape(len(table), heads, head).transpose(1, 0, 2)
            padded = np.pad(by_head, ((0, 0), (0, rows - len(table)), (0, stride - head)))
            stored.append(_table(tensor, np.ascontiguousarray(padded.reshape(heads * rows, stride)), layer))
    return stored


def _rotary(angles: Floats, stride: int) -> Floats:
    """Return cosines and sines of `angles` [positions, half], each padded to half a `stride`, in panels [positions, stride]."""
    padded = np.pad(angles, ((0, 0), (0, stride // 2 - angles.shape[1]))).astype(np.float64)
    return _interleaved(np.cos(padded).astype(np.float32), np.sin(padded).astype(np.float32), axis=1)


def _linear(network: Network, head: int, stride: int, inner: int) -> Iterator[Linear]:
    """Yield the projection of narrow embeddings, every stored layer's products and the head's."""
    t = network.tensors
    if "embeddings.projection.weight" in t:
        yield Linear(Tensor.PROJECTION, 0, t["embeddings.projection.weight"], t["embeddings.projection.bias"])
    for i in sorted(set(network.layer_map)):
        for name, (weight, bias) in _products(network, i, head, stride, inner).items():
            yield Linear(PRODUCTS[name], i, weight, bias)
    for name, tensor in HEAD_PRODUCTS.items():
        if f"head.{name}.weight" in t:
            weight, bias = t[f"head.{name}.weight"], t[f"head.{name}.bias"]
            more = _up(len(weight)) - len(weight)
            yield Linear(tensor, 0, np.pad(weight, ((0, more), (0, 0))), np.pad(bias, (0, more)))


def pack(
    path: str | os.PathLike[str],
    config: Mapping[str, Any],
    tensors: Mapping[str, Any],
    precision: Precision = "int8",
    keep_bf16: Iterable[int | str] = (),
    vocabulary_head: bool = False,
) -> None:
    """Write the packed file of a checkpoint, with the head of its masked language model if `vocabulary_head`.

    `config` is what transformers' `config.to_dict()` gives, `tensors` the state dict as numpy arrays (a prefix such as `bert.`
    may be there; other heads are ignored). Activation, epsilon and padding id are transformers' defaults for the family where the
    config leaves them out. With `int8`, `keep_bf16` names what stays bf16: layers (`3`) or products (`'3.ffn_out'`;
    products are qkv, attention_out, ffn_in, ffn_out; of `head` dense, decoder). Shared layers share it.

    Raises `Unsupported` for networks that the library does not run, `ValueError` for weights that are missing, of
    another shape, or not finite.
    """
    if precision not in ("int8", "bf16"):
        raise ValueError(f"precision must be one of 'int8', 'bf16'; got {precision!r}")
    network = read(config, tensors, vocabulary_head)
    kept = _bf16_products(keep_bf16, network)
    found = content(network, copies=precision == "int8")
    stored = list(found.tables)
    for product in found.products:
        int8 = precision == "int8" and product.tensor != Tensor.PROJECTION and (product.layer, product.tensor) not in kept
        stored += _rounded(product, int8)
    layout.write(Path(path), found.sizes, stored)
