"""Rotary positions: what queries and keys are turned by, as transformers computes it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from bertopt_native.errors import Unsupported
from bertopt_native.reader import Floats, Reader, number

_KINDS = ("full_attention", "sliding_attention")
#: RoFormer's, which no config states.
_SINUSOIDAL = {"rope_type": "default", "rope_theta": 10000.0}
#: What a config calls its windows: with the tokens on both sides, or on each.
_BOTH_SIDES, _EACH_SIDE = "local_attention", "sliding_window"


def angles(config: Mapping[str, Any]) -> tuple[Floats, ...]:
    """Return what the channels i and i + half of a head are turned by [positions, half], in radians: one table, or one for each kind
    of layer, that of layers with a window last.

    Raises `Unsupported` for kinds of rotary positions that the library does not run.
    """
    given = _SINUSOIDAL if in_neighbours(config) else config.get("rope_parameters")
    if windowed(config):
        by_kind = given if isinstance(given, Mapping) else {}
        ropes = [by_kind.get(kind) for kind in _KINDS if kind in by_kind or kind in config["layer_types"]]
    else:
        ropes = [given]
    return tuple(_angles(config, rope if isinstance(rope, Mapping) else {}) for rope in ropes)


def in_neighbours(config: Mapping[str, Any]) -> bool:
    """Return whether positions turn a head's channels 2i and 2i + 1, not those half a head apart."""
    return config.get("model_type") == "roformer"


def check_sines(config: Mapping[str, Any], reader: Reader) -> None:
    """Raise `Unsupported` where RoFormer's table of sines and cosines, which is stored with the weights, is not that of its positions."""
    (turned,) = angles(config)
    stored = reader.take("encoder.embed_positions.weight", len(turned), 2 * turned.shape[1])
    # Half precision keeps them to 5e-4, bfloat16 to 4e-3; float32's angles of 10,000 positions are off by 1e-3.
    if not np.abs(stored - np.concatenate([np.sin(turned), np.cos(turned)], 1)).max() < 5e-3:
        raise Unsupported("tensor 'encoder.embed_positions.weight' must have the sines and cosines of positions with base 10000; it has others: use another runtime")


def of_frequencies(reader: Reader, config: Mapping[str, Any]) -> Floats:
    """Return the same for ESM, whose checkpoints store frequencies, of training in half precision rounded ones."""
    head = number(config, "hidden_size") // number(config, "num_attention_heads")
    if head % 2:
        raise Unsupported(f"head size must be even; got {head}: use another runtime")
    stored = next((name for name in reader.source if name.endswith("rotary_embeddings.inv_freq")), None)
    if stored is not None:
        positions = np.arange(number(config, "max_position_embeddings"), dtype=np.float32)
        return np.asarray(positions[:, None] * reader.take(stored, head // 2), np.float32)
    return _angles(config, {"rope_type": "default", "rope_theta": config.get("rope_theta", 10_000.0)})


def windowed(config: Mapping[str, Any]) -> tuple[bool, ...]:
    """Return which layers attend to a window; nothing for families whose layers are of one kind."""
    if (kinds := config.get("layer_types")) is None:
        return ()
    layers = number(config, "num_hidden_layers")
    if not isinstance(kinds, list | tuple) or len(kinds) != layers or not set(kinds) <= set(_KINDS):
        raise ValueError(f"config's layer_types must name one of {', '.join(_KINDS)} for each of {layers} layers; got {kinds!r}")
    return tuple(kind == "sliding_attention" for kind in kinds)


def window(config: Mapping[str, Any]) -> int:
    """Return how many tokens on each side layers with a window attend to, 0 where there are none."""
    if not any(windowed(config)):
        return 0
    if _BOTH_SIDES not in config:
        return number(config, _EACH_SIDE)
    if (both := number(config, _BOTH_SIDES)) < 2:
        raise ValueError(f"config's local_attention must be at least 2; got {both}")
    return both // 2


def _angles(config: Mapping[str, Any], rope: Mapping[str, Any]) -> Floats:
    if (kind := rope.get("rope_type")) != "default":
        raise Unsupported(f"rope_type must be 'default'; got {kind!r}: use another runtime")
    if rope.get("partial_rotary_factor", 1) != 1:
        raise Unsupported("partial_rotary_factor must be 1: use another runtime")
    base = rope.get("rope_theta")
    if not isinstance(base, int | float) or isinstance(base, bool) or not 1 < base < math.inf:
        raise ValueError(f"config's rope_theta must be a number above 1; got {base!r}")
    head = number(config, "hidden_size") // number(config, "num_attention_heads")
    if (size := config.get("head_dim") or head) != head or head % 2:
        raise Unsupported(f"head size must be even and hidden size / heads, {head}; got {size!r}: use another runtime")
    steps = np.arange(0, head, 2, dtype=np.float32) / np.float32(head)
    frequencies = np.float32(1) / np.float32(base) ** steps
    positions = np.arange(number(config, "max_position_embeddings"), dtype=np.float32)
    return np.asarray(positions[:, None] * frequencies, np.float32)
