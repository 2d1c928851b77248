"""Faults that users reported of other tools, planted as they happened there; each names the report."""

from __future__ import annotations

from typing import Any

from campaigns.mutants.loose_limits import BF16
from campaigns.mutants.newer_families import MODERNBERT, NOMIC
from campaigns.mutants.plant import INT8_LINE, LABELS, MEAN, RANKER, ROBERTA, mutant


def _rounded_frequencies(network: Any) -> None:
    import torch

    for name, buffer in network.base.named_buffers():
        if name.endswith("inv_freq"):
            buffer.copy_(buffer.to(torch.bfloat16))


@mutant("certificate", "plant_torch", MODERNBERT, (BF16,))
def frequencies_in_bf16_of_modernbert(network: Any) -> None:
    """Rotary frequencies are cast with the weights, so that angles are off the more the further on a token stands (huggingface/transformers 25681)."""
    _rounded_frequencies(network)


@mutant("certificate", "plant_torch", NOMIC, (BF16,))
def frequencies_in_bf16_of_nomic(network: Any) -> None:
    """The same in a family whose layers all see all tokens (huggingface/transformers 25681)."""
    _rounded_frequencies(network)


@mutant("parity", "plant_torch", LABELS)
def half_as_many_heads(network: Any) -> None:
    """Attention has half the heads, each twice as wide, as where a fusion gets a wrong `--num_heads` (microsoft/onnxruntime)."""
    for layer in network.base.encoder.layer:
        attention = layer.attention.self
        attention.num_attention_heads //= 2
        attention.attention_head_size *= 2
        attention.scaling = attention.attention_head_size**-0.5


@mutant("parity", "plant_torch", RANKER)
def softmax_over_one_score(network: Any) -> None:
    """A re-ranker's score goes through a softmax over itself: every passage gets 1 (rohitg00/agentmemory 724)."""
    network.encoder.classifier.register_forward_hook(lambda _module, _inputs, score: score.softmax(-1))


@mutant("coverage", "plant_torch", LABELS)
def padded_rows_of_whole_tiles(network: Any) -> None:
    """Padded rows are NaN where the batch's longest is a multiple of 64, as in a kernel that masks by tiles (Blaizzy/mlx-embeddings 80)."""

    def spoil(module: Any, inputs: tuple[Any, ...], answer: tuple[Any, ...]) -> tuple[Any, ...]:
        mask = inputs[1]
        if mask.shape[1] % 64:
            return answer
        padded = (mask == 0).any(dim=1)
        return tuple(out.masked_fill(padded.view(-1, *[1] * (out.dim() - 1)), float("nan")) for out in answer)

    network.register_forward_hook(spoil)


@mutant("certificate", "plant_onnx", LABELS, INT8_LINE)
def one_scale_for_the_table_of_words(graph: Any) -> None:
    """The table of words has 8 bits too, with one scale for all of it, as quantize_dynamic does by default (microsoft/onnxruntime 5644)."""
    import numpy as np
    import onnx_ir as ir

    table = next(value for name, value in graph.graph.initializers.items() if name.endswith("word_embeddings.weight"))
    array = table.const_value.numpy()
    step = np.abs(array).max() / 127
    table.const_value = ir.tensor((np.rint(array / step) * step).astype(np.float32), name=table.name)


@mutant("parity", "plant_torch", ROBERTA, ({"pass": "pack_sequences"},))
def packed_rows_counted_from_zero(network: Any) -> None:
    """Packed rows count positions from 0, where RoBERTa's begin behind the padding id (huggingface/sentence-transformers 3879)."""
    table = network.base.embeddings.position_embeddings.weight
    table.copy_(table.roll(network.base.embeddings.padding_idx + 1, 0))


@mutant("rounding", "plant_torch", MEAN, (BF16,))
def mean_summed_in_bf16(network: Any) -> None:
    """Pooling adds up a text's tokens in bfloat16, which loses the more the longer it is (as before huggingface/sentence-transformers summed in float32)."""
    import torch

    right = network.pooling.forward

    def forward(hidden: Any, rows: Any, **options: Any) -> Any:
        mask = rows.named["attention_mask"]
        total = torch.zeros_like(hidden[:, 0], dtype=torch.bfloat16)
        for token in range(hidden.shape[1]):
            total = total + (hidden[:, token] * mask[:, token, None]).to(torch.bfloat16)
        return right((total / mask.sum(dim=1, keepdim=True).clamp(min=1)).float().unsqueeze(1).expand_as(hidden), rows, **options)

    network.pooling.forward = forward
