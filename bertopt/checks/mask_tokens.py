"""Mask tokens in random rows of a model that scales a row by their number (ESM)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from bertopt.core import Spec

if TYPE_CHECKING:
    from bertopt.core import Array

#: The shares of mask tokens that rows with any have in turn: a few, as in training; half; and nearly all, as where a text is written from
#: mask tokens step by step.
SHARES = (1 / 6, 1 / 2, 9 / 10)


def placed(spec: Spec, ids: Array, mask: Array, pattern: int, rng: np.random.Generator) -> Array:
    """Return ids [B, S] with some mask tokens among the valid tokens of every second row, and none in the others. `pattern`, the number of a
    padding pattern, chooses where both begin: with the first row if it is odd. A row's first valid token is never a mask token: without any
    other token a row has no output."""
    own = next(number for number in range(spec.vocabulary) if number not in (spec.pad_id, spec.dropped_id))
    ids = np.where((mask == 1) & (ids == spec.dropped_id), own, ids)
    for number, row in enumerate(range(1 - pattern % 2, len(ids), 2), pattern // 2):
        valid = np.flatnonzero(mask[row])[1:]
        ids[row, rng.permutation(valid)[: math.ceil(SHARES[number % len(SHARES)] * len(valid))]] = spec.dropped_id
    return ids
