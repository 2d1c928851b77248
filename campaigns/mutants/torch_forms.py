"""Wrong weights and wrong layers in torch networks: what a careless conversion does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from campaigns.mutants.plant import LABELS, MASK, MEAN, SPAN, Checkpoint, Fault, Gate, mutant


def planted(gate: Gate = "parity", on: Checkpoint = LABELS) -> Callable[[Fault], Fault]:
    return mutant(gate, "plant_torch", on)


def attention(network: Any) -> Any:
    """The first layer's attention."""
    return network.base.encoder.layer[0].attention


def swap(tensor: Any, first: int, second: int) -> None:
    tensor[[first, second]] = tensor[[second, first]].clone()


@planted()
def swapped_labels(network: Any) -> None:
    """The classifier's first two rows stand in each other's place."""
    swap(network.encoder.classifier.weight, 0, 1)
    swap(network.encoder.classifier.bias, 0, 1)


@planted()
def transposed_weight(network: Any) -> None:
    """A square weight is stored transposed."""
    dense = attention(network).output.dense
    dense.weight.copy_(dense.weight.t().clone())


@planted()
def skipped_layer(network: Any) -> None:
    """The last layer is left out."""
    del network.base.encoder.layer[-1]


@planted()
def swapped_layers(network: Any) -> None:
    """Two layers run in the wrong order."""
    layers = network.base.encoder.layer
    layers[0], layers[1] = layers[1], layers[0]


@planted()
def tanh_gelu(network: Any) -> None:
    """The tanh approximation of GELU claimed to be exact."""
    from torch import nn

    for layer in network.base.encoder.layer:
        layer.intermediate.intermediate_act_fn = nn.GELU("tanh")


@planted()
def layer_norm_eps(network: Any) -> None:
    """LayerNorm's epsilon is torch's default 1e-5, not BERT's 1e-12."""
    from torch import nn

    for module in network.base.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 1e-5


@planted()
def unscaled_scores(network: Any) -> None:
    """One layer's attention forgot 1/sqrt(d)."""
    attention(network).self.scaling = 1.0


@planted()
def permuted_heads(network: Any) -> None:
    """The value projection's heads are in another order than the output projection expects."""
    value = attention(network).self.value
    half = value.weight.shape[0] // 2
    value.weight.copy_(value.weight.roll(half, 0).clone())
    value.bias.copy_(value.bias.roll(half, 0).clone())


@planted()
def dropped_bias(network: Any) -> None:
    """One projection lost its bias."""
    attention(network).self.query.bias.zero_()


@planted(on=MASK)
def dropped_decoder_bias(network: Any) -> None:
    """The language-model head lost its bias."""
    network.encoder.cls.predictions.decoder.bias.zero_()


@planted()
def cut_vocabulary(network: Any) -> None:
    """The last row of the word table is missing."""
    network.base.embeddings.word_embeddings.weight[-1] = 0


@planted()
def rounded_weights(network: Any) -> None:
    """Weights went through bfloat16 in a stage that claims float32."""
    for parameter in network.encoder.parameters():
        parameter.copy_(parameter.bfloat16().float())


@planted()
def rounded_answers(network: Any) -> None:
    """Answers go through float16 in a stage that claims float32."""
    network.register_forward_hook(lambda module, inputs, answers: tuple(a.half().float() for a in answers))


@planted()
def extra_softmax(network: Any) -> None:
    """Logits are normalised once already: every label and every score stays as it was."""
    network.register_forward_hook(lambda module, inputs, answers: (answers[0].log_softmax(-1), *answers[1:]))


@planted()
def dropout_left_on(network: Any) -> None:
    """One dropout, at 1 %, still trains."""
    dropout = network.base.embeddings.dropout
    dropout.p = 0.01
    dropout.train()


@planted()
def missing_pooler_tanh(network: Any) -> None:
    """The pooler's activation is left out."""
    from torch import nn

    network.base.pooler.activation = nn.Identity()


@planted(on=MEAN)
def missing_normalisation(network: Any) -> None:
    """Embeddings are not normalised: no cosine changes."""
    network.pooling.normalize = False


@planted(on=MEAN)
def cls_instead_of_mean(network: Any) -> None:
    """The first token's vector stands for the mean."""
    network.pooling.mode = "cls"


@planted(on=MEAN)
def mean_over_padding(network: Any) -> None:
    """The mean counts padding tokens too."""
    import torch

    from bertopt.modeling.layouts import Padded

    def unmasked(module: Any, inputs: Any) -> Any:
        hidden, rows = inputs
        return hidden, Padded({**rows.named, "attention_mask": torch.ones_like(rows.named["attention_mask"])}, rows.base)

    network.pooling.register_forward_pre_hook(unmasked)


@mutant("parity", "plant_torch", line=({"pass": "merge_qkv"},))
def merged_in_another_order(network: Any) -> None:
    """The merged product's first third is the value, its last the query."""
    for layer in network.base.encoder.layer:
        for merged in layer.attention.self.qkv.parameters():
            merged.copy_(merged.unflatten(0, (3, -1)).flip(0).flatten(0, 1).clone())


@mutant("parity", "plant_torch", line=({"pass": "keep_cls_only"},))
def final_token_kept(network: Any) -> None:
    """The last layer is computed for the row's final token instead of its first."""

    def final(module: Any, inputs: Any, named: Any) -> Any:
        return (named["memory"][:, -1:], *inputs[1:]), named

    network.base.encoder.last.register_forward_pre_hook(final, with_kwargs=True)


@planted(on=MEAN)
def coarse_embeddings(network: Any) -> None:
    """Embeddings are rounded to 8 bits in a stage that claims float32."""
    network.register_forward_hook(lambda module, inputs, answers: ((answers[0] * 127).round() / 127, *answers[1:]))


@planted(on=SPAN)
def swapped_outputs(network: Any) -> None:
    """Start and end logits change places."""
    network.register_forward_hook(lambda module, inputs, answers: answers[::-1])
