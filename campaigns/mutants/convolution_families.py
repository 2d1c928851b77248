"""Faults of what MobileBERT, ConvBERT and SqueezeBERT have and BERT lacks: neighbouring tokens, bottlenecks, convolutions, groups."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from campaigns.mutants.loose_limits import BF16
from campaigns.mutants.plant import Checkpoint, Gate, Step, mutant

MOBILEBERT = Checkpoint("mobilebert", "token-classification")
CONVBERT = Checkpoint("convbert", "token-classification")
SQUEEZEBERT = Checkpoint("squeezebert")


def _exchange(one: Any, other: Any) -> None:
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)


def padding_beside_a_token(network: Any) -> None:
    """The last token reads the embedding of the padding behind it, as it does in transformers."""
    # The embeddings have read the field before; what hides padding from them reads it now.
    network.base.config.trigram_input = False


def exchanged_neighbours(network: Any) -> None:
    """The token before and the token behind change places in the embeddings."""
    weight = network.base.embeddings.embedding_transformation.weight
    size = weight.shape[1] // 3
    _exchange(weight[:, :size], weight[:, 2 * size :])


def lost_network(network: Any) -> None:
    """The last layer has one of its stacked feed-forward networks less."""
    layer = network.base.encoder.layer[-1]
    layer.ffn = layer.ffn[:-1]


def exchanged_networks(network: Any) -> None:
    """Two of the last layer's stacked feed-forward networks change places."""
    layer = network.base.encoder.layer[-1]
    layer.ffn = type(layer.ffn)([layer.ffn[1], layer.ffn[0], *layer.ffn[2:]])


def exchanged_bottlenecks(network: Any) -> None:
    """Query and key are made of what the residual sum should be made of, and the other way round."""
    inside = network.base.encoder.layer[-1].bottleneck
    _exchange(inside.input.dense.weight, inside.attention.dense.weight)


def unscaled(network: Any) -> None:
    """The last layer's norm without mean and variance has lost its weights."""
    network.base.encoder.layer[-1].output.bottleneck.LayerNorm.weight.fill_(1)


def padding_in_convolutions(network: Any) -> None:
    """The last layer convolves over padding, as transformers does."""
    module = network.base.encoder.layer[-1].attention.self
    module._convolved = functools.partial(_unmasked, module._convolved)


def _unmasked(convolved: Callable[..., Any], query: Any, hidden: Any, valid: Any) -> Any:
    return convolved(query, hidden, None)


def padding_on_the_left_in_convolutions(network: Any) -> None:
    """The last layer convolves over the padding before a row's first token, which no text has."""
    module = network.base.encoder.layer[-1].attention.self
    module._convolved = functools.partial(_unmasked_before, module._convolved)


def _unmasked_before(convolved: Callable[..., Any], query: Any, hidden: Any, valid: Any) -> Any:
    import torch

    return convolved(query, hidden, None if valid is None else valid | (torch.cumsum(valid.int(), 1) == 0))


def reversed_kernels(network: Any) -> None:
    """The last layer's convolutions read the tokens around each in reverse order."""
    module = network.base.encoder.layer[-1].attention.self
    for tensor in module.conv_kernel_layer.parameters():
        tensor.copy_(tensor.unflatten(0, (-1, module.conv_kernel_size)).flip(1).flatten(0, 1))


def exchanged_halves(network: Any) -> None:
    """In the last layer the channels of attention and those of the convolutions change places."""
    layer = network.base.encoder.layer[-1].attention
    size = layer.self.all_head_size
    _exchange(layer.output.dense.weight[:, :size], layer.output.dense.weight[:, size:])


def lost_bias(network: Any) -> None:
    """The separable convolution of the last layer has lost its bias."""
    network.base.encoder.layer[-1].attention.self.key_conv_attn_layer["pointwise"].bias.zero_()


def next_group(network: Any) -> None:
    """In the last layer's feed-forward each group of channels is multiplied by the next group's matrix."""
    product = network.base.encoder.layers[-1].intermediate.conv1d
    product.weight.copy_(product.weight.roll(product.out_channels // product.groups, 0))


def exchanged_groups(network: Any) -> None:
    """In the last layer two groups of the query's channels have each other's matrix."""
    weight = network.base.encoder.layers[-1].attention.query.weight
    size = weight.shape[0] // network.base.config.q_groups
    _exchange(weight[:size], weight[size : 2 * size])


FAULTS: dict[Checkpoint, tuple[Callable[[Any], None], ...]] = {
    MOBILEBERT: (padding_beside_a_token, exchanged_neighbours, lost_network, exchanged_networks, exchanged_bottlenecks, unscaled),
    CONVBERT: (padding_in_convolutions, padding_on_the_left_in_convolutions, reversed_kernels, exchanged_halves, lost_bias),
    SQUEEZEBERT: (next_group, exchanged_groups),
}
#: Where each is planted: the gate that sees it, and what comes before.
_FORMS: dict[str, tuple[Gate, tuple[Step, ...]]] = {"in_torch": ("parity", ()), "behind_bf16": ("rounding", (BF16,))}
#: No text has padding on the left; on the right each has too few tokens beside it.
_SEEN_ELSEWHERE: dict[tuple[Callable[[Any], None], str], Gate] = {
    (padding_on_the_left_in_convolutions, "behind_bf16"): "coverage", (padding_in_convolutions, "behind_bf16"): "coverage",
}  # fmt: skip


def _plant(fault: Callable[[Any], None], on: Checkpoint, form: str) -> None:
    def plant(network: Any) -> None:
        fault(network)

    gate, line = _FORMS[form]
    plant.__name__ = f"{fault.__name__}_of_{on.family}_{form}"
    plant.__doc__ = f"{(fault.__doc__ or '').strip()} In {on.family}, {form.replace('_', ' ')}."
    mutant(_SEEN_ELSEWHERE.get((fault, form), gate), "plant_torch", on, line)(plant)


for _on, _faults in FAULTS.items():
    for _fault in _faults:
        for _form in _FORMS:
            _plant(_fault, _on, _form)
