"""Rows packed by hand as `Spec.network_inputs` says, and the answers of each text taken out of them again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bertopt.core import Spec


@dataclass(frozen=True)
class Text:
    """Ids and token types [S] of one text."""

    ids: np.ndarray
    types: np.ndarray


def make(spec: Spec, lengths: Sequence[int], seed: int = 0) -> list[Text]:
    """Random texts, without the special ids; the second half of each is of type 1."""
    dice = np.random.default_rng(seed)
    return [
        Text(dice.integers(5, spec.vocabulary, length), (np.arange(length) >= (length + 1) // 2).astype(np.int64))
        for length in lengths
    ]


def alone(spec: Spec, text: Text) -> dict[str, np.ndarray]:
    """A padded batch of this text alone."""
    arrays = {"input_ids": text.ids, "attention_mask": np.ones_like(text.ids), "token_type_ids": text.types}
    return {name: arrays[name][None] for name in spec.inputs}


def pack(spec: Spec, rows: Sequence[Sequence[Text]], length: int, slots: int) -> dict[str, np.ndarray]:
    """Rows of `length` tokens with `slots` places for texts, each row's padding at its end."""
    shape = (len(rows), length)
    arrays = {name: np.zeros(shape, np.int64) for name in ("token_type_ids", "position_ids", "segment_ids")}
    arrays["input_ids"] = np.full(shape, spec.pad_id, np.int64)
    arrays["first_tokens"] = np.zeros((len(rows), slots), np.int64)
    for row, texts in enumerate(rows):
        start = 0
        for number, text in enumerate(texts):
            place = slice(start, start + len(text.ids))
            arrays["input_ids"][row, place] = text.ids
            arrays["token_type_ids"][row, place] = text.types
            arrays["position_ids"][row, place] = np.arange(len(text.ids)) + spec.position_offset
            arrays["segment_ids"][row, place] = number + 1
            arrays["first_tokens"][row, number] = start
            start += len(text.ids)
    return {name: arrays[name] for name in spec.network_inputs}


def unpack(spec: Spec, inputs: dict[str, np.ndarray], answers: Sequence[Any], row: int, text: int) -> list[np.ndarray]:
    """Each answer of the `text`-th text of a row, as the padded network gives it for the text alone, without batch."""
    if spec.granularity == "text":
        return [np.asarray(answer)[row, text] for answer in answers]
    return [np.asarray(answer)[row, inputs["segment_ids"][row] == text + 1] for answer in answers]
