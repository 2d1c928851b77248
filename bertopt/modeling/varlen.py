"""Attention over one row of several texts, given where each begins: without mask or padding.

T tokens of the row, K places for texts, N texts with those that padding is divided into, Q queries, D head size.
"""

from __future__ import annotations

from typing import Any

import torch

from bertopt.errors import Unsupported

#: The name under which transformers knows this attention.
NAME = "bertopt_varlen"


def register() -> None:
    """Make the attention known to transformers, through its two interfaces for attention of others."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, _no_mask)


def boundaries(segments: torch.Tensor, places: int, longest: int) -> torch.Tensor:
    """Return where each text begins and the last one ends, int32 [N + 1], from the row's `segments` [T].

    Texts are segments 1, 2, … in order and padding, segment 0, follows them; a place without a text is empty. Padding
    is divided into texts of at most `longest` tokens, so that attention writes every token. No value leaves the
    device, and N depends on shapes alone.
    """
    tokens = segments.shape[0]
    numbers = torch.arange(1, places + 2, device=segments.device)
    counting = torch.where(segments == 0, places + 1, segments)
    starts = torch.searchsorted(counting, numbers)
    # Enough for a row of padding and never fewer than two, so that one exported graph serves all shapes.
    extra = torch.arange(1, tokens // longest + 3, device=segments.device) * longest
    return torch.cat([starts, (starts[-1] + extra).clamp(max=tokens)]).int()


def attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, *,
    scaling: float | None = None, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Attend from queries [1, heads, Q, D] to keys and values [1, heads, T, D] of the same text.

    `bounds` int32 [1, 1, 2, N + 1] says where the texts begin, first for the queries, then for the keys. Returns
    [1, Q, heads, D]. Raises Unsupported where the kernel of a GPU cannot take the tensors.
    """
    if query.device.type == "cpu":
        answer = _by_text(query, key, value, bounds[0, 0].tolist(), scaling)
    else:
        if reason := unsupported(query.dtype, query.shape[-1]):
            raise Unsupported(reason)
        if scaling is not None and scaling != (usual := query.shape[-1] ** -0.5):
            query = query * (scaling / usual)
        q, k, v = (each[0].transpose(0, 1) for each in (query, key, value))
        # An upper bound, known without asking the device and the same for every shape, so that one exported graph serves
        # all: blocks beyond a text's end return at once.
        longest = module.config.max_position_embeddings
        # What torch.nn.attention.varlen.varlen_attn calls, without the operator in Python around it, which fills a tensor of zeros
        # in each call: a launch for each layer. AOTInductor calls this one from C++. From torch 2.14 on, varlen_attn takes cuDNN's
        # attention on sm90 and sm100 for texts of more than 128 tokens, which prepares a plan for every new size.
        found = torch.ops.aten._flash_attention_forward(q, k, v, bounds[0, 0, 0], bounds[0, 0, 1], longest, longest, 0.0, False, False)[0]
        answer = found.unsqueeze(0)
    return answer, None


def unsupported(dtype: torch.dtype, head_size: int) -> str | None:
    """Return why a GPU's kernel cannot take heads of this type and size, or None."""
    if dtype not in (torch.float16, torch.bfloat16):
        return f"attention: varlen takes half precision only on CUDA; got {str(dtype).removeprefix('torch.')}: put pack_sequences after cast_half"
    if head_size % 8:
        return f"attention: varlen takes head sizes that are multiples of 8 on CUDA; got {head_size}: use attention: masked"
    return None


def _by_text(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: list[list[int]], scaling: float | None
) -> torch.Tensor:
    """The same text after text, for devices without such a kernel. [1, Q, heads, D]"""
    answer = torch.zeros_like(query)
    ends = zip(bounds[0], bounds[0][1:], bounds[1], bounds[1][1:], strict=False)
    for first, last, begin, end in ends:
        if last > first and end > begin:
            answer[:, :, first:last] = torch.nn.functional.scaled_dot_product_attention(
                query[:, :, first:last], key[:, :, begin:end], value[:, :, begin:end], scale=scaling
            )
    return answer.transpose(1, 2)


def _no_mask(*_: Any, attention_mask: torch.Tensor | None = None, **__: Any) -> torch.Tensor | None:
    return attention_mask
