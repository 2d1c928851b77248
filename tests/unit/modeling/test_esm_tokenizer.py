"""ESM's tokenizer, which transformers has in Python only: the converted one gives the same ids, or is refused."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import transformers

from bertopt.errors import Unsupported, WrongAnswer
from bertopt.modeling import checkpoint, esm_tokenizer
from bertopt.modeling.tokenizer import open_tokenizer
from bertopt.runtime import same_tokens
from bertopt.runtime.tokenization import Tokenizer
from tests.support.proteins import VOCABULARY, write_protein, write_tokenizer

#: As published with the Nucleotide Transformer: words of six letters, then single letters, and no token after a text.
NUCLEOTIDES = ("<unk>", "<pad>", "<mask>", "<cls>", "<eos>", "<bos>", *map("".join, itertools.product("ATCG", repeat=6)), *"ATCGN")
ODD = [*" \t\n\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2028\u200b\u180e\ufeff\u3000", "<", "<m", "mask>", "<MASK>", "x", "yz", "é", "\0", "a b", "🤖"]


def texts(vocabulary: Sequence[str], count: int) -> list[str]:
    draw = random.Random(0)
    pieces = [*draw.sample(vocabulary, min(len(vocabulary), 60)), *vocabulary[:6], *ODD]
    return [*same_tokens.AWKWARD, *("".join(draw.choice(pieces) for _ in range(draw.randint(0, 60))) for _ in range(count))]


def slow(directory: Path, vocabulary: Sequence[str], **fields: Any) -> Any:
    write_tokenizer(directory, vocabulary, **fields)
    return transformers.EsmTokenizer.from_pretrained(directory)


@pytest.mark.parametrize(("vocabulary", "end"), [(VOCABULARY, "<eos>"), (NUCLEOTIDES, "<eos>"), (NUCLEOTIDES, None)], ids=["protein", "nucleotide", "no end"])
def test_ids_are_those_of_transformers(tmp_path: Path, vocabulary: Sequence[str], end: str | None) -> None:
    theirs = slow(tmp_path, vocabulary, eos_token=end, model_max_length=30)
    ours = esm_tokenizer.convert(theirs)
    backend = ours.backend_tokenizer
    backend.enable_truncation(30)
    for text in texts(vocabulary, 300):
        expected = theirs(text, truncation=True)["input_ids"]
        assert backend.encode(text).ids == expected, text
    backend.no_truncation()
    for pair in zip(texts(vocabulary, 50), reversed(texts(vocabulary, 50)), strict=True) if end else ():
        assert backend.encode(*pair).ids == theirs([pair])["input_ids"][0], pair
    assert (ours.model_max_length, ours.mask_token_id, ours.pad_token_id) == (30, vocabulary.index("<mask>"), vocabulary.index("<pad>"))
    assert (ours.padding_side, ours.model_input_names) == (theirs.padding_side, theirs.model_input_names)


@pytest.mark.parametrize(
    ("vocabulary", "fields", "why"),
    [
        ((*VOCABULARY, "äöü", "ö"), {}, "token 'äöü', inside which another begins"),
        ((*VOCABULARY, "x y"), {}, "token 'x y' has a space"),
        (VOCABULARY, {"split_special_tokens": True}, "split_special_tokens is true"),
        (VOCABULARY, {"added_tokens_decoder": {"32": {"content": "<mask>", "single_word": True, "special": True}}}, "token '<mask>' is found as a word alone .single_word."),
    ],
)  # fmt: skip
def test_vocabularies_that_transformers_reads_otherwise_are_refused(tmp_path: Path, vocabulary: Sequence[str], fields: dict[str, Any], why: str) -> None:
    with pytest.raises(Unsupported, match=rf"EsmTokenizer has no fast form, .*: .*{why}; save a tokenizer of the tokenizers library with the checkpoint"):
        esm_tokenizer.convert(slow(tmp_path, vocabulary, **fields))


def test_transformers_loses_a_token_inside_another(tmp_path: Path) -> None:
    """Why such a vocabulary is refused."""
    theirs = slow(tmp_path, (*VOCABULARY, "äöü", "ö"))
    assert theirs.tokenize("äöxü") == ["äöxü"], "the longest tokens are a word, 'ö' and another word"


def test_a_checkpoint_is_read_and_its_copy_too(tmp_path: Path) -> None:
    directory = write_protein(tmp_path / "checkpoint", "fill-mask")
    model = checkpoint.load(directory)
    assert (model.spec.text_length, model.spec.pad_id, model.spec.dropped_id) == (64, 1, 32)
    (tmp_path / "copy").mkdir()
    checkpoint.write_snapshot(model, tmp_path / "copy")
    ours, theirs = Tokenizer(tmp_path / "copy", model.spec), open_tokenizer(directory).converted_from
    same_tokens.check(ours, theirs)
    assert ours.encode(["MKV<mask>A"])[0].ids == [0, 20, 15, 7, 32, 5, 2]
    assert not theirs.is_fast
    theirs._token_to_id["K"] = 7
    with pytest.raises(WrongAnswer, match=r"tokenizer.json must give the ids that transformers gives"):
        same_tokens.check(ours, theirs)
