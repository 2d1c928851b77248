"""Texts to token ids with the checkpoint's own tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bertopt.core import Spec
from bertopt.errors import IntegrityError, UsageError
from bertopt.modeling import packing

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


@dataclass(frozen=True)
class Encoded:
    """Texts as one array of tokens; which of them were cut; and, where asked for, the origin of each token."""

    flat: packing.Flat
    lengths: Array
    cut: list[int]
    origins: list[Tokens] | None = None


class Tokenizer:
    """`tokenizer.json` of a stage, through the tokenizers library: what transformers' fast tokenizer would give."""

    def __init__(self, directory: Path, spec: Spec, max_length: int | None = None) -> None:
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise IntegrityError(f"'{directory}' has no tokenizer.json; restore the artefact")
        self.spec, self._content = spec, path.read_bytes()
        self.limit = min(spec.text_length if max_length is None else max_length, spec.max_length)
        self.fast = self._open()
        self.fast.enable_truncation(self.limit)
        self._uncut: Any = None
        #: Whether a single text has token types other than 0.
        self._typed = any(self.fast.encode("a").type_ids)

    def _open(self) -> Any:
        from tokenizers import Tokenizer as Fast

        fast: Any = Fast.from_buffer(self._content)
        fast.no_padding()
        fast.no_truncation()
        return fast

    def encode(self, texts: Sequence[Text]) -> list[Tokens]:
        return [_tokens(one) for one in self.fast.encode_batch(list(texts))]

    def ids(self, text: Text, truncate: bool = True, first: int = 0) -> tuple[list[int], list[int] | None, bool]:
        """Ids of one text, its types where they are not all 0, and whether it was cut. See `flat`."""
        one = (self.fast if truncate else self._whole).encode(*((text,) if isinstance(text, str) else text))
        ids = one.ids or [self.spec.pad_id]
        if not truncate:
            self._check([len(ids)], first)
        types = (one.type_ids or [0]) if self._typed or not isinstance(text, str) else None
        return ids, types, len(ids) == self.limit and bool(one.overflowing)

    def flat(self, texts: Sequence[Text], truncate: bool = True, first: int = 0, origins: bool = False) -> Encoded:
        """Texts, of which the first has number `first`, for `packing`.

        Without `truncate`, raises UsageError for the first that is longer than `limit`.
        """
        fast = self.fast if truncate else self._whole
        found = (fast.encode_batch if origins else fast.encode_batch_fast)(list(texts))
        # A tokenizer without special tokens gives the empty text none: then it is one token of padding.
        ids = [one.ids or [self.spec.pad_id] for one in found]
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        if not truncate:
            self._check(lengths.tolist(), first)
        total = int(lengths.sum())
        flat = np.fromiter(chain.from_iterable(ids), np.int64, total)
        types = None
        if "token_type_ids" in self.spec.inputs and (self._typed or not all(isinstance(text, str) for text in texts)):
            types = np.fromiter(chain.from_iterable(one.type_ids or [0] for one in found), np.int64, total)
        cut = [first + i for i in np.flatnonzero(lengths == self.limit).tolist() if truncate and found[i].overflowing]
        where = [_tokens(one) for one in found] if origins else None
        return Encoded(packing.flat(self.spec, flat, types, lengths), lengths, cut, where)

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

    @property
    def _whole(self) -> Any:
        """The tokenizer that cuts nothing: whether one cuts is its own state, which other threads would see change."""
        self._uncut = self._uncut or self._open()
        return self._uncut

    def _check(self, lengths: Sequence[int], first: int) -> None:
        for number, length in enumerate(lengths, first):
            if length > self.limit:
                raise UsageError(
                    f"texts[{number}] has {length} tokens; the model takes at most {self.limit}: shorten it, or leave out "
                    "truncate=False to have it cut"
                )


def _tokens(one: Any) -> Tokens:
    return Tokens(one.ids, one.type_ids, one.special_tokens_mask, one.offsets, one.sequence_ids)
