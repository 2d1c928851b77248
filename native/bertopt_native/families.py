"""What transformers calls the tensors of each family, under one set of names.

`read` turns a config and a state dict, as plain numpy arrays, into a `Network`. Names there: `embeddings.word`,
`embeddings.norm.weight`, `layers.0.query.weight`, ...; see `PRODUCTS` and `NORMS`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertopt_native.errors import Unsupported

Floats = NDArray[np.float32]

PRODUCTS = ("query", "key", "value", "attention_out", "ffn_in", "ffn_out")
NORMS = ("attention_norm", "ffn_norm")

_BERT = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "attention_out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "ffn_in": "intermediate.dense",
    "ffn_out": "output.dense",
    "ffn_norm": "output.LayerNorm",
}
_DISTILBERT = {
    "query": "attention.q_lin",
    "key": "attention.k_lin",
    "value": "attention.v_lin",
    "attention_out": "attention.out_lin",
    "attention_norm": "sa_layer_norm",
    "ffn_in": "ffn.lin1",
    "ffn_out": "ffn.lin2",
    "ffn_norm": "output_layer_norm",
}
_ALBERT = {
    "query": "attention.query",
    "key": "attention.key",
    "value": "attention.value",
    "attention_out": "attention.dense",
    "attention_norm": "attention.LayerNorm",
    "ffn_in": "ffn",
    "ffn_out": "ffn_output",
    "ffn_norm": "full_layer_layer_norm",
}
_MPNET = _BERT | {
    "query": "attention.attn.q",
    "key": "attention.attn.k",
    "value": "attention.attn.v",
    "attention_out": "attention.attn.o",
    "attention_norm": "attention.LayerNorm",
}


@dataclass(frozen=True)
class Family:
    """How one family names and counts things."""

    prefix: str
    layer: str
    names: Mapping[str, str]
    token_types: bool = True
    pad_rule: bool = False
    """Positions count the tokens that are not padding, from pad_token_id + 1."""
    projection: str = ""


FAMILIES: Mapping[str, Family] = {
    "bert": Family("bert.", "encoder.layer.{}.", _BERT),
    "roberta": Family("roberta.", "encoder.layer.{}.", _BERT, pad_rule=True),
    "xlm-roberta": Family("roberta.", "encoder.layer.{}.", _BERT, pad_rule=True),
    "camembert": Family("roberta.", "encoder.layer.{}.", _BERT, pad_rule=True),
    "distilbert": Family("distilbert.", "transformer.layer.{}.", _DISTILBERT, token_types=False),
    "electra": Family("electra.", "encoder.layer.{}.", _BERT, projection="embeddings_project"),
    "albert": Family("albert.", "encoder.albert_layer_groups.{}.albert_layers.{}.", _ALBERT,
                     projection="encoder.embedding_hidden_mapping_in"),
    "mpnet": Family("mpnet.", "encoder.layer.{}.", _MPNET, token_types=False, pad_rule=True),
}  # fmt: skip

ACTIVATIONS: Mapping[str, str] = {
    "gelu": "gelu_erf",
    "gelu_python": "gelu_erf",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


@dataclass(frozen=True)
class Network:
    """A checkpoint under common names, with what its config says."""

    family: str
    activation: str
    heads: int
    epsilon: float
    layer_map: tuple[int, ...]
    """Stored layer of every layer."""
    position_offset: int
    pad_rule: bool
    pad_id: int
    tensors: Mapping[str, Floats]
    relative_bias: Floats | None = None
    """Attention's bias [heads, 2 * longest - 1] by distance, entry key - query + longest - 1."""


class _Reader:
    """Takes tensors out of a state dict, checked."""

    def __init__(self, tensors: Mapping[str, Any], prefix: str) -> None:
        bare = (
            {k.removeprefix(prefix): v for k, v in tensors.items()}
            if any(k.startswith(prefix) for k in tensors)
            else dict(tensors)
        )
        self.source = {
            k.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias"): v
            for k, v in bare.items()
        }
        self.out: dict[str, Floats] = {}

    def take(self, name: str, *shape: int | None) -> Floats:
        if name not in self.source:
            raise ValueError(
                f"expected a tensor {name!r} in the checkpoint; it has {len(self.source)} others: check model_type in its config"
            )
        a = np.asarray(self.source[name]).astype(np.float32)
        if a.ndim != len(shape) or any(e is not None and e != g for e, g in zip(shape, a.shape, strict=True)):
            raise ValueError(
                f"tensor {name!r} must have shape {list(shape)}; got {list(a.shape)}: config and weights differ"
            )
        if not np.isfinite(a).all():
            raise ValueError(f"tensor {name!r} has NaN or infinite values: the checkpoint is damaged, get it again")
        return a

    def norm(self, to: str, name: str, width: int) -> None:
        for part in ("weight", "bias"):
            self.out[f"{to}.{part}"] = self.take(f"{name}.{part}", width)

    def linear(self, to: str, name: str, n: int, k: int) -> None:
        self.out[f"{to}.weight"] = self.take(f"{name}.weight", n, k)
        self.out[f"{to}.bias"] = self.take(f"{name}.bias", n)


def _number(config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        value = config.get(name)
        if value is not None:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"config's {name} must be a whole number above 0; got {value!r}")
            return value
    raise ValueError(f"config must have {names[0]}")


def _refuse(config: Mapping[str, Any]) -> None:
    for name in ("is_decoder", "add_cross_attention"):
        if config.get(name):
            raise Unsupported(f"expected an encoder; config has {name}: use another runtime")
    if (kind := config.get("position_embedding_type") or "absolute") != "absolute":
        raise Unsupported(f"position_embedding_type must be 'absolute'; got {kind!r}: use another runtime")


def read(config: Mapping[str, Any], tensors: Mapping[str, Any]) -> Network:
    """Return the network of a transformers config and state dict.

    Raises `Unsupported` for families and options that the library does not run, `ValueError` for tensors that are
    missing, of another shape, or not finite.
    """
    kind = str(config.get("model_type"))
    if kind not in FAMILIES:
        raise Unsupported(f"model_type must be one of {sorted(FAMILIES)}; got {kind!r}: use another runtime")
    _refuse(config)
    family, albert = FAMILIES[kind], kind == "albert"
    act = str(config.get("hidden_act") or config.get("activation") or "gelu")
    if act not in ACTIVATIONS:
        raise Unsupported(f"activation must be one of {sorted(ACTIVATIONS)}; got {act!r}: use another runtime")
    hidden, heads = _number(config, "hidden_size", "dim"), _number(config, "num_attention_heads", "n_heads")
    if hidden % heads:
        raise ValueError(f"hidden size must be a multiple of the number of heads; got {hidden} and {heads}")
    inner, layers = _number(config, "intermediate_size", "hidden_dim"), _number(config, "num_hidden_layers", "n_layers")
    width = _number(config, "embedding_size", "hidden_size", "dim") if family.projection else hidden
    reader = _Reader(tensors, family.prefix)

    for to, name in (
        ("word", "word_embeddings"),
        ("position", "position_embeddings"),
        ("token_type", "token_type_embeddings"),
    ):
        if to != "token_type" or family.token_types:
            reader.out[f"embeddings.{to}"] = reader.take(f"embeddings.{name}.weight", None, width)
    reader.norm("embeddings.norm", "embeddings.LayerNorm", width)
    if family.projection and (albert or width != hidden):
        reader.linear("embeddings.projection", family.projection, hidden, width)

    layer_map = _albert_layers(config, layers) if albert else tuple(range(layers))
    per_group = int(config.get("inner_group_num") or 1)
    shapes = {"ffn_in": (inner, hidden), "ffn_out": (hidden, inner)}
    for i in sorted(set(layer_map)):
        at = family.layer.format(i // per_group, i % per_group) if albert else family.layer.format(i)
        for product in PRODUCTS:
            reader.linear(f"layers.{i}.{product}", at + family.names[product], *shapes.get(product, (hidden, hidden)))
        for norm in NORMS:
            reader.norm(f"layers.{i}.{norm}", at + family.names[norm], hidden)

    pad = config.get("pad_token_id")
    pad_id = (1 if kind == "mpnet" else int(pad if pad is not None else 0)) if family.pad_rule else 0
    offset = pad_id + 1 if family.pad_rule else 0
    positions = len(reader.out["embeddings.position"])
    if positions <= offset:
        raise ValueError(f"position table must have more than {offset} rows; got {positions}")
    bias = None
    if kind == "mpnet":
        bias = _mpnet_bias(reader.take("encoder.relative_attention_bias.weight", None, heads), positions - offset)
    epsilon = 1e-12 if kind == "distilbert" else float(config.get("layer_norm_eps") or 1e-12)
    return Network(kind, ACTIVATIONS[act], heads, epsilon, layer_map, offset, family.pad_rule, pad_id, reader.out, bias)


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
