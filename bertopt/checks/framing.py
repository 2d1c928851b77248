"""Put a tokenizer's special tokens around rows of random ids: a model may treat rows without them differently."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from bertopt.core import Array

#: The ids of the special tokens that begin and end a text, such as [CLS] and [SEP].
Frame = tuple[int, int]


def of_empty_text(ids: Array) -> Frame | None:
    """Return the frame, given the tokens [S] of the empty text; None where these are not exactly two."""
    return (int(ids[0]), int(ids[1])) if len(ids) == 2 else None


def free(mask: Array, frame: Frame | None) -> Array:
    """Return which valid tokens of `mask` [B, S] are not part of a frame. Rows of fewer than three tokens have no frame."""
    places = np.asarray(mask == 1)
    if frame is not None:
        rows = np.flatnonzero(mask.sum(axis=1) > len(frame))
        places[rows, 0] = places[rows, mask[rows].sum(axis=1) - 1] = False
    return places


def framed(mask: Array, valid: Array, frame: Frame | None, pad_id: int) -> Array:
    """Return ids [B, S], right-padded: the ids `valid` in the places that are `free`, the frame around them."""
    ids = np.full(mask.shape, pad_id, np.int64)
    ids[free(mask, frame)] = valid
    if frame is not None:
        rows = np.flatnonzero(mask.sum(axis=1) > len(frame))
        ids[rows, 0], ids[rows, mask[rows].sum(axis=1) - 1] = frame
    return ids


def second_texts(inputs: Mapping[str, Array], frame: Frame | None) -> Array:
    """Return which tokens [B, S] belong to the second text of a pair: those of type 1 or, without token types, those after the first end token."""
    valid, ids = np.asarray(inputs["attention_mask"] == 1), inputs["input_ids"]
    ends = np.asarray(ids == frame[1]) if frame is not None else np.zeros_like(valid)
    types = inputs.get("token_type_ids")
    second = types > 0 if types is not None and np.any(types > 0) else ends.cumsum(axis=1) > 0
    return np.asarray(valid & second & ~ends)
