"""How each family names and counts things: the tensors of transformers under one set of names, and what a config calls its fields."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

PRODUCTS = ("query", "key", "value", "attention_out", "ffn_in", "ffn_out")
#: What the activation of `ffn_in` gates, in networks that have it.
GATED = "ffn_gated"

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
_DEBERTA_V2 = _BERT | {name: f"attention.self.{name}_proj" for name in ("query", "key", "value")}
_DEBERTA = {name: theirs for name, theirs in _BERT.items() if name not in ("query", "key", "value")} | {"by_head": "attention.self"}
#: Heads over the vocabulary.
_LM_HEAD = ("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder")
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
_MODERNBERT = {
    "qkv": "attn.Wqkv",
    "attention_out": "attn.Wo",
    "attention_norm": "mlp_norm",
    "ffn_in": "mlp.Wi",
    "ffn_out": "mlp.Wo",
    "first_norm": "attn_norm",
    "last_norm": "final_norm",
}
_ESM = _BERT | {"attention_norm": "LayerNorm", "ffn_norm": "", "first_norm": "attention.LayerNorm", "last_norm": "encoder.emb_layer_norm_after"}
_EUROBERT = _ROTARY | {"first_norm": "input_layernorm", "last_norm": "norm"}
_MEGATRON = _BERT | {"first_norm": "attention.ln", "attention_norm": "ln", "last_norm": "encoder.ln"}
_XLM_ROBERTA_XL = _BERT | {"first_norm": "attention.self_attn_layer_norm", "attention_norm": "LayerNorm", "last_norm": "encoder.LayerNorm"}
_ROBERTA_PRELAYERNORM = _BERT | {"first_norm": "attention.LayerNorm", "attention_norm": "intermediate.LayerNorm", "last_norm": "LayerNorm"}


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
    norm_first: int = 0
    """`Network.norm_first`."""
    uncentred: bool = False
    """Norms do not subtract the mean."""
    stated_biases: bool = False
    """The config says which products and norms have a bias; the feed-forward is gated."""
    by_distance: bool = False
    """Scores have parts by distance, from tables (`distances`)."""
    stored_as: str = ""
    """What the packed file calls it, where its name is longer than the file's 16 letters."""
    rotary: bool = False
    """Queries and keys are turned by their position; there is no table of positions."""
    word: str = "embeddings.word_embeddings"
    norm: str = "embeddings.LayerNorm"
    activation: tuple[str, str] = ("hidden_act", "gelu")
    """What a config calls it, and what transformers takes where a config does not say."""
    epsilon: tuple[str, float] = ("layer_norm_eps", 1e-12)
    """The same of the norms' epsilon."""
    head: tuple[str, ...] = ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.decoder")
    """The head over the vocabulary: dense layer, norm and decoder, or the decoder alone; empty where it has another form."""
    head_activation: str = ""
    """The head's activation where it is not the layers': its name, or the config's field that has it."""
    head_biases: Mapping[str, tuple[str, bool]] = field(default_factory=dict)
    """Biases of the head that a checkpoint may lack: the config's field, and what transformers takes where a config does not say."""


FAMILIES: Mapping[str, Family] = {
    "bert": Family("bert.", "encoder.layer.{}.", _BERT),
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert"),
                    Family("roberta.", "encoder.layer.{}.", _BERT, pad_rule=True, head=_LM_HEAD, head_activation="gelu")),
    "distilbert": Family("distilbert.", "transformer.layer.{}.", _DISTILBERT, token_types=False, activation=("activation", "gelu"),
                         head=("vocab_transform", "vocab_layer_norm", "vocab_projector")),
    "electra": Family("electra.", "encoder.layer.{}.", _BERT, projection="embeddings_project", head_activation="gelu",
                      head=("generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head")),
    "albert": Family("albert.", "encoder.albert_layer_groups.{}.albert_layers.{}.", _ALBERT,
                     projection="encoder.embedding_hidden_mapping_in", activation=("hidden_act", "gelu_new"),
                     head=("predictions.dense", "predictions.LayerNorm", "predictions.decoder")),
    "mpnet": Family("mpnet.", "encoder.layer.{}.", _MPNET, token_types=False, pad_rule=True, head=_LM_HEAD, head_activation="gelu"),
    "ernie": Family("ernie.", "encoder.layer.{}.", _BERT),
    "rembert": Family("rembert.", "encoder.layer.{}.", _BERT, projection="encoder.embedding_hidden_mapping_in",
                      head=("cls.predictions.dense", "cls.predictions.LayerNorm", "cls.predictions.decoder")),
    "data2vec-text": Family("data2vec_text.", "encoder.layer.{}.", _BERT, pad_rule=True, head=_LM_HEAD, head_activation="gelu"),
    "deberta": Family("deberta.", "encoder.layer.{}.", _DEBERTA, epsilon=("layer_norm_eps", 1e-7), by_distance=True),
    "deberta-v2": Family("deberta.", "encoder.layer.{}.", _DEBERTA_V2, epsilon=("layer_norm_eps", 1e-7), by_distance=True),
    "nomic_bert": Family("nomic_bert.", "layers.{}.", _ROTARY, without_bias=(*PRODUCTS, GATED), rotary=True, activation=("hidden_act", "silu"),
                         head=("cls.predictions.transform.dense", "cls.predictions.transform.layer_norm", "cls.predictions.decoder")),
    "gte": Family("gte.", "layers.{}.", _ROTARY, without_bias=("ffn_in", GATED), rotary=True, head=_LM_HEAD, head_activation="gelu"),
    "modernbert": Family("model.", "layers.{}.", _MODERNBERT, token_types=False, rotary=True, word="embeddings.tok_embeddings",
                         norm="embeddings.norm", activation=("hidden_activation", "gelu"), epsilon=("norm_eps", 1e-5),
                         head=("head.dense", "head.norm", "decoder"), head_activation="classifier_activation",
                         head_biases={"head.dense": ("classifier_bias", False), "head.norm": ("norm_bias", False), "decoder": ("decoder_bias", True)}, norm_first=1, stated_biases=True),
    "eurobert": Family("model.", "layers.{}.", _EUROBERT, token_types=False, rotary=True, word="embed_tokens", norm="layers.0.input_layernorm",
                       activation=("hidden_act", "silu"), epsilon=("rms_norm_eps", 1e-5), head=("lm_head",), head_biases={"lm_head": ("mlp_bias", False)}, norm_first=2, stated_biases=True, uncentred=True),
    "megatron-bert": Family("bert.", "encoder.layer.{}.", _MEGATRON, norm="encoder.layer.0.attention.ln", norm_first=2),
    "roberta-prelayernorm": Family("roberta_prelayernorm.", "encoder.layer.{}.", _ROBERTA_PRELAYERNORM, pad_rule=True, head=_LM_HEAD, head_activation="gelu", norm_first=3, stored_as="roberta-prelayer"),
    "xlm-roberta-xl": Family("roberta.", "encoder.layer.{}.", _XLM_ROBERTA_XL, pad_rule=True, norm="encoder.layer.0.attention.self_attn_layer_norm",
                             epsilon=("layer_norm_eps", 1e-5), head=_LM_HEAD, head_activation="gelu", norm_first=2),
    "roformer": Family("roformer.", "encoder.layer.{}.", _BERT, projection="embeddings_project", rotary=True),
    "ultrabert": Family("model.", "layers.{}.", _EUROBERT, token_types=False, rotary=True, word="embed_tokens", norm="layers.0.input_layernorm",
                        activation=("hidden_act", "silu"), epsilon=("rms_norm_eps", 1e-6), head=(), norm_first=2, stated_biases=True, uncentred=True),
    # No field states the activation.
    "esm": Family("esm.", "encoder.layer.{}.", _ESM, token_types=False, norm="encoder.layer.0.attention.LayerNorm", activation=("", "gelu"), head=_LM_HEAD, norm_first=2),
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
