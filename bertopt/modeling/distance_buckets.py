"""Buckets of distances as a table of whole numbers wherever a graph is made. S tokens.

DeBERTa-v2 and MPNet put far distances into buckets by their logarithm. Computed in a graph it is rounded to the precision of everything else: in
OpenVINO's bfloat16, or in a graph cast to float16, many distances fall into the bucket beside theirs.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch

#: Name of the table in the module that asks for buckets: one for each distance, from the least on.
_TABLE = "bucket_of_distance"
#: What transformers' MPNet takes whatever its configuration says: beyond this distance all tokens share a bucket.
_BUCKETS, _FARTHEST = 32, 128


def prepare(encoder: Any) -> None:
    """Let a transformers model of these families read buckets from a table in a graph; run eagerly, it is transformers' own code."""
    base = encoder.base_model
    family = base.config.model_type
    if family == "mpnet":
        stack = base.encoder
        distances = torch.arange(-_FARTHEST, _FARTHEST + 1)
        stack.register_buffer(_TABLE, stack.relative_position_bucket(distances, _BUCKETS, _FARTHEST), persistent=False)
        stack.relative_position_bucket = MethodType(_of_mpnet, stack)
    elif family == "deberta-v2" and getattr(base.encoder, "relative_attention", False) and base.encoder.position_buckets > 0:
        from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

        stack, longest = base.encoder, int(base.config.max_position_embeddings)
        distances = torch.arange(1 - longest, longest)
        table = make_log_bucket_position(distances, stack.position_buckets, stack.max_relative_positions).long()
        stack.register_buffer(_TABLE, table, persistent=False)
        stack.get_rel_pos = MethodType(_of_deberta, stack)


def _of_mpnet(self: Any, relative_position: torch.Tensor, num_buckets: int = _BUCKETS, max_distance: int = _FARTHEST) -> torch.Tensor:
    if not torch.compiler.is_compiling() or (num_buckets, max_distance) != (_BUCKETS, _FARTHEST):
        return type(self).relative_position_bucket(relative_position, num_buckets, max_distance)  # type: ignore[no-any-return]
    found: torch.Tensor = getattr(self, _TABLE)[relative_position.clamp(-_FARTHEST, _FARTHEST) + _FARTHEST]
    return found


def _of_deberta(self: Any, hidden_states: torch.Tensor, query_states: Any = None, relative_pos: Any = None) -> Any:
    """Return the bucket of each query's distance from each key, [1, S, S]."""
    if not torch.compiler.is_compiling() or query_states is not None or relative_pos is not None:
        return type(self).get_rel_pos(self, hidden_states, query_states, relative_pos)
    table = getattr(self, _TABLE)
    places = torch.arange(hidden_states.shape[-2], device=table.device)
    return table[places[:, None] - places[None, :] + len(table) // 2].unsqueeze(0)
