"""Mask tokens in random rows of a model that scales a row by their number (ESM)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bertopt.core import Spec

if TYPE_CHECKING:
    from bertopt.core import Array

#: In rows that have mask tokens, one token in this many is one.
SHARE = 6


def placed(spec: Spec, ids: Array, mask: Array, odd: int, rng: np.random.Generator) -> Array:
    """Return ids [B, S] with some mask tokens among the valid tokens of every second row, from the first one on or, if `odd` is 0, the second,
    and none in the others. A row's first valid token is never one: without any other token a row has no output."""
    own = next(number for number in range(spec.vocabulary) if number not in (spec.pad_id, spec.dropped_id))
    ids = np.where((mask == 1) & (ids == spec.dropped_id), own, ids)
    for row in range(1 - odd, len(ids), 2):
        valid = np.flatnonzero(mask[row])[1:]
        ids[row, rng.permutation(valid)[: -(-len(valid) // SHARE)]] = spec.dropped_id
    return ids
