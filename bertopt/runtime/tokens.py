"""Texts to int64 arrays with the checkpoint's own tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bertopt.core import Spec
from bertopt.errors import IntegrityError

if TYPE_CHECKING:
    from bertopt.core import Array

#: One text, or a pair such as (query, passage).
Text = str | tuple[str, str]


@dataclass(frozen=True)
class Tokens:
    """One encoded text: token ids and types, special tokens included, and where each came from."""

    ids: list[int]
    types: list[int]
    special: list[int]
    offsets: list[tuple[int, int]]
    sequence: list[int | None]

    def __len__(self) -> int:
        return len(self.ids)


class Tokenizer:
    """`tokenizer.json` of a stage, through the tokenizers library: what transformers' fast tokenizer would give."""

    def __init__(self, directory: Path, spec: Spec, max_length: int | None = None) -> None:
        from tokenizers import Tokenizer as Fast

        path = directory / "tokenizer.json"
        if not path.is_file():
            raise IntegrityError(f"'{directory}' has no tokenizer.json; restore the artefact")
        self.spec = spec
        self.fast: Any = Fast.from_file(str(path))
        self.fast.no_padding()
        self.fast.enable_truncation(min(spec.text_length if max_length is None else max_length, spec.max_length))

    def encode(self, texts: Sequence[Text]) -> list[Tokens]:
        encoded = self.fast.encode_batch(list(texts))
        return [Tokens(e.ids, e.type_ids, e.special_tokens_mask, e.offsets, e.sequence_ids) for e in encoded]

    def batch(self, tokens: Sequence[Tokens]) -> dict[str, Array]:
        """Right-padded arrays [B, S] for every input of the model, S the longest text's length."""
        shape = (len(tokens), max(1, *(len(t) for t in tokens)) if tokens else 1)
        arrays = {
            "input_ids": np.full(shape, self.spec.pad_id, np.int64),
            "attention_mask": np.zeros(shape, np.int64),
            "token_type_ids": np.zeros(shape, np.int64),
        }
        for row, text in enumerate(tokens):
            arrays["input_ids"][row, : len(text)] = text.ids
            arrays["attention_mask"][row, : len(text)] = 1
            arrays["token_type_ids"][row, : len(text)] = text.types
        return {name: arrays[name] for name in self.spec.inputs}
