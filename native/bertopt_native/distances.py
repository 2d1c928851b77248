"""DeBERTa's relative positions: what a query and a key are multiplied with at each distance between them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertopt_native.errors import Unsupported
from bertopt_native.reader import Floats, Reader, number


@dataclass(frozen=True)
class Distances:
    """Tables by distance, from keys far before the query to keys far behind it. Tables are of each stored layer, [rows, hidden]."""

    places: NDArray[np.int64]
    """Row of the tables for each distance key - query, from -(longest - 1) to longest - 1."""
    keys: Mapping[int, Floats]
    """What a query is multiplied with."""
    queries: Mapping[int, Floats]
    """What a key is multiplied with."""


def refuse(config: Mapping[str, Any]) -> None:
    """Raise `Unsupported` for a DeBERTa that the library does not run."""
    if not config.get("relative_attention"):
        raise Unsupported(f"relative_attention must be true; got {config.get('relative_attention')!r}: use another runtime")
    kinds = config.get("pos_att_type") or ()
    found = [kind.strip() for kind in (kinds.lower().split("|") if isinstance(kinds, str) else kinds)]
    first = config.get("model_type") == "deberta"
    # The first version divides scores by the number of kinds, known or not.
    if (sorted(found) if first else sorted(set(found))) != ["c2p", "p2c"]:
        raise Unsupported(f"pos_att_type must be c2p and p2c; got {sorted(found) or None}: use another runtime")
    if first and config.get("talking_head"):
        raise Unsupported(f"talking_head must be false; got {config['talking_head']!r}: use another runtime")
    hidden = number(config, "hidden_size")
    sizes = {"embedding_size": hidden} if first else {
        "embedding_size": hidden, "attention_head_size": hidden // number(config, "num_attention_heads"), "conv_kernel_size": 0,
    }  # fmt: skip
    for name, expected in sizes.items():
        if (value := config.get(name)) not in (None, expected):
            raise Unsupported(f"{name} must be {expected}; got {value!r}: use another runtime")


def read(reader: Reader, config: Mapping[str, Any], layers: Sequence[int], hidden: int, epsilon: float) -> Distances:
    """Return the tables of a DeBERTa, whose layers `reader` has read. Raises as `checkpoint.read` does."""
    longest = number(config, "max_position_embeddings")
    given = config.get("max_relative_positions", -1)
    most = given if isinstance(given, int) and given >= 1 else longest
    first = config.get("model_type") == "deberta"
    # The first version knows neither buckets nor norms of the table, nor products shared with tokens.
    buckets = -1 if first else config.get("position_buckets", -1)
    span = buckets if isinstance(buckets, int) and buckets > 0 else most
    distance = np.arange(1 - longest, longest)
    places = np.clip(span - 1 + (_bucket(distance, span, most) if span == buckets else distance), 0, 2 * span - 1)
    if np.diff(places).max(initial=0) > 1:
        raise Unsupported(f"position_buckets must put neighbouring distances into neighbouring buckets; got {buckets} for {most}: use another runtime")
    table = reader.take("encoder.rel_embeddings.weight", 2 * span, hidden)[::-1].astype(np.float64)
    if not first and "layer_norm" in str(config.get("norm_rel_ebd", "none")).lower():
        table = _normalised(table, reader.take("encoder.LayerNorm.weight", hidden), reader.take("encoder.LayerNorm.bias", hidden), epsilon)
    tables: list[dict[int, Floats]] = []
    names = ("pos_proj", "pos_q_proj") if first else ("pos_key_proj", "pos_query_proj")
    for own, shared in zip(names, ("key", "query"), strict=True):
        tables.append({})
        for i in layers:
            name = f"layers.{i}.{shared}"
            if first or not config.get("share_att_key"):
                reader.linear(name := f"layers.{i}.{own}", f"encoder.layer.{i}.attention.self.{own}", hidden, hidden, own != "pos_proj")
            tables[-1][i] = (table @ reader.out[f"{name}.weight"].T + reader.out[f"{name}.bias"]).astype(np.float32)
    return Distances(places, *tables)


def _bucket(distance: NDArray[np.int64], buckets: int, most: int) -> NDArray[np.int64]:
    """Return the bucket of each distance as DeBERTa counts them: near ones apart, far ones by their logarithm, in float32."""
    middle = buckets // 2
    if distance.max() <= middle:
        return distance
    if most - 1 <= middle:
        raise Unsupported(f"max_relative_positions must be above half of position_buckets, {middle}; got {most}: use another runtime")
    far = np.maximum(np.abs(distance), middle).astype(np.float32) / np.float32(middle)
    steps = np.log(far) / np.log(np.float32((most - 1) / middle)) * np.float32(middle - 1)
    return np.where(np.abs(distance) <= middle, distance, np.sign(distance) * (np.ceil(steps).astype(np.int64) + middle))


def _normalised(table: NDArray[np.float64], gain: Floats, shift: Floats, epsilon: float) -> NDArray[np.float64]:
    centred = table - table.mean(axis=1, keepdims=True)
    return np.asarray(centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + epsilon) * gain + shift)


def factor(head: int, distances: Distances | None) -> np.float32:
    """What queries are multiplied with: softmax works in base 2, and with distances a score is the sum of three products."""
    return np.float32(math.log2(math.e) / math.sqrt(head * (3 if distances else 1)))
