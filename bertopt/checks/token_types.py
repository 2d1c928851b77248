"""Token types of random rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bertopt.core import Spec

if TYPE_CHECKING:
    from bertopt.core import Array


def of_rows(spec: Spec, shape: tuple[int, int], padding: str, rng: np.random.Generator) -> Array:
    """Return token types [B, S] for rows of a padding pattern. As in pairs, the second half of every odd row has the second type; of a single
    row likewise. Rows with holes have every type in any order but for their first token, as programs that make their own rows may."""
    batch, sequence = shape
    types = np.zeros(shape, np.int64)
    if spec.token_types > 1 and padding == "holes":
        types[:, 1:] = rng.integers(0, spec.token_types, (batch, sequence - 1))
    elif spec.token_types > 1:
        types[(batch > 1) :: 2, sequence // 2 :] = 1
    return types
