"""What bertopt knows of each family, by the `model_type` of config.json: all in which families differ as data. Where they differ in code, a
module beside this one has it, such as `deberta`, `esm` and `neighbours`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal


@dataclass(frozen=True)
class Parts:
    """Names of modules: `stack` in the base model, `attention` in a layer, the rest in that attention."""

    stack: str
    attention: str
    projections: tuple[str, str, str]
    """Query, key, value."""
    output: str | None
    """The projection after the heads are joined, where the attention has it inside."""
    first_norm: str | None = None
    """In a layer, where norms are of what attention and feed-forward read: the one before attention."""
    last_norm: str | None = None
    """There, the norm behind all layers, in the base model."""


@dataclass(frozen=True)
class Family:
    """One family. The defaults are those of most."""

    classifier: tuple[str, ...] = ("classifier.dense", "tanh", "classifier.out_proj")
    """What its sequence classifier does with the first token: linear layers by name, and functions (`float_head`)."""
    native: bool = True
    """Whether the native encoder runs it."""
    parts: Parts | None = None
    """Names in its layers, where passes rewrite these."""
    positions: Literal["column", "counted", "rotary", "stated"] = "column"
    """Rows of a table by column; by the count of tokens that are not padding, from the padding index + 1; rotary ones instead of a table; or
    one of the last two, as config.json's position_embedding_type says."""
    fixed_attention: bool = False
    """Its attention in transformers is no function that can be exchanged: `encoder_layers.Attention` takes its place."""
    packs: bool = False
    """Without `parts` it runs packed rows all the same: its attention takes positions and a mask between tokens."""
    states_pooling: bool = False
    """Its `classifier_pooling` says what a text classifier reads; transformers ignores that of all others."""


#: Parts of BERT's layers, whose module names many families have.
BERT_PARTS = Parts("encoder", "attention.self", ("query", "key", "value"), None)
_NORM_FIRST = replace(BERT_PARTS, first_norm="attention.LayerNorm", last_norm="LayerNorm")
_ROBERTA = Family(parts=BERT_PARTS, positions="counted")
_CONVOLUTIONS = Family(native=False)


def _pooled(base: str) -> tuple[str, ...]:
    """The steps of a classifier behind BERT's pooler, in a model whose base is called `base`."""
    return f"{base}.pooler.dense", "tanh", "classifier"


FAMILIES: Mapping[str, Family] = {
    "bert": Family(_pooled("bert"), parts=BERT_PARTS),
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert"), _ROBERTA),
    "distilbert": Family(
        ("pre_classifier", "relu", "classifier"), parts=Parts("transformer", "attention", ("q_lin", "k_lin", "v_lin"), "out_lin"),
    ),
    "electra": Family(("classifier.dense", "gelu", "classifier.out_proj"), parts=BERT_PARTS),
    "albert": Family(("albert.pooler", "tanh", "classifier"), parts=Parts("encoder", "attention", ("query", "key", "value"), "dense")),
    "mpnet": Family(parts=Parts("encoder", "attention.attn", ("q", "k", "v"), "o"), positions="counted"),
    **dict.fromkeys(("deberta", "deberta-v2"), Family(("pooler.dense", "gelu", "classifier"))),
    "modernbert": Family(("head.dense", "gelu", "head.norm", "classifier"), positions="rotary", states_pooling=True),
    "nomic_bert": Family(_pooled("nomic_bert"), positions="rotary", packs=True),
    "gte": Family(_pooled("gte"), positions="rotary", packs=True),
    "eurobert": Family(("dense", "gelu", "classifier"), positions="rotary", states_pooling=True),
    "ernie": Family(_pooled("ernie"), parts=BERT_PARTS),
    "data2vec-text": _ROBERTA,
    "rembert": Family(_pooled("rembert"), parts=BERT_PARTS),
    "megatron-bert": Family(
        _pooled("bert"), parts=replace(_NORM_FIRST, first_norm="attention.ln", last_norm="encoder.ln"), fixed_attention=True,
    ),
    "xlm-roberta-xl": replace(
        _ROBERTA, parts=replace(_NORM_FIRST, first_norm="attention.self_attn_layer_norm", last_norm="encoder.LayerNorm")
    ),
    "roberta-prelayernorm": replace(_ROBERTA, parts=_NORM_FIRST),
    "ultrabert": Family(("classifier",), positions="rotary", states_pooling=True),
    "esm": Family(parts=replace(_NORM_FIRST, last_norm="encoder.emb_layer_norm_after"), positions="stated"),
    "roformer": Family(("classifier.dense", "gelu", "classifier.out_proj"), positions="rotary"),
    "mobilebert": _CONVOLUTIONS,
    "convbert": _CONVOLUTIONS,
    "squeezebert": _CONVOLUTIONS,
}  # fmt: skip


def of(config: Any) -> Family:
    """The family of transformers' configuration or of the content of a config.json. Both are what the functions below take."""
    return FAMILIES[_field(config, "model_type")]


def classifier_pooling(config: Any) -> str:
    """What a classifier of texts reads: `cls` or `bos`, the first token; `mean`, the mean of all; `late`, the mean of its answers to all."""
    return str(_field(config, "classifier_pooling")) if of(config).states_pooling else "cls"


def is_rotary(config: Any) -> bool:
    """Whether a model has rotary positions instead of a table."""
    return _positions(config) == "rotary"


def counts_positions(config: Any) -> bool:
    """Whether a model's positions start after the padding index."""
    return _positions(config) == "counted"


def _positions(config: Any) -> str:
    known = of(config).positions
    if known != "stated":
        return known
    return "rotary" if _field(config, "position_embedding_type", "absolute") == "rotary" else "counted"


def _field(config: Any, name: str, default: Any = None) -> Any:
    return config.get(name, default) if isinstance(config, Mapping) else getattr(config, name, default)
