"""Rows of the coverage sweeps that begin and end as a tokenizer writes texts: a model may know them by that."""

from __future__ import annotations

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
