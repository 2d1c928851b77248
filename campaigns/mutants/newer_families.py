"""Faults of what DeBERTa, ModernBERT, NomicBERT, GTE, EuroBERT and MegatronBERT have and BERT lacks: rotary and relative positions, windows, gates, norms first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from campaigns.mutants.loose_limits import BF16
from campaigns.mutants.plant import Checkpoint, Gate, Step, mutant

MODERNBERT = Checkpoint("modernbert")
NOMIC = Checkpoint("nomic_bert", "feature-extraction", "mean")
GTE = Checkpoint("gte")
EUROBERT = Checkpoint("eurobert")
DEBERTA = Checkpoint("deberta-v2")
MEGATRON = Checkpoint("megatron-bert")
XLM_ROBERTA_XL = Checkpoint("xlm-roberta-xl")
ESM = Checkpoint("esm", "token-classification")
ROBERTA_PRELAYERNORM = Checkpoint("roberta-prelayernorm")
FIRST_DEBERTA = Checkpoint("deberta")
ULTRABERT = Checkpoint("ultrabert")
ROFORMER = Checkpoint("roformer")
#: Where the norms around a layer's feed-forward are, and the norm of the last layer's stream.
_NORMS = {
    "modernbert": ("attn_norm", "mlp_norm", "final_norm"), "eurobert": ("input_layernorm", "post_attention_layernorm", "norm"),
    "megatron-bert": ("attention.ln", "ln", "encoder.ln"), "xlm-roberta-xl": ("attention.self_attn_layer_norm", "LayerNorm", "encoder.LayerNorm"),
    "roberta-prelayernorm": ("attention.LayerNorm", "intermediate.LayerNorm", "LayerNorm"),
    "ultrabert": ("input_layernorm", "post_attention_layernorm", "norm"),
}  # fmt: skip


def _layers(network: Any) -> Any:
    base = network.base
    return base.layers if hasattr(base, "layers") else base.encoder.layer


def _exchange(one: Any, other: Any) -> None:
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)


def exchanged_gate(network: Any) -> None:
    """The last layer's gate and what it multiplies change places."""
    mlp = _layers(network)[-1].mlp
    one, other = mlp.Wi.weight.chunk(2) if hasattr(mlp, "Wi") else (mlp.gate_proj.weight, mlp.up_proj.weight)
    _exchange(one, other)


def rotated_in_neighbours(network: Any) -> None:
    """Rotary positions turn neighbouring channels of a head, not those half a head apart."""
    import torch

    config = network.encoder.config
    head = config.hidden_size // config.num_attention_heads
    order = torch.arange(head).view(2, -1).t().reshape(-1)
    for layer in _layers(network):
        if hasattr(layer, "attn"):
            parts = list(layer.attn.Wqkv.weight.chunk(3)[:2])
        else:
            parts = [getattr(layer.self_attn, f"{name}_proj").weight for name in ("q", "k")]
        for weight in parts:
            weight.copy_(weight.view(-1, head, weight.shape[1])[:, order].reshape(weight.shape))


def another_rotation_base(network: Any) -> None:
    """Rotary positions have half the base: they turn faster."""
    config = network.encoder.config
    ropes = config.rope_parameters
    for rope in [ropes] if "rope_theta" in ropes else ropes.values():
        rope["rope_theta"] /= 2
    head = config.hidden_size // config.num_attention_heads
    for module in network.base.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name.endswith("inv_freq"):
                # base ** (-2i / head), of half the base.
                buffer.mul_(2 ** (_steps(len(buffer)) / head))


def _steps(count: int) -> Any:
    import torch

    return torch.arange(0, 2 * count, 2)


def narrower_window(network: Any) -> None:
    """Layers with a window see one token less on each side."""
    _widen(network, -1)


def wider_window(network: Any) -> None:
    """Layers with a window see one token more on each side."""
    _widen(network, 1)


def _widen(network: Any, tokens: int) -> None:
    config = network.encoder.config
    if config.model_type == "ultrabert":
        config.sliding_window += tokens
    else:
        config.local_attention += 2 * tokens


def window_in_every_layer(network: Any) -> None:
    """The layers that see all tokens have a window too."""
    config = network.encoder.config
    config.layer_types = ["sliding_attention"] * config.num_hidden_layers
    for layer in _layers(network):
        layer.attention_type = "sliding_attention"


def exchanged_key_heads(network: Any) -> None:
    """In the last layer the heads of keys that queries share are taken in another order."""
    attention = _layers(network)[-1].self_attn
    weight = attention.k_proj.weight
    weight.copy_(weight.view(-1, attention.head_dim, weight.shape[1]).flip(0).reshape(weight.shape))


def turned_half_a_head_apart(network: Any) -> None:
    """RoFormer's positions turn channels half a head apart, not neighbours."""
    import torch

    for layer in _layers(network):
        attention = layer.attention.self
        head = attention.attention_head_size
        order = torch.arange(head).view(-1, 2).t().reshape(-1)
        for weight in (attention.query.weight, attention.key.weight):
            weight.copy_(weight.view(-1, head, weight.shape[1])[:, order].reshape(weight.shape))


def turned_the_other_way(network: Any) -> None:
    """What is before a token counts as behind it: sines have the other sign."""
    sines, _ = network.base.encoder.embed_positions.weight.chunk(2, dim=1)
    sines.neg_()


def turned_values(network: Any) -> None:
    """Positions turn values as queries and keys."""
    for layer in _layers(network):
        layer.attention.self.rotary_value = True


def exchanged_norms(network: Any) -> None:
    """In the last layer the norms before attention and before the feed-forward change places."""
    before, behind, _ = _NORMS[network.encoder.config.model_type]
    layer = _layers(network)[-1]
    _exchange(layer.get_submodule(before).weight, layer.get_submodule(behind).weight)


def last_norm_lost(network: Any) -> None:
    """The norm behind all layers has lost its weights."""
    network.base.get_submodule(_NORMS[network.encoder.config.model_type][2]).weight.fill_(1)


def embeddings_normalised(network: Any) -> None:
    """The residual stream begins behind a norm of the embeddings, as BERT's does."""
    import torch

    network.base.embeddings.dropout = torch.nn.LayerNorm(network.encoder.config.hidden_size)


def first_norm_lost(network: Any) -> None:
    """The first layer's norm before attention has lost its weights: its input is normalised as the embeddings are."""
    _layers(network)[0].get_submodule(_NORMS[network.encoder.config.model_type][0]).weight.fill_(1)


def reversed_distances(network: Any) -> None:
    """The table of distances is read from its other end: what is before a token counts as behind it."""
    table = network.base.encoder.rel_embeddings.weight
    table.copy_(table.flip(0))


def shifted_distances(network: Any) -> None:
    """Every distance is taken for the next larger one."""
    table = network.base.encoder.rel_embeddings.weight
    table.copy_(table.roll(1, 0))


def far_distances(network: Any) -> None:
    """Far distances fall into buckets of twice the largest distance; near ones are right."""
    config = network.encoder.config
    largest = 2 * config.max_position_embeddings
    config.max_relative_positions = largest
    network.base.encoder.max_relative_positions = largest
    for layer in _layers(network):
        layer.attention.self.max_relative_positions = largest


def unnormed_distances(network: Any) -> None:
    """The norm of the table of distances has lost its weights."""
    network.base.encoder.LayerNorm.weight.fill_(1)


def mask_tokens_not_counted(network: Any) -> None:
    """A text's tokens are scaled as if it had no mask tokens; these are 0, as they should be."""
    embeddings = network.base.embeddings
    kept = type(embeddings)._kept
    embeddings._kept = lambda dropped, mask: kept(embeddings, dropped & False, mask)


def padding_counted(network: Any) -> None:
    """The share of mask tokens is that among all columns of a batch, not among the text's tokens."""
    embeddings = network.base.embeddings
    kept = type(embeddings)._kept
    embeddings._kept = lambda dropped, mask: kept(embeddings, dropped, mask * 0 + 1)


def slower_rotation(network: Any) -> None:
    """Rotary positions turn a tenth more slowly than the checkpoint's frequencies say."""
    network.base.rotary_embeddings.inv_freq.mul_(0.9)


def norm_behind_layers_lost(network: Any) -> None:
    """The norm behind all layers has lost its weights."""
    network.base.encoder.emb_layer_norm_after.weight.fill_(1)


def projections_in_blocks(network: Any) -> None:
    """The product of query, key and value is read as three blocks, not head by head."""
    config = network.encoder.config
    for layer in _layers(network):
        weight = layer.attention.self.in_proj.weight
        by_head = weight.view(3, config.num_attention_heads, -1, weight.shape[1])
        weight.copy_(by_head.transpose(0, 1).reshape(weight.shape))


def query_bias_lost(network: Any) -> None:
    """Queries have no bias, as keys have none."""
    for layer in _layers(network):
        layer.attention.self.q_bias.zero_()


def distances_clamped_early(network: Any) -> None:
    """Distances beyond a quarter of the largest share a row; nearer ones are right."""
    table = network.base.encoder.rel_embeddings.weight
    middle, near = len(table) // 2, len(table) // 8
    table[: middle - near] = table[middle - near].clone()
    table[middle + near :] = table[middle + near - 1].clone()


_ROTARY = (exchanged_gate, rotated_in_neighbours, another_rotation_base)
_PRENORM = (exchanged_norms, last_norm_lost)
FAULTS: dict[Checkpoint, tuple[Callable[[Any], None], ...]] = {
    MODERNBERT: (*_ROTARY, *_PRENORM, narrower_window, wider_window, window_in_every_layer),
    NOMIC: _ROTARY,
    GTE: _ROTARY,
    EUROBERT: (*_ROTARY, *_PRENORM),
    ROBERTA_PRELAYERNORM: (*_PRENORM, first_norm_lost),
    XLM_ROBERTA_XL: (*_PRENORM, embeddings_normalised),
    MEGATRON: (*_PRENORM, embeddings_normalised),
    ULTRABERT: (*_ROTARY, *_PRENORM, narrower_window, wider_window, window_in_every_layer, exchanged_key_heads),
    DEBERTA: (reversed_distances, shifted_distances, far_distances, unnormed_distances),
    ESM: (mask_tokens_not_counted, padding_counted, slower_rotation, norm_behind_layers_lost),
    FIRST_DEBERTA: (shifted_distances, projections_in_blocks, query_bias_lost, distances_clamped_early),
}
#: Faults that are no other weights, of which a native file is made.
_STRUCTURAL = (embeddings_normalised, mask_tokens_not_counted, padding_counted)
#: In which forms those of RoFormer are planted: bfloat16's rounding costs its tiny model about as much as a wrong angle, and the native encoder, which
#: makes the positions itself, refuses to pack others.
_OF_ROFORMER: dict[Callable[[Any], None], tuple[str, ...]] = {
    turned_half_a_head_apart: ("in_torch", "in_native_int8", "in_native_bf16"), turned_the_other_way: ("in_torch",), turned_values: ("in_torch",),
}
#: Where each is planted: the gate that sees it, the pass that plants it, and what comes before.
_FORMS: dict[str, tuple[Gate, str, tuple[Step, ...]]] = {
    "in_torch": ("parity", "plant_torch", ()),
    "behind_bf16": ("rounding", "plant_torch", (BF16,)),
    "in_native_int8": ("certificate", "plant_native", ()),
    "in_native_bf16": ("certificate", "plant_native_bf16", ()),
}


def _plant(fault: Callable[[Any], None], on: Checkpoint, form: str) -> None:
    def plant(network: Any) -> None:
        fault(network)

    gate, step, line = _FORMS[form]
    plant.__name__ = f"{fault.__name__}_of_{on.family.replace('-', '_')}_{form}"
    plant.__doc__ = f"{(fault.__doc__ or '').strip()} In {on.family}, {form.replace('_', ' ')}."
    mutant(gate, step, on, line)(plant)


for _on, _faults in FAULTS.items():
    for _fault in _faults:
        for _form in _FORMS if _fault not in _STRUCTURAL else ("in_torch", "behind_bf16"):
            _plant(_fault, _on, _form)

for _fault, _forms in _OF_ROFORMER.items():
    for _form in _forms:
        _plant(_fault, ROFORMER, _form)
