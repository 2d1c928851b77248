"""ConvBERT's attention, half of whose channels are convolutions over the tokens beside each. B rows, S tokens, H hidden, A channels of either half.

transformers' module convolves over padding as over tokens. This one has its parts and computes the same, but convolves over nothing where a
token is masked, as both do beside the ends of a row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.models.convbert.modeling_convbert import ConvBertSelfAttention


class SpanAttention(ConvBertSelfAttention):  # type: ignore[misc]
    """`old` with masked convolutions.

    The pointwise half of its separable convolution is a product of every token with one matrix, and is written as one, so that it is
    fused, quantised and cast as products are.
    """

    def __init__(self, old: Any) -> None:
        nn.Module.__init__(self)
        for name, child in old.named_children():
            if name not in ("unfold", "key_conv_attn_layer"):
                self.add_module(name, child)
        separable = old.key_conv_attn_layer
        with torch.device("meta"):
            product = nn.Linear(separable.pointwise.in_channels, separable.pointwise.out_channels)
        product.weight = nn.Parameter(separable.pointwise.weight.detach().squeeze(-1))
        product.bias = nn.Parameter(separable.bias.detach().squeeze(-1))
        self.key_conv_attn_layer = nn.ModuleDict({"depthwise": separable.depthwise, "pointwise": product})
        self.num_attention_heads, self.conv_kernel_size = int(old.num_attention_heads), int(old.conv_kernel_size)
        self.attention_head_size, self.all_head_size = int(old.attention_head_size), int(old.all_head_size)

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, encoder_hidden_states: torch.Tensor | None = None, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Return [B, S, H] of tokens `hidden_states` [B, S, H], and attention [B, heads, S, S]; the mask [B, 1, S, S] is added to the scores."""
        # Every query of a padded row sees the same keys.
        valid = None if attention_mask is None else attention_mask[:, 0, 0, :, None] >= 0
        query = self.query(hidden_states)
        context, weights = self._attended(query, hidden_states, attention_mask)
        spans = self._convolved(query, hidden_states, valid)
        return torch.cat([context, spans], dim=2).flatten(2), weights

    def _attended(self, query: torch.Tensor, hidden: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention [B, S, heads, A / heads], and its weights."""
        asking, key, value = (self._by_head(each).transpose(1, 2) for each in (query, self.key(hidden), self.value(hidden)))
        scores = asking @ key.transpose(2, 3) * self.attention_head_size**-0.5
        weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
        return (weights @ value).transpose(1, 2), weights

    def _convolved(self, query: torch.Tensor, hidden: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
        """Each token's own convolution [B, S, heads, A / heads]: its kernel comes from the tokens around it, times its query."""
        around = (hidden if valid is None else hidden * valid).transpose(1, 2)
        keys = self.key_conv_attn_layer["depthwise"](around).transpose(1, 2)
        # Nobody reads a masked token's. Straight behind it, fusions make the transposition a part of the product, which quantisers then leave.
        keys = self.key_conv_attn_layer["pointwise"](keys if valid is None else keys * valid)
        kernels = self.conv_kernel_layer(keys * query).unflatten(2, (self.num_attention_heads, self.conv_kernel_size))
        kernels = torch.softmax(kernels, dim=-1)
        values = self.conv_out_layer(hidden)
        values = values if valid is None else values * valid
        reach, tokens = self.conv_kernel_size // 2, hidden.shape[1]
        beside = nn.functional.pad(values, (0, 0, reach, reach))
        # [B, S, A, K]: what is up to `reach` tokens before and behind each.
        windows = torch.stack([beside[:, at : at + tokens] for at in range(self.conv_kernel_size)], dim=-1)
        return (self._by_head(windows) @ kernels.unsqueeze(-1)).squeeze(-1)

    def _by_head(self, channels: Any) -> torch.Tensor:
        """[B, S, A, …] as [B, S, heads, A / heads, …]."""
        found: torch.Tensor = channels.unflatten(2, (self.num_attention_heads, self.attention_head_size))
        return found


def install(base: Any) -> None:
    """Put the module in place of transformers' in every layer of a ConvBERT."""
    for layer in base.encoder.layer:
        layer.attention.self = SpanAttention(layer.attention.self).train(layer.training)
