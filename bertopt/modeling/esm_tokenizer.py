"""ESM's tokenizer, which transformers runs without the tokenizers library, as one of that library with the same ids for every text."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from bertopt.errors import Unsupported

#: Characters between words to Python's `str.split`.
_SPACES = "".join(character for character in map(chr, range(0x3001)) if character.isspace())
_NAMED = ("unk_token", "cls_token", "pad_token", "mask_token", "eos_token")


def convert(slow: Any) -> Any:
    """Return transformers' fast tokenizer for its `EsmTokenizer`, `slow`.

    That one cuts a text at every token of its vocabulary, the longest first, and what lies between at spaces; each word that is left is
    unknown. The result has `slow` as its `converted_from`. Raises Unsupported for a vocabulary where it does not always find the longest token, and for unusual special tokens.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    named = {name: token for name in _NAMED if (token := getattr(slow, name, None)) is not None}
    if missing := [name for name in ("unk_token", "cls_token") if name not in named]:
        raise _refusal(f"it has no {missing[0]}")
    vocabulary = {token: number for token, number in slow.get_vocab().items() if token}
    _check(slow, vocabulary)
    if "\0" in "".join(vocabulary) or len(set(vocabulary.values())) < len(vocabulary):
        raise _refusal("two tokens have one id, or one has a NUL")
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=str(slow.unk_token)))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(f"[{_SPACES}]+"), "removed")
    special = set(map(str, slow.all_special_tokens))
    for token in sorted(vocabulary, key=lambda token: vocabulary[token]):
        (backend.add_special_tokens if token in special else backend.add_tokens)([AddedToken(token, normalized=False, special=token in special)])
    cls, end = str(slow.cls_token), named.get("eos_token")
    around = [str(token) for token in (cls, end) if token is not None]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A" + (f" {end}" if end else ""), pair=f"{cls} $A {end} $B {end}" if end else f"{cls} $A $B",
        special_tokens=[(token, vocabulary[token]) for token in around],
    )  # fmt: skip
    fast: Any = PreTrainedTokenizerFast(
        tokenizer_object=backend, model_max_length=slow.model_max_length, padding_side=slow.padding_side, truncation_side=slow.truncation_side,
        model_input_names=list(slow.model_input_names), **{name: str(token) for name, token in named.items()},
    )  # fmt: skip
    fast.converted_from = slow
    return fast


def _check(slow: Any, vocabulary: Collection[str]) -> None:
    """Raise Unsupported where transformers' way of cutting a text may differ from taking the longest token at each place.

    It follows a token until the text differs from it, and may lose a token that begins inside. None can where a token's own first character
    is a token too, or where no token begins with one of its other characters.
    """
    first = {token[0] for token in vocabulary}
    for token in vocabulary:
        if token[0] not in vocabulary and first & set(token[1:]):
            raise _refusal(f"of its token {token!r:.40}, inside which another begins")
        if set(token) & set(_SPACES):
            raise _refusal(f"its token {token!r:.40} has a space")
    for added in slow.added_tokens_decoder.values():
        if added.single_word:
            raise _refusal(f"its token {added.content!r:.40} is found as a word alone (single_word)")
    if slow.split_special_tokens:
        raise _refusal("split_special_tokens is true")


def _refusal(why: str) -> Unsupported:
    return Unsupported(
        f"transformers' EsmTokenizer has no fast form, and its vocabulary cannot be turned into one: {why}; save a tokenizer of the tokenizers "
        "library with the checkpoint (tokenizer.json, and tokenizer_class: PreTrainedTokenizerFast)"
    )
