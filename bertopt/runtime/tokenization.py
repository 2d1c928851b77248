"""Tokenise texts with the checkpoint's tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bertopt.core import Spec
from bertopt.errors import IntegrityError, UsageError
from bertopt.modeling import packing
from bertopt.spec import Text

if TYPE_CHECKING:
    from bertopt.core import Array

#: Pairs are shortened before they are truncated where each text has more characters than this many times the limit.
LONG_PARTS = 8
#: Tokenizers kept that split texts into windows, one for each stride and for texts or pairs.
MOST_STRIDES = 4


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
    """Texts as one array of tokens; the numbers of truncated texts; and, if requested, the origin of each token."""

    flat: packing.Flat
    lengths: Array
    cut: list[int]
    origins: list[Tokens] | None = None


class Tokenizer:
    """The `tokenizer.json` of a stage in the tokenizers library, with the results of transformers' fast tokenizer."""

    def __init__(self, directory: Path, spec: Spec, max_length: int | None = None) -> None:
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise IntegrityError(f"'{directory}' has no tokenizer.json; restore the artefact")
        self.spec, self._content = spec, path.read_bytes()
        self.limit = min(spec.text_length if max_length is None else max_length, spec.max_length)
        self.fast = self._open()
        #: The end at which a long text is truncated, `left` or `right`.
        self.side = _truncation_side(directory)
        self.fast.enable_truncation(self.limit, direction=self.side)
        self._uncut: Any = None
        self._windowed: dict[tuple[int, bool], Any] = {}
        #: Whether texts have token types at all, and whether those of a single text are not all 0.
        self.gives_types = _gives_types(directory)
        self._typed = self.gives_types and any(self.fast.encode("a").type_ids)

    def _open(self) -> Any:
        from tokenizers import Tokenizer as Fast

        fast: Any = Fast.from_buffer(self._content)
        fast.no_padding()
        fast.no_truncation()
        return fast

    def encode(self, texts: Sequence[Text]) -> list[Tokens]:
        return [self._tokens(one) for one in self.fast.encode_batch(self._shortened(texts))]

    def ids(self, text: Text, truncate: bool = True, first: int = 0) -> tuple[list[int], list[int] | None, bool]:
        """Return the ids of one text, its types where they may be other than 0, and whether it was truncated. See `flat`."""
        if truncate and not isinstance(text, str):
            text = self._short_pair(*text)
        one = (self.fast if truncate else self.whole).encode(*((text,) if isinstance(text, str) else text))
        ids = one.ids or [self.spec.pad_id]
        if not truncate:
            self._check([len(ids)], first)
        types = (one.type_ids or [0]) if self._typed or (self.gives_types and not isinstance(text, str)) else None
        return ids, types, len(ids) == self.limit and bool(one.overflowing)

    def flat(self, texts: Sequence[Text], truncate: bool = True, first: int = 0, origins: bool = False) -> Encoded:
        """Return texts, of which the first has number `first`, encoded for `packing`.

        Without `truncate`, raise UsageError for the first text that is longer than `limit`.
        """
        fast = self.fast if truncate else self.whole
        found = (fast.encode_batch if origins else fast.encode_batch_fast)(self._shortened(texts) if truncate else list(texts))
        cut = [first + i for i, one in enumerate(found) if truncate and len(one) == self.limit and one.overflowing]
        if not truncate:
            self._check(list(map(len, found)), first)
        return self.encoded(found, not all(isinstance(text, str) for text in texts), cut, origins)

    def encoded(self, found: Sequence[Any], pairs: bool, cut: list[int], origins: bool) -> Encoded:
        """Return encodings of the tokenizers library as one array; `pairs` says whether there are pairs among the texts."""
        # Without special tokens the empty text has no tokens; it gets one of padding.
        ids = [one.ids or [self.spec.pad_id] for one in found]
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        total = int(lengths.sum())
        flat = np.fromiter(chain.from_iterable(ids), np.int64, total)
        types = None
        if "token_type_ids" in self.spec.inputs and (self._typed or (self.gives_types and pairs)):
            types = np.fromiter(chain.from_iterable(one.type_ids or [0] for one in found), np.int64, total)
        where = [self._tokens(one) for one in found] if origins else None
        return Encoded(packing.flat(self.spec, flat, types, lengths), lengths, cut, where)

    def cut(self, text: Text) -> Any:
        """Return the tokenizers library's encoding of one text, truncated if it is too long."""
        return self.fast.encode(*((text,) if isinstance(text, str) else self._short_pair(*text)))

    def windows(self, text: Text, stride: int) -> list[Any]:
        """Return the tokenizers library's encodings of a text that is too long, as windows over it (or over the second text of a pair) that
        overlap by `stride` tokens."""
        pair = not isinstance(text, str)
        fast = self._windowed.get((stride, pair))
        if fast is None:
            fast = self._open()
            strategy = "only_second" if pair else "only_first"
            fast.enable_truncation(self.limit, stride=stride, strategy=strategy, direction=self.side)
            # Callers of a server may send any stride.
            self._windowed = dict([*self._windowed.items(), ((stride, pair), fast)][-MOST_STRIDES:])
        one = fast.encode(*((text,) if isinstance(text, str) else text))
        return [one, *one.overflowing]

    def batch(self, tokens: Sequence[Tokens]) -> dict[str, Array]:
        """Return right-padded arrays [B, S] for every input of the model; S is the length of the longest text."""
        shape = (len(tokens), max(1, *(len(t) for t in tokens)) if tokens else 1)
        ids, mask, types = (np.full(shape, fill, np.int64) for fill in (self.spec.pad_id, 0, 0))
        for row, text in enumerate(tokens):
            ids[row, : len(text)], mask[row, : len(text)], types[row, : len(text)] = text.ids, 1, text.types
        return self.spec.padded_inputs(ids, mask, types)

    def _shortened(self, texts: Sequence[Text]) -> list[Text]:
        return [text if isinstance(text, str) else self._short_pair(*text) for text in texts]

    def _short_pair(self, first: str, second: str) -> tuple[str, str]:
        """Return a shorter pair that is truncated to the same tokens. For two long texts the tokenizers library keeps every combination of the
        parts that it cuts off, which takes hours for a megabyte. (Not where the beginning is cut off: offsets would change.)"""
        if self.side == "left" or min(len(first), len(second)) <= LONG_PARTS * self.limit:
            return first, second
        one, other = self.whole.encode_batch([first, second], add_special_tokens=False)
        if min(len(one.ids), len(other.ids)) <= self.limit:
            return first, second
        # The longer text must stay the longer one: it decides which of them keeps an odd token.
        if len(one.ids) > len(other.ids):
            short, count = self._part(second, other, self.limit + 1)
            return self._part(first, one, count + 1)[0], short
        short, count = self._part(first, one, self.limit + 1)
        return short, self._part(second, other, count)[0]

    def _part(self, text: str, encoded: Any, count: int) -> tuple[str, int]:
        """Return the first words with at least `count` tokens, and their number of tokens."""
        words, offsets, total = encoded.word_ids, encoded.offsets, len(encoded.ids)
        if count >= total:
            return text, total
        last = next((i for i in range(count, total) if words[i] != words[count - 1]), total)
        return text[: offsets[last - 1][1]], last

    @property
    def whole(self) -> Any:
        """The tokenizer without truncation: a separate object, since switching truncation off and on would affect other threads."""
        self._uncut = self._uncut or self._open()
        return self._uncut

    def _tokens(self, one: Any) -> Tokens:
        types = one.type_ids if self.gives_types else [0] * len(one.ids)
        return Tokens(one.ids, types, one.special_tokens_mask, one.offsets, one.sequence_ids)

    def _check(self, lengths: Sequence[int], first: int) -> None:
        for number, length in enumerate(lengths, first):
            if length > self.limit:
                raise UsageError(
                    f"texts[{number}] has {length} tokens; the model takes at most {self.limit}: shorten it, or leave out "
                    "truncate=False to have it cut"
                )


def _truncation_side(directory: Path) -> str:
    """Return the end at which transformers truncates a long text, which tokenizer.json does not say."""
    return "left" if _fields(directory).get("truncation_side") == "left" else "right"


def _gives_types(directory: Path) -> bool:
    """Return whether transformers returns the token types of tokenizer.json: not where the checkpoint lists its inputs and token types are
    not among them. (Without a list transformers' behaviour depends on its version; then they count.)"""
    names = _fields(directory).get("model_input_names")
    return not isinstance(names, list) or "token_type_ids" in names


def _fields(directory: Path) -> dict[str, Any]:
    path = directory / "tokenizer_config.json"
    return dict(json.loads(path.read_text("utf-8"))) if path.is_file() else {}
