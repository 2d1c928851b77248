"""Rows of the coverage sweeps that begin and end as a tokenizer writes texts: a model may know them by that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from bertopt.core import Array

#: The token that a text begins with and the one that it ends with.
Frame = tuple[int, int]


def of_empty_text(ids: Array) -> Frame | None:
    """Return the frame of the tokens [S] that the empty text becomes; None for tokenizers that write none or another one."""
    return (int(ids[0]), int(ids[1])) if len(ids) == 2 else None


def free(mask: Array, frame: Frame | None) -> Array:
    """Return which valid tokens of `mask` [B, S] are no part of a frame; rows of fewer than three tokens have none."""
    places = np.asarray(mask == 1)
    if frame is not None:
        rows = np.flatnonzero(mask.sum(axis=1) > len(frame))
        places[rows, 0] = places[rows, mask[rows].sum(axis=1) - 1] = False
    return places


def framed(mask: Array, valid: Array, frame: Frame | None, pad_id: int) -> Array:
    """Return ids [B, S]: `valid` where tokens are `free`, the frame around them. Padding is on the right."""
    ids = np.full(mask.shape, pad_id, np.int64)
    ids[free(mask, frame)] = valid
    if frame is not None:
        rows = np.flatnonzero(mask.sum(axis=1) > len(frame))
        ids[rows, 0], ids[rows, mask[rows].sum(axis=1) - 1] = frame
    return ids


def second_texts(inputs: Mapping[str, Array], frame: Frame | None) -> Array:
    """Return which tokens [B, S] are of a pair's second text: by their type or, where no token has one, behind the token that ends a text."""
    valid, ids = np.asarray(inputs["attention_mask"] == 1), inputs["input_ids"]
    ends = np.asarray(ids == frame[1]) if frame is not None else np.zeros_like(valid)
    types = inputs.get("token_type_ids")
    second = types > 0 if types is not None and np.any(types > 0) else ends.cumsum(axis=1) > 0
    return np.asarray(valid & second & ~ends)
