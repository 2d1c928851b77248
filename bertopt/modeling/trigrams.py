"""MobileBERT's embeddings, each with those of the tokens before and after beside it. B rows, S tokens, E embedding size, H hidden.

transformers' module takes them from slices of S - 1 tokens, for which torch.export makes a graph that does not hold for rows of two tokens,
and so refuses one for every length. This one has its parts and computes the same from slices of S.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class TrigramEmbeddings(nn.Module):
    """transformers' `MobileBertEmbeddings` with `trigram_input`, under its names."""

    def __init__(self, old: Any) -> None:
        super().__init__()
        for name, child in old.named_children():
            self.add_module(name, child)

    def forward(
        self, input_ids: torch.Tensor | None = None, token_type_ids: torch.Tensor | None = None, position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Vectors [B, S, H] of ids [B, S], or of words' embeddings [B, S, E]."""
        words: torch.Tensor = self.get_submodule("word_embeddings")(input_ids) if inputs_embeds is None else inputs_embeds
        beside = nn.functional.pad(words, (0, 0, 1, 1))
        trigrams = torch.cat([beside[:, 2:], words, beside[:, :-2]], dim=2)
        if position_ids is None:
            position_ids = torch.arange(words.shape[1], device=words.device).unsqueeze(0)
        if token_type_ids is None:
            token_type_ids = torch.zeros(words.shape[:2], dtype=torch.long, device=words.device)
        hidden = self.get_submodule("embedding_transformation")(trigrams) + self.get_submodule("position_embeddings")(position_ids)
        normed: torch.Tensor = self.get_submodule("LayerNorm")(hidden + self.get_submodule("token_type_embeddings")(token_type_ids))
        return normed
