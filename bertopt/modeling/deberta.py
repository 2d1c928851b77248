"""The first DeBERTa as a graph can hold it. B rows, S tokens, R rows of the table of distances, D head size.

transformers' own code finds the part of the table for the length of a batch by a tensor, which a graph cannot hold for every length, and
projects that part in every call: in ONNX a product of inputs, which is never computed ahead and which INT8 would quantise. Its norms are
spelled out and cast to float32 whatever they are given: in a graph that is cast later, squares of residuals would leave float16's range.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch


def prepare(encoder: Any) -> None:
    """Let a DeBERTa compute the same in another way wherever a graph is made of it; run eagerly, it is transformers' own code."""
    from transformers.models.deberta.modeling_deberta import DebertaLayerNorm, DisentangledSelfAttention

    longest = int(encoder.config.max_position_embeddings)
    for module in encoder.modules():
        if isinstance(module, DebertaLayerNorm):
            module.forward = MethodType(_norm, module)
        if isinstance(module, DisentangledSelfAttention) and module.relative_attention:
            # Whether each distance of the longest text has a row, so that none is clamped.
            module.has_all_distances = module.max_relative_positions >= longest
            module.disentangled_att_bias = MethodType(_scores, module)


def _norm(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    if not torch.compiler.is_compiling():
        return type(self).forward(self, hidden)  # type: ignore[no-any-return]
    return torch.nn.functional.layer_norm(hidden, self.weight.shape, self.weight, self.bias, self.variance_epsilon)


def norm_at_once(encoder: Any) -> None:
    """Let the norms of a DeBERTa round as they do in half precision where a simulation rounds the result of every operator: their sums and
    squares are float32 there."""
    from transformers.models.deberta.modeling_deberta import DebertaLayerNorm

    for module in encoder.modules():
        if isinstance(module, DebertaLayerNorm):
            module.forward = MethodType(_norm_at_once, module)


def _norm_at_once(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    normed = torch.nn.functional.layer_norm(hidden, self.weight.shape, eps=self.variance_epsilon)
    return self.weight * normed + self.bias  # type: ignore[no-any-return]


def _scores(self: Any, query: torch.Tensor, key: torch.Tensor, relative: torch.Tensor, table: torch.Tensor, factor: int) -> Any:
    """Return what distances add to the scores, [B, heads, S, S] or 0, of queries (scaled) and keys [B, heads, S, D] at the distances
    query - key [1, S, S], by a `table` [R, hidden] with a row for each of them, the least first."""
    if not torch.compiler.is_compiling():
        return type(self).disentangled_att_bias(self, query, key, relative, table, factor)
    most, sequence = self.max_relative_positions, key.shape[2]
    behind, before = (each.expand(*key.shape[:3], sequence) for each in (sequence + relative.unsqueeze(1), sequence - relative.unsqueeze(1)))
    # The row of each distance from -S on; distances beyond the table have its ends.
    used = torch.arange(2 * sequence, device=table.device) + (most - sequence)
    if not self.has_all_distances:
        used = used.clamp(0, 2 * most - 1)

    def rows(project: Any, scale: float) -> torch.Tensor:
        """Return the projected rows that a batch of this length uses, [1, heads, D, 2 · S]."""
        if torch.onnx.is_in_onnx_export():
            # A product of constants, which runtimes compute when they open the graph. Taking rows of it by the batch's length keeps its result from
            # being a constant itself, which quantisers would take for weights, and OpenVINO multiplies by in float32 alone.
            projected = self.transpose_for_scores(project(table.unsqueeze(0)) / scale).index_select(2, used)
        else:
            projected = self.transpose_for_scores(project(table[used].unsqueeze(0)) / scale)
        return projected.transpose(-1, -2)  # type: ignore[no-any-return]

    score: Any = 0
    if "c2p" in self.pos_att_type:
        score = score + (query @ rows(self.pos_proj, 1.0)).gather(-1, behind)
    if "p2c" in self.pos_att_type:
        score = score + (key @ rows(self.pos_q_proj, (key.shape[3] * factor) ** 0.5).to(key.dtype)).gather(-1, before).transpose(-1, -2)
    return score
