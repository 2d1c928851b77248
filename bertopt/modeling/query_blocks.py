"""transformers' eager attention in blocks of queries, since the scores of long rows would take gigabytes.

B rows, S tokens, Q queries, D head size. Each query's softmax is over all keys, so that the result is that of all queries at once.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

#: The name under which transformers knows this attention.
NAME = "bertopt_query_blocks"
#: Elements of one row's scores in one layer beyond which a row is long: with 16 heads, 4,096 tokens. Batches of shorter rows run as in
#: transformers, however many there are, and so are they timed.
LONG_BYTES = 2**30
#: Scores that are made at once.
BLOCK_BYTES = 2**28


def register() -> None:
    """Make the attention known to transformers, with the masks of its eager attention."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, eager_mask)


@contextlib.contextmanager
def where_long(encoder: Any, heads: int, sequence: int) -> Iterator[None]:
    """Let `encoder` attend in blocks inside the context if its attention is eager and rows of S tokens are long.

    Not while a graph is made of it, whose sizes are not the rows'. Families without transformers' attention interface attend as ever.
    """
    config = encoder.base_model.config
    if (
        torch.compiler.is_compiling() or config._attn_implementation != "eager" or not encoder._supports_attention_backend
        or 4 * heads * sequence**2 <= LONG_BYTES
    ):  # fmt: skip
        yield
        return
    register()
    encoder.set_attn_implementation(NAME)
    try:
        yield
    finally:
        encoder.set_attn_implementation("eager")


def attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None, **options: Any
) -> tuple[torch.Tensor, None]:
    """Attend from queries [B, heads, Q, D] to keys and values [B, heads, S, D], as the family's own function does. Returns [B, Q, heads, D]."""
    eager = sys.modules[type(module).__module__].eager_attention_forward
    block = max(1, BLOCK_BYTES // (4 * query.shape[0] * query.shape[1] * key.shape[2]))
    found = []
    for start in range(0, query.shape[2], block):
        rows = slice(start, start + block)
        # A mask of one row is every query's.
        mask = attention_mask if attention_mask is None or attention_mask.shape[2] == 1 else attention_mask[:, :, rows]
        found.append(eager(module, query[:, :, rows], key, value, mask, **options)[0])
    return torch.cat(found, dim=1), None
