"""A checkpoint as the library runs it: its config and a state dict, as plain numpy arrays, under one set of names for all families.

Names of tensors: `embeddings.word`, `embeddings.norm.weight`, `layers.0.query.weight`, ...; see `families.PRODUCTS`; norms are
`layers.0.attention_norm` and `layers.0.ffn_norm`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bertopt_native import distances, rotary
from bertopt_native.distances import Distances
from bertopt_native.errors import Unsupported
from bertopt_native.families import ACTIVATIONS, FAMILIES, GATED, PRODUCTS, Family
from bertopt_native.reader import Floats, Reader, number

#: What transformers takes where a config does not say.
_REMBERT_WIDTHS = {"input_embedding_size": 256, "output_embedding_size": 1664}


@dataclass(frozen=True)
class Network:
    """A checkpoint under common names, with what its config says."""

    family: str
    activation: str
    heads: int
    epsilon: float
    layer_map: tuple[int, ...]
    """Stored layer of every layer."""
    positions: int
    """Of a text's tokens, those in front of the first among them."""
    position_offset: int
    pad_rule: bool
    pad_id: int
    tensors: Mapping[str, Floats]
    relative_bias: Floats | None = None
    """Attention's bias [heads, 2 * longest - 1] by distance, entry key - query + longest - 1."""
    angles: tuple[Floats, ...] = ()
    """Rotary positions: what a head's channels i and i + half are turned by at each position, [positions, half], in radians. Layers with
    a window take the last."""
    norm_first: int = 0
    """1: norms are of what a product reads, not of the residual stream; `ffn_norm` is the next layer's first, or the last of all. 2: that
    of the embeddings too, which is the first layer's. 3: the embeddings have one, and `embeddings.first_norm` is the first layer's."""
    uncentred: bool = False
    """Norms divide by the root mean square and do not subtract the mean."""
    window: int = 0
    """Tokens on each side that layers with a window attend to."""
    windowed: tuple[bool, ...] = ()
    distances: Distances | None = None
    head_activation: str = ""
    """Of the head over the vocabulary, where it has one."""
    dropped: int = 0
    """1 + the id of tokens that are 0 and by whose share a text's others are scaled; 0: there are none."""

    @property
    def products(self) -> tuple[str, ...]:
        """Names of a layer's products."""
        return (*PRODUCTS, GATED) if f"layers.{self.layer_map[0]}.{GATED}.weight" in self.tensors else PRODUCTS


def _activation(name: str) -> str:
    """Return what the packed file calls an activation of transformers. Raises `Unsupported` for one that the library does not have."""
    if name not in ACTIVATIONS:
        raise Unsupported(f"activation must be one of {sorted(ACTIVATIONS)}; got {name!r}: use another runtime")
    return ACTIVATIONS[name]


def _refuse(config: Mapping[str, Any]) -> None:
    for name in ("is_decoder", "add_cross_attention", "rotary_value"):
        if config.get(name):
            raise Unsupported(f"expected an encoder whose positions turn no values; config has {name}: use another runtime")
    esm = config.get("model_type") == "esm"
    if esm and config.get("emb_layer_norm_before"):
        raise Unsupported("emb_layer_norm_before must be false; got True: use another runtime")
    if (kind := config.get("position_embedding_type") or "absolute") != "absolute" and not (esm and kind == "rotary"):
        raise Unsupported(f"position_embedding_type must be 'absolute'; got {kind!r}: use another runtime")


def read(config: Mapping[str, Any], tensors: Mapping[str, Any], vocabulary_head: bool = False) -> Network:
    """Return the network of a transformers config and state dict, with its `vocabulary_head` (`head.dense`, `head.norm`, `head.decoder`) if asked for.

    Raises `Unsupported` for families and options that the library does not run, `ValueError` for tensors that are
    missing, of another shape, or not finite.
    """
    kind = str(config.get("model_type"))
    if kind not in FAMILIES:
        raise Unsupported(f"model_type must be one of {sorted(FAMILIES)}; got {kind!r}: use another runtime")
    _refuse(config)
    family, albert = FAMILIES[kind], kind == "albert"
    if family.by_distance:
        distances.refuse(config)
    if kind == "esm":  # a checkpoint states which it has
        turned = config.get("position_embedding_type") == "rotary"
        family = replace(family, rotary=turned, pad_rule=not turned)
    (act_name, usual_act), (epsilon_name, usual_epsilon) = family.activation, family.epsilon
    act = str(config.get(act_name) or usual_act)
    activation = _activation(act)
    hidden, heads = number(config, "hidden_size", "dim"), number(config, "num_attention_heads", "n_heads")
    if hidden % heads:
        raise ValueError(f"hidden size must be a multiple of the number of heads; got {hidden} and {heads}")
    inner, layers = number(config, "intermediate_size", "hidden_dim"), number(config, "num_hidden_layers", "n_layers")
    width = number(config, "embedding_size", "hidden_size", "dim") if family.projection else hidden
    if kind == "rembert":
        width = number({**_REMBERT_WIDTHS, **config}, "input_embedding_size")
        head_width = number({**_REMBERT_WIDTHS, **config}, "output_embedding_size")
        if vocabulary_head and head_width != width:
            raise Unsupported(f"the head over the vocabulary must be as wide as the embeddings, {width}; got output_embedding_size {head_width}: use another runtime")
    reader = Reader(tensors, family.prefix)

    _embeddings(reader, config, kind, family, hidden, width)
    if kind == "roformer":
        rotary.check_sines(config, reader)
    layer_map = _albert_layers(config, layers) if albert else tuple(range(layers))
    read_layers = _layers_with_stated_biases if family.stated_biases else _layers
    read_layers(reader, config, family, sorted(set(layer_map)), hidden, inner)

    pad = config.get("pad_token_id")
    pad_id = (1 if kind == "mpnet" or pad is None else int(pad)) if family.pad_rule else 0
    offset = pad_id + 1 if family.pad_rule else 0
    angles = () if not family.rotary else (rotary.of_frequencies(reader, config),) if kind == "esm" else rotary.angles(config)
    table = angles[0] if angles else reader.out.get("embeddings.position")
    positions = number(config, "max_position_embeddings") if table is None else len(table)
    if positions <= offset:
        raise ValueError(f"position table must have more than {offset} rows; got {positions}")
    bias = None
    if kind == "mpnet":
        bias = _mpnet_bias(reader.take("encoder.relative_attention_bias.weight", None, heads), positions - offset)
    epsilon = usual_epsilon if kind == "distilbert" else float(config.get(epsilon_name) or usual_epsilon)
    by_distance = distances.read(reader, config, layer_map, hidden, epsilon) if family.by_distance else None
    head_activation = _head(reader, config, family, act, len(reader.out["embeddings.word"]), hidden, width) if vocabulary_head else ""
    return Network(
        family.stored_as or kind, activation, heads, epsilon, layer_map, positions, offset, family.pad_rule, pad_id, reader.out, bias, angles,
        norm_first=family.norm_first, uncentred=family.uncentred, window=rotary.window(config), windowed=rotary.windowed(config), distances=by_distance,
        head_activation=head_activation, dropped=_dropped(config) if kind == "esm" else 0,
    )  # fmt: skip


def _embeddings(reader: Reader, config: Mapping[str, Any], kind: str, family: Family, hidden: int, width: int) -> None:
    """Read what a token begins as: its word, position and type, of a `width`, their norm, and the product that makes them `hidden` wide."""
    reader.out["embeddings.word"] = reader.take(f"{family.word}.weight", None, width)
    # Of the families with relative positions, DeBERTa alone may have no others.
    if not family.rotary and (not family.by_distance or config.get("position_biased_input", True)):
        reader.out["embeddings.position"] = reader.take("embeddings.position_embeddings.weight", None, width)
    # gte-base-en-v1.5 has no types, its relatives have.
    if family.token_types and config.get("type_vocab_size") != 0:
        reader.out["embeddings.token_type"] = reader.take("embeddings.token_type_embeddings.weight", None, width)
    if kind == "ernie" and config.get("use_task_id"):
        # The task, which every token has, is the first where a caller states none.
        reader.out["embeddings.token_type"] = reader.out["embeddings.token_type"] + reader.take("embeddings.task_type_embeddings.weight", None, width)[:1]
    reader.norm("embeddings.norm", family.norm, width, not family.stated_biases or bool(config.get("norm_bias")))
    if family.norm_first == 3:
        reader.norm("embeddings.first_norm", family.layer.format(0) + family.names["first_norm"], width)
    if family.projection and (kind in ("albert", "rembert") or width != hidden):
        reader.linear("embeddings.projection", family.projection, hidden, width)


def _dropped(config: Mapping[str, Any]) -> int:
    if not config.get("token_dropout"):
        return 0
    mask = config.get("mask_token_id")
    if not isinstance(mask, int) or isinstance(mask, bool) or not 0 <= mask < number(config, "vocab_size"):
        raise ValueError(f"config's mask_token_id must be a whole number below vocab_size; got {mask!r}")
    return mask + 1


def _head(reader: Reader, config: Mapping[str, Any], family: Family, activation: str, vocabulary: int, hidden: int, width: int) -> str:
    """Read the head over the vocabulary and return its activation, the layers' or its own.

    Raises `Unsupported` where the checkpoint has no such head, or one of another form (UltraBERT's).
    """
    if not family.head:
        raise Unsupported(f"the library has no head over the vocabulary of {config['model_type']}'s form, with two dense layers: use another runtime")
    *before, decoder = family.head
    if family.by_distance and config.get("legacy") is False:
        # Its decoder is the table of embeddings, which the checkpoint names once.
        own = "lm_predictions.lm_head"
        before, decoder = [f"{own}.dense", f"{own}.LayerNorm"], f"{own}.decoder"
        reader.source |= {f"{decoder}.weight": reader.out["embeddings.word"], f"{decoder}.bias": reader.take(f"{own}.bias", vocabulary)}
    if f"{decoder}.weight" not in reader.source:
        raise Unsupported(f"expected a head over the vocabulary, with a tensor '{decoder}.weight'; the checkpoint has none: use another runtime")

    def has_bias(name: str) -> bool:
        return name not in family.head_biases or bool(config.get(*family.head_biases[name]))

    if (alone := decoder.replace("decoder", "bias")) in reader.source and f"{decoder}.bias" not in reader.source:  # ESM's
        reader.source[f"{decoder}.bias"] = reader.source[alone]
    if before:
        dense, norm = before
        reader.linear("head.dense", dense, width, hidden, has_bias(dense))
        reader.norm("head.norm", norm, width, has_bias(norm))
    reader.linear("head.decoder", decoder, vocabulary, width if before else hidden, has_bias(decoder))
    own = family.head_activation
    return _activation(activation if not own else own if own in ACTIVATIONS else str(config.get(own) or "gelu"))


def _layers(
    reader: Reader, config: Mapping[str, Any], family: Family, layers: Sequence[int], hidden: int, inner: int
) -> None:
    per_group = int(config.get("inner_group_num") or 1)
    shapes = {"ffn_in": (inner, hidden), GATED: (inner, hidden), "ffn_out": (hidden, inner)}
    for i in layers:
        # Of ALBERT's groups; one with one layer is what other families have.
        at = family.layer.format(i // per_group, i % per_group)
        if "by_head" in family.names:
            reader.by_head(f"layers.{i}", at + family.names["by_head"], hidden, number(config, "num_attention_heads"))
        for product in (name for name in (*PRODUCTS, GATED) if name in family.names):
            shape = shapes.get(product, (hidden, hidden))
            reader.linear(f"layers.{i}.{product}", at + family.names[product], *shape, product not in family.without_bias)
        reader.norm(f"layers.{i}.attention_norm", at + family.names["attention_norm"], hidden)
        following = _following(family, i, i == layers[-1]) if "last_norm" in family.names else at + family.names["ffn_norm"]
        reader.norm(f"layers.{i}.ffn_norm", following, hidden)
        if rotary.in_neighbours(config):
            for name in ("query", "key"):
                reader.part_neighbours(f"layers.{i}.{name}", number(config, "num_attention_heads"))


def _following(family: Family, layer: int, last: bool) -> str:
    """Return the norm behind a layer whose norms come first: the next layer's first, or the network's last. The first layer's first is the
    embeddings'."""
    return family.names["last_norm"] if last else family.layer.format(layer + 1) + family.names["first_norm"]


def _layers_with_stated_biases(
    reader: Reader, config: Mapping[str, Any], family: Family, layers: Sequence[int], hidden: int, inner: int
) -> None:
    attention, mlp, norm = (bool(config.get(f"{part}_bias")) for part in ("attention", "mlp", "norm"))
    heads = number(config, "num_attention_heads")
    key_heads = number(config, "num_key_value_heads", "num_attention_heads")
    if heads % key_heads:
        raise ValueError(f"num_attention_heads must be a multiple of num_key_value_heads; got {heads} and {key_heads}")
    names = family.names
    for i in layers:
        at, to = family.layer.format(i), f"layers.{i}"
        if "qkv" in names:  # products that lie one after the other in one tensor
            reader.linear((f"{to}.query", f"{to}.key", f"{to}.value"), at + names["qkv"], hidden, hidden, attention)
            reader.linear((f"{to}.ffn_in", f"{to}.{GATED}"), at + names["ffn_in"], inner, hidden, mlp)
        else:
            reader.linear(f"{to}.query", at + names["query"], hidden, hidden, attention)
            for name in ("key", "value"):
                reader.linear(f"{to}.{name}", at + names[name], hidden // heads * key_heads, hidden, attention)
                reader.repeat_heads(f"{to}.{name}", key_heads, heads // key_heads)
            for name in ("ffn_in", GATED):
                reader.linear(f"{to}.{name}", at + names[name], inner, hidden, mlp)
        reader.linear(f"{to}.attention_out", at + names["attention_out"], hidden, hidden, attention)
        reader.linear(f"{to}.ffn_out", at + names["ffn_out"], hidden, inner, mlp)
        reader.norm(f"{to}.attention_norm", at + names["attention_norm"], hidden, norm)
        reader.norm(f"{to}.ffn_norm", _following(family, i, i == layers[-1]), hidden, norm)


def _albert_layers(config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    groups, inner = int(config.get("num_hidden_groups") or 1), int(config.get("inner_group_num") or 1)
    if not 1 <= groups <= layers or inner < 1:
        raise ValueError(
            f"num_hidden_groups must be from 1 to {layers} and inner_group_num above 0; got {groups} and {inner}"
        )
    return tuple(int(i / (layers / groups)) * inner + j for i in range(layers) for j in range(inner))


def _mpnet_bias(table: Floats, longest: int) -> Floats:
    """Return [heads, 2 * longest - 1] from the buckets [buckets, heads], as MPNetEncoder.relative_position_bucket does."""
    buckets, most = 32, 128  # the arguments that transformers always passes
    if len(table) < buckets:
        raise ValueError(f"relative_attention_bias must have at least {buckets} rows; got {len(table)}")
    behind = -(np.arange(2 * longest - 1) - (longest - 1))
    half, distance = buckets // 2, np.abs(behind)
    exact = half // 2
    far = (
        np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(exact))
        / np.float32(math.log(most / exact))
        * np.float32(half - exact)
    )
    bucket = np.where(distance < exact, distance, np.minimum(exact + far.astype(np.int64), half - 1)) + np.where(
        behind < 0, half, 0
    )
    return np.ascontiguousarray(table[bucket].T)
