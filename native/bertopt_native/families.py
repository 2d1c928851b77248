"""What transformers calls the tensors of each family, under one set of names.

`read` turns a config and a state dict, as plain numpy arrays, into a `Network`. Names there: `embeddings.word`,
`embeddings.norm.weight`, `layers.0.query.weight`, ...; see `PRODUCTS` and `NORMS`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertopt_native.errors import Unsupported

Floats = NDArray[np.float32]

PRODUCTS = ("query", "key", "value", "attention_out", "ffn_in", "ffn_out")
#: What the activation of `ffn_in` gates, in networks that have it.
GATED = "ffn_gated"
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
_ROTARY = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "attention_out": "self_attn.o_proj",
    "attention_norm": "post_attention_layernorm",
    "ffn_in": "mlp.gate_proj",
    "ffn_gated": "mlp.up_proj",
    "ffn_out": "mlp.down_proj",
    "ffn_norm": "post_mlp_layernorm",
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
    without_bias: Collection[str] = ()
    """Products whose layers have no bias."""
    rotary: bool = False
    """Queries and keys are turned by their position; there is no table of positions."""


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
    "nomic_bert": Family("nomic_bert.", "layers.{}.", _ROTARY, without_bias=(*PRODUCTS, GATED), rotary=True),
    "gte": Family("gte.", "layers.{}.", _ROTARY, without_bias=("ffn_in", GATED), rotary=True),
}  # fmt: skip

ACTIVATIONS: Mapping[str, str] = {
    "gelu": "gelu_erf",
    "gelu_python": "gelu_erf",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
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
    angles: Floats | None = None
    """Rotary positions: what a head's channels i and i + half are turned by at each position, [positions, half], in radians."""

    @property
    def products(self) -> tuple[str, ...]:
        """Names of a layer's products."""
        return (*PRODUCTS, GATED) if f"layers.{self.layer_map[0]}.{GATED}.weight" in self.tensors else PRODUCTS


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

    def linear(self, to: str, name: str, n: int, k: int, bias: bool = True) -> None:
        self.out[f"{to}.weight"] = self.take(f"{name}.weight", n, k)
        self.out[f"{to}.bias"] = self.take(f"{name}.bias", n) if bias else np.zeros(n, np.float32)


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

    tables = {
        "word": True,
        "position": not family.rotary,
        # gte-base-en-v1.5 has no types, its relatives have.
        "token_type": family.token_types and config.get("type_vocab_size") != 0,
    }
    for table in (name for name, exists in tables.items() if exists):
        reader.out[f"embeddings.{table}"] = reader.take(f"embeddings.{table}_embeddings.weight", None, width)
    reader.norm("embeddings.norm", "embeddings.LayerNorm", width)
    if family.projection and (albert or width != hidden):
        reader.linear("embeddings.projection", family.projection, hidden, width)

    layer_map = _albert_layers(config, layers) if albert else tuple(range(layers))
    per_group = int(config.get("inner_group_num") or 1)
    shapes = {"ffn_in": (inner, hidden), GATED: (inner, hidden), "ffn_out": (hidden, inner)}
    for i in sorted(set(layer_map)):
        at = family.layer.format(i // per_group, i % per_group) if albert else family.layer.format(i)
        for product in (*PRODUCTS, *([GATED] if GATED in family.names else [])):
            shape = shapes.get(product, (hidden, hidden))
            reader.linear(f"layers.{i}.{product}", at + family.names[product], *shape, product not in family.without_bias)
        for norm in NORMS:
            reader.norm(f"layers.{i}.{norm}", at + family.names[norm], hidden)

    pad = config.get("pad_token_id")
    pad_id = (1 if kind == "mpnet" else int(pad if pad is not None else 0)) if family.pad_rule else 0
    offset = pad_id + 1 if family.pad_rule else 0
    angles = _rotary_angles(config, hidden // heads) if family.rotary else None
    positions = len(reader.out["embeddings.position"] if angles is None else angles)
    if positions <= offset:
        raise ValueError(f"position table must have more than {offset} rows; got {positions}")
    bias = None
    if kind == "mpnet":
        bias = _mpnet_bias(reader.take("encoder.relative_attention_bias.weight", None, heads), positions - offset)
    epsilon = 1e-12 if kind == "distilbert" else float(config.get("layer_norm_eps") or 1e-12)
    return Network(
        kind, ACTIVATIONS[act], heads, epsilon, layer_map, offset, family.pad_rule, pad_id, reader.out, bias, angles
    )


def _rotary_angles(config: Mapping[str, Any], head: int) -> Floats:
    """Return what the channels of a head are turned by [positions, head / 2], in transformers' float32."""
    given = config.get("rope_parameters")
    rope = given if isinstance(given, Mapping) else {}
    if (kind := rope.get("rope_type")) != "default":
        raise Unsupported(f"rope_type must be 'default'; got {kind!r}: use another runtime")
    base, size = rope.get("rope_theta"), config.get("head_dim") or head
    if not isinstance(base, int | float) or isinstance(base, bool) or not 1 < base < math.inf:
        raise ValueError(f"config's rope_theta must be a number above 1; got {base!r}")
    if size != head or head % 2:
        raise Unsupported(f"head size must be even and hidden size / heads, {head}; got {size!r}: use another runtime")
    if rope.get("partial_rotary_factor", 1) != 1:
        raise Unsupported("partial_rotary_factor must be 1: use another runtime")
    steps = np.arange(0, head, 2, dtype=np.float32) / np.float32(head)
    frequencies = np.float32(1) / np.float32(base) ** steps
    positions = np.arange(_number(config, "max_position_embeddings"), dtype=np.float32)
    return np.asarray(positions[:, None] * frequencies, np.float32)


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
