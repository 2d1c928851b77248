"""Texts of a tokenizer's own vocabulary: see `checks.vocabulary_texts`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bertopt.checks import vocabulary_texts
from bertopt.core import Spec
from bertopt.modeling.tokenizer import special_token
from bertopt.runtime.tokenization import Tokenizer


def own_texts(directory: Path, spec: Spec) -> list[str]:
    """Return texts of the words of the tokenizer in `directory`; none where it knows most of the built-in ones'.

    They have mask tokens for models whose other tokens are scaled by how many there are, and for fill-mask.
    """
    fast = Tokenizer(directory, spec, spec.max_length).whole
    unknown, mask = special_token(directory, "unk_token"), special_token(directory, "mask_token")
    masked = (spec.task == "fill-mask" or spec.dropped_id is not None) and fast.token_to_id(mask) is not None
    return vocabulary_texts.replaced(_encode(fast), own_words(fast, fast.token_to_id(unknown)), mask if masked else None)


def own_words(fast: Any, unknown: int | None) -> list[str]:
    """Return words of a tokenizer of the tokenizers library, which does not cut texts; none where it knows most of those of the built-in texts."""
    special = [number for number, token in fast.get_added_tokens_decoder().items() if token.special]
    vocabulary = {number: token for token, number in fast.get_vocab(with_added_tokens=True).items()}
    spelled = [vocabulary.get(number, "") for number in range(max(vocabulary, default=-1) + 1)]
    return vocabulary_texts.own_words(_encode(fast), spelled, unknown, special)


def _encode(fast: Any) -> vocabulary_texts.Encode:
    def encode(texts: Sequence[str]) -> list[list[int]]:
        return [one.ids for one in fast.encode_batch(list(texts))]

    return encode
