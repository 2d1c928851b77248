"""Compare the shipped tokenizer with transformers' own on difficult texts.

All stages have the same tokenizer, and parity gives all of them the same ids, so a tokenisation mistake would show nowhere else. Not
compared: other texts, and of tokenizers that transformers runs without the tokenizers library the offsets, and pairs that are too long, of
which such a tokenizer may cut the other text by one token more.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bertopt.errors import CheckpointWarning, WrongAnswer
from bertopt.modeling import sentence_transformers
from bertopt.runtime.tokenization import LONG_PARTS, Tokenizer, Tokens
from bertopt.spec import Text

AWKWARD = (
    "", " ", "\t\n\r", "a", "The Quick BROWN fox.", "don't-stop... (really)!?", "1,234.56 € [ 50% ]", "naïve café", "a\u0301\u0327 e\u0301",
    "İstanbul ǅ ß ﬁ", "汉字 かな ｶﾅ 한글", "漢\U00020000字", "שלום شكرا\u200e rtl", "हिन्दी ไทย", "🤖👩‍👩‍👧 ❤️", "\u200b\u00a0\ufeff\u2028x\u3000y",
    "a\x00b\x07c\x1b[0m", "\ufffd \ue000 \U0010fffd", "x" * 500, "pneumono" * 30, "https://example.org/a?b=c&d=%20#e", "word " * 600, "ａｂｃ１２３", "a\tb\nc\r\nd",
    "``back'' “quotes” ‘single’ «side» – — … · ½ ² ° × so\u00adft £ ¥", "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~ 0123456789", "æ œ ø ł đ ð þ ŋ ı Σς ё й ї",
    "Sphinx of black quartz, judge my vow", "y" * 100, "y" * 101,
)  # fmt: skip
#: Tokens of a difficult text that are compared with those of tokenizer.json as it was written.
LONGEST = 128
#: Most added tokens that are tried, and the texts to put each into.
ADDED, AROUND = 64, ("{}", "a{}b", " {} ", "{}{}")


def long_pairs(limit: int) -> list[tuple[str, str]]:
    """Return pairs just long enough for `Tokenizer` to shorten both texts before it truncates them. (Not longer: transformers keeps every
    combination of the parts that it cuts off, which takes gigabytes where each letter is a token.)"""
    one, other = "word " * (LONG_PARTS * limit // 4), "another, longer " * (LONG_PARTS * limit // 8)
    return [(one, other), (other, one), (one, one)]


def counting(limit: int) -> str:
    """Return a text of more than `limit` tokens whose ends differ, so that it shows which end is cut off."""
    return " ".join(map(str, range(limit + 1)))


@dataclass(frozen=True)
class _Reading:
    """The tokens that transformers makes of a text. `types` and `places` are None where they are not compared."""

    ids: list[int]
    types: list[int] | None
    places: list[tuple[int, int]] | None


def check(ours: Tokenizer, theirs: Any) -> None:
    """Raise WrongAnswer where `ours` tokenises a text differently from `theirs`, transformers' tokenizer of the same checkpoint."""
    texts = _texts(ours.limit, sorted(theirs.get_added_vocab())[:ADDED])
    if not theirs.is_fast:
        texts = [text for text in texts if isinstance(text, str) or (theirs.eos_token_id is not None and len(ours.whole.encode(*text)) <= ours.limit)]
    readings = [_read(ours, theirs, text) for text in texts]
    for text, expected in zip(texts, readings, strict=True):
        (got,) = ours.encode([text])
        _check_ids(ours, text, got, expected, theirs)
        _check_places(text, got, expected)
    _check_together(ours, texts, readings)


def warn_of_class(directory: Path, theirs: Any) -> None:
    """Warn where `theirs`, transformers' tokenizer of the checkpoint in `directory`, does not do what tokenizer.json says.

    Since transformers 5 the classes of many families build normalizer, pre-tokenizer and post-processor themselves, whatever that file
    contains: a model that was trained with an earlier version gets other ids. Settings that these classes have always taken from
    tokenizer_config.json are not compared.
    """
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import logging

    if not (directory / "tokenizer.json").is_file() or not theirs.is_fast or type(theirs) is PreTrainedTokenizerFast:
        return
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        as_written = PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
    finally:
        logging.set_verbosity(verbosity)
    written, built = as_written.backend_tokenizer, theirs.backend_tokenizer
    # Settings from tokenizer_config.json: lower case and accents, and a space before the first word.
    if type(written.normalizer).__name__ == "BertNormalizer" or sentence_transformers.lowers(directory):
        written.normalizer = built.normalizer
    if type(written.pre_tokenizer).__name__ == "ByteLevel" == type(built.pre_tokenizer).__name__:
        written.pre_tokenizer = built.pre_tokenizer
    for text in AWKWARD:
        expected, got = (one([text], truncation=True, max_length=LONGEST)["input_ids"][0] for one in (as_written, theirs))
        if got != expected:
            at = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), min(len(got), len(expected)))
            warnings.warn(
                f"tokenizer.json: transformers' {type(theirs).__name__} sets part of it aside, as versions before 5 did not: {text[:40]!r} differs from token {at} "
                f"on: {got[at : at + 6]}, by the file {expected[at : at + 6]}; an artefact reads texts as transformers does: if the model was trained "
                "by the file, state tokenizer_class: PreTrainedTokenizerFast in tokenizer_config.json",
                CheckpointWarning, stacklevel=2,
            )  # fmt: skip
            return


def _texts(limit: int, added: Sequence[str]) -> list[Text]:
    return [
        *AWKWARD, *(around.format(*[token] * around.count("{}")) for token in added for around in AROUND), *(token.swapcase() for token in added),
        *zip(AWKWARD, reversed(AWKWARD), strict=True), *long_pairs(limit), counting(limit),
    ]  # fmt: skip


def _read(ours: Tokenizer, theirs: Any, text: Text) -> _Reading:
    typed = ours.gives_types and "token_type_ids" in ours.spec.inputs
    located = theirs.is_fast and ours.spec.task in ("token-classification", "question-answering")
    # As a batch: in a single call, transformers treats a pair with an empty second text as one text.
    read = theirs([text], truncation=True, max_length=ours.limit, return_token_type_ids=ours.gives_types, return_offsets_mapping=located)
    places = [tuple(place) for place in read["offset_mapping"][0]] if located else None
    return _Reading(read["input_ids"][0], read["token_type_ids"][0] if typed else None, places)


def _check_ids(ours: Tokenizer, text: Text, got: Tokens, expected: _Reading, theirs: Any) -> None:
    """Raise WrongAnswer where ids or types of a text differ, both in `got` and as `Tokenizer.ids` gives them."""
    ids, types = expected.ids, expected.types
    single, single_types, _ = ours.ids(text)
    same = got.ids == ids and single == (ids or [ours.spec.pad_id])
    if types is not None:
        same = same and got.types == types and (single_types or [0] * len(single)) == (types or [0])
    if not same:
        at = next((i for i, (a, b) in enumerate(zip(got.ids, ids, strict=False)) if a != b), min(len(got.ids), len(ids)))
        raise WrongAnswer(
            f"tokenizer.json must give the ids that transformers gives; {str(text)[:60]!r} differs from token {at} on: "
            f"expected {ids[at : at + 8]}, got {got.ids[at : at + 8]}: {_remedy(theirs)}"
        )


def _check_places(text: Text, got: Tokens, expected: _Reading) -> None:
    if expected.places is not None and got.offsets != expected.places:
        at = next(i for i, (a, b) in enumerate(zip(got.offsets, expected.places, strict=True)) if a != b)
        raise WrongAnswer(
            f"tokenizer.json must place tokens where transformers does; token {at} of {str(text)[:60]!r}: expected characters "
            f"{expected.places[at]}, got {got.offsets[at]}: save the tokenizer again with the installed transformers"
        )


def _check_together(ours: Tokenizer, texts: Sequence[Text], readings: Sequence[_Reading]) -> None:
    """Raise WrongAnswer where a text is tokenised differently together with others, which takes another function of the tokenizers library."""
    found = ours.flat(texts).flat
    found_types = np.zeros_like(found.ids) if found.types is None else found.types
    for text, expected, start, end in zip(texts, readings, found.starts, found.starts[1:], strict=False):
        same = found.ids[start:end].tolist() == (expected.ids or [ours.spec.pad_id])
        if expected.types is not None:
            same = same and found_types[start:end].tolist() == (expected.types or [0])
        if not same:
            raise WrongAnswer(f"{str(text)[:60]!r} is tokenised differently among other texts than alone: install another version of tokenizers")


def _remedy(theirs: Any) -> str:
    if getattr(theirs, "split_special_tokens", False):
        return (
            "tokenizer_config.json has split_special_tokens: true, which tokenizer.json cannot say and a server's tokenizer would not do; "
            "take it out, unless texts hold special tokens as words"
        )
    return "save the tokenizer again with the installed transformers"
