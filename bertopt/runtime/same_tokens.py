"""Compare the tokenizer that is shipped with transformers' own on awkward texts.

All stages hold the same tokenizer, and parity feeds each the same ids: a mistake in reading texts would show nowhere else. Not
compared: texts that are not here, and the offsets of tokenizers that transformers runs without the tokenizers library.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bertopt.errors import WrongAnswer
from bertopt.runtime.tokenization import LONG_PARTS, Text, Tokenizer

AWKWARD = (
    "", " ", "\t\n\r", "a", "The Quick BROWN fox.", "don't-stop... (really)!?", "1,234.56 € [ 50% ]", "naïve café", "a\u0301\u0327 e\u0301",
    "İstanbul ǅ ß ﬁ", "汉字 かな ｶﾅ 한글", "漢\U00020000字", "שלום شكرا\u200e rtl", "हिन्दी ไทย", "🤖👩‍👩‍👧 ❤️", "\u200b\u00a0\ufeff\u2028x\u3000y",
    "a\x00b\x07c\x1b[0m", "\ufffd \ue000 \U0010fffd", "x" * 500, "pneumono" * 30, "https://example.org/a?b=c&d=%20#e", "word " * 600, "ａｂｃ１２３", "a\tb\nc\r\nd",
)  # fmt: skip
#: Most of the added tokens that are tried, and what stands around each.
ADDED, AROUND = 64, ("{}", "a{}b", " {} ", "{}{}")


def long_pairs(limit: int) -> list[tuple[str, str]]:
    """Return pairs that a `Tokenizer` shortens before both texts are cut, by rules of their own. They are hardly longer than that takes:
    transformers keeps every combination of what it cuts off, which is gigabytes where each letter is a token."""
    one, other = "word " * (LONG_PARTS * limit // 4), "another, longer " * (LONG_PARTS * limit // 8)
    return [(one, other), (other, one), (one, one)]


def _remedy(theirs: Any) -> str:
    if getattr(theirs, "split_special_tokens", False):
        return (
            "tokenizer_config.json has split_special_tokens: true, which tokenizer.json cannot say and a server's tokenizer would not do; "
            "take it out, unless texts hold special tokens as words"
        )
    return "save the tokenizer again with the installed transformers"


def check(ours: Tokenizer, theirs: Any) -> None:
    """Raise WrongAnswer where `ours` reads a text otherwise than `theirs`, transformers' tokenizer of the same checkpoint."""
    added = sorted(theirs.get_added_vocab())[:ADDED]
    texts: list[Text] = [*AWKWARD, *(around.format(*[token] * around.count("{}")) for token in added for around in AROUND)]
    texts += [(AWKWARD[i], AWKWARD[-1 - i]) for i in range(len(AWKWARD))]
    # Its two ends differ: which of them is cut off shows.
    texts += [*long_pairs(ours.limit), " ".join(map(str, range(ours.limit + 1)))]
    typed = ours.gives_types and "token_type_ids" in ours.spec.inputs
    read = list[tuple[list[int], list[int]]]()
    located = theirs.is_fast and ours.spec.task in ("token-classification", "question-answering")
    for text in texts:
        # As a batch: alone, transformers takes a pair whose second text is empty for a single text.
        expected = theirs([text], truncation=True, max_length=ours.limit, return_token_type_ids=ours.gives_types, return_offsets_mapping=located)
        (got,) = ours.encode([text])
        ids, types = expected["input_ids"][0], expected["token_type_ids"][0] if typed else []
        alone, types_alone, _ = ours.ids(text)
        read.append((ids or [ours.spec.pad_id], types or [0]))
        if got.ids != ids or (typed and got.types != types) or alone != read[-1][0] or (typed and (types_alone or [0] * len(alone)) != read[-1][1]):
            at = next((i for i, (a, b) in enumerate(zip(got.ids, ids, strict=False)) if a != b), min(len(got.ids), len(ids)))
            raise WrongAnswer(
                f"tokenizer.json must give the ids that transformers gives; {str(text)[:60]!r} differs from token {at} on: "
                f"expected {ids[at : at + 8]}, got {got.ids[at : at + 8]}: {_remedy(theirs)}"
            )
        if located and got.offsets != (places := [tuple(place) for place in expected["offset_mapping"][0]]):
            at = next(i for i, (a, b) in enumerate(zip(got.offsets, places, strict=True)) if a != b)
            raise WrongAnswer(
                f"tokenizer.json must place tokens where transformers does; token {at} of {str(text)[:60]!r}: expected characters "
                f"{places[at]}, got {got.offsets[at]}: save the tokenizer again with the installed transformers"
            )
    # What many texts are read by is another function of the tokenizers library.
    found = ours.flat(texts).flat
    types_found = np.zeros_like(found.ids) if found.types is None else found.types
    for text, start, end, (ids, types) in zip(texts, found.starts, found.starts[1:], read, strict=False):
        if found.ids[start:end].tolist() != ids or (typed and types_found[start:end].tolist() != types):
            raise WrongAnswer(f"{str(text)[:60]!r} is tokenised differently among other texts than alone: install another version of tokenizers")
