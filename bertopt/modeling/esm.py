"""ESM's embeddings, which scale a row by how many mask tokens it has, finite for every row and for rows of several texts. R rows, L tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

#: Share of the tokens that ESM's training hid, by which transformers scales embeddings whatever a configuration says.
TRAINED_RATIO = 0.15 * 0.8


def prepare(encoder: Any) -> None:
    """Fit transformers' ESM `encoder` for every pass.

    The head for contacts is taken out, since no task of bertopt runs it. Stored frequencies of rotary positions are no longer among the
    weights: rounded to half precision they would turn a late position by whole turns.
    """
    base = encoder.base_model
    base.contact_head = None
    if base.rotary_embeddings is not None:
        base.rotary_embeddings._non_persistent_buffers_set.add("inv_freq")
    base.embeddings = Embeddings(base.embeddings)


class Embeddings(nn.Module):
    """transformers' `EsmEmbeddings` under its names, with the same numbers for each row that it has any for.

    It differs where those of transformers are not finite, in a row without tokens or with mask tokens alone, and where a row has mask tokens
    that `attention_mask` leaves out, which transformers counts all the same: here they change no other token.
    """

    def __init__(self, old: Any) -> None:
        super().__init__()
        for name, child in old.named_children():
            self.add_module(name, child)
        self.padding_idx = int(old.padding_idx)
        self.absolute = old.position_embedding_type == "absolute"
        self.dropped_id: int | None = int(old.mask_token_id) if old.token_dropout else None

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, position_ids: torch.Tensor | None = None, **_: Any
    ) -> torch.Tensor:
        """Vectors [R, L, H] of ids [R, L]. The mask is [R, L], or, for rows of several texts, [R, 1, L, L]: boolean or added to scores."""
        embeddings: torch.Tensor = self.get_submodule("word_embeddings")(input_ids)
        if self.dropped_id is not None:
            dropped = input_ids == self.dropped_id
            embeddings = embeddings.masked_fill(dropped.unsqueeze(-1), 0.0)
            embeddings = (embeddings * (1 - TRAINED_RATIO) / self._kept(dropped, attention_mask)).to(embeddings.dtype)
        if self.absolute:
            if position_ids is None:
                own = input_ids.ne(self.padding_idx).int()
                position_ids = (torch.cumsum(own, dim=1).type_as(own) * own).long() + self.padding_idx
            embeddings = embeddings + self.get_submodule("position_embeddings")(position_ids)
        if self._modules.get("layer_norm") is not None:
            embeddings = self.get_submodule("layer_norm")(embeddings)
        if attention_mask is not None and attention_mask.dim() == 2:
            embeddings = (embeddings * attention_mask.unsqueeze(-1)).to(embeddings.dtype)
        return embeddings

    def _kept(self, dropped: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """The share of a row's tokens, or of a text's, that are no mask tokens, in float32: [R, 1, 1] or [R, L, 1]; 1 where it is 0."""
        if mask is None:
            mask = torch.ones_like(dropped, dtype=torch.long)
        if mask.dim() == 2:
            count = (dropped & (mask != 0)).sum(-1, keepdim=True)
            length = mask.sum(-1, keepdim=True)
        else:
            # Tokens of the same text; a mask that is added is 0 there.
            same = (mask if mask.dtype == torch.bool else mask == 0)[:, 0].float()
            count = (same @ dropped.unsqueeze(-1).float()).squeeze(-1)
            length = same.sum(-1)
        kept = 1 - count.float() / length.clamp(min=1)
        return torch.where(kept == 0, torch.ones_like(kept), kept).unsqueeze(-1)
