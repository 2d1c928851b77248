"""Two models side by side: what outputs do not show, and would be another answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bertopt.errors import WrongAnswer
from bertopt.modeling.modules_json import MODULES
from bertopt.modeling.sentence_transformers import PROMPTS
from bertopt.pipeline import pair
from tests.support.specs import spec as spec_of

Read = Callable[[str], list[int]]
#: Tokens that the models take: more than the built-in pairs have.
LONGEST = 200


#: What a `tokenizer.json` has of its words.
WORDS: dict[str, Any] = {"model": {"vocab": {"[UNK]": 0, "rare": 1, "seldom": 2}}, "added_tokens": [{"id": 0, "content": "[UNK]"}]}


class Tokens:
    """Reads every character as a token, by its number or what `read` makes of the text."""

    closed = False

    def __init__(self, read: Read = lambda text: [ord(char) for char in text]) -> None:
        self.read = read

    def batch(self, texts: Sequence[Any]) -> dict[str, Any]:
        ids = np.array([self.read(str(text)) for text in texts], np.int64)
        return {"input_ids": ids, "attention_mask": np.ones_like(ids)}

    def close(self) -> None:
        self.closed = True


def check(
    monkeypatch: pytest.MonkeyPatch, folder: Path, prompts: Sequence[dict[str, str]] = ({}, {}), tokens: Tokens | None = None,
    ours: Tokens | None = None, vocabularies: Sequence[Any] = (WORDS, WORDS), **changed: Any,
) -> None:  # fmt: skip
    """Hold a second model, whose specification is `changed`, against a first."""
    specs, paths = {}, []
    for number, said in enumerate(prompts):
        paths.append(path := folder / str(number))
        path.mkdir()
        (path / MODULES).write_text("[]")
        (path / PROMPTS).write_text(json.dumps({"prompts": said}))
        (path / "tokenizer.json").write_text(json.dumps(vocabularies[number]))
        specs[path] = spec_of(inputs=("input_ids", "attention_mask"), labels=("no", "yes"), max_length=LONGEST).model_copy(update={**(changed if number else {})})
    theirs = tokens or Tokens()
    monkeypatch.setattr(pair.stages, "read_manifest", lambda path: SimpleNamespace(spec=specs[path]))
    monkeypatch.setattr(pair, "RemoteTokenizer", lambda workers, directory: theirs)
    examiner: Any = SimpleNamespace(tokenizer=ours or Tokens())
    try:
        pair._check_alike(SimpleNamespace(), examiner, *paths)  # type: ignore[arg-type]
        assert theirs.closed
    finally:
        monkeypatch.undo()


def test_models_of_one_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Packed rows are another layout of the same model.
    check(monkeypatch, tmp_path, [{"query": "q: "}, {"query": "q: "}], layout="packed", row_length=256)


@pytest.mark.parametrize(
    ("changed", "said"),
    [({"labels": ("yes", "no")}, r"labels must be the same in .*\('no', 'yes'\) and \('yes', 'no'\)"),
     ({"text_length": 7}, "text_length must be the same"), ({"multi_label": True}, "multi_label must be the same")],
)  # fmt: skip
def test_other_answers_of_the_same_outputs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    with pytest.raises(WrongAnswer, match=said):
        check(monkeypatch, tmp_path, **changed)


def test_another_prompt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(WrongAnswer, match=r"prompt 'query' must be the same in .* got 'q: ' and None"):
        check(monkeypatch, tmp_path, [{"query": "q: ", "passage": "p: "}, {"passage": "p: "}])


def test_another_reading(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lower = Tokens(lambda text: [ord(char) for char in text.lower()])
    with pytest.raises(WrongAnswer, match=r"must read texts as the same tokens; 'The Quick BROWN fox.' is \[84, .* and \[116, "):
        check(monkeypatch, tmp_path, tokens=lower)


def test_another_end_of_long_texts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No built-in text showed which end is cut off: the words of the long one are all the same."""
    first, last = (
        Tokens(lambda text, part=part: [int.from_bytes(word.encode()[:4], "big") for word in text.split()][part])
        for part in (slice(LONGEST), slice(-LONGEST, None))
    )  # fmt: skip
    with pytest.raises(WrongAnswer, match=r"must read texts as the same tokens; '0 1 2 3 "):
        check(monkeypatch, tmp_path, ours=first, tokens=last)


def test_the_shapes_of_a_stage_are_cut_to_the_model() -> None:
    """`bertopt bench STAGE` of a model of 64 positions was refused, though nobody had stated a shape."""
    stage = SimpleNamespace(recipe=None, spec=spec_of(max_length=64))
    assert pair.shapes(stage) == [(1, 16), (8, 64)]  # type: ignore[arg-type]
    assert pair.shapes(SimpleNamespace(recipe=None, spec=spec_of(max_length=8))) == [(1, 8), (8, 8)]  # type: ignore[arg-type]
    checked_on = {"inputs": {"shapes": [[2, 48]]}}
    assert pair.shapes(SimpleNamespace(recipe=checked_on, spec=spec_of(max_length=64))) == [(2, 48)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({**WORDS, "model": {"vocab": {"[UNK]": 0, "rare": 2, "seldom": 1}}}, "'rare' is 1 in one and 2 in the other"),
        ({**WORDS, "model": {"vocab": {"[UNK]": 0, "rare": 1}}}, "'seldom' is 2 in one and None in the other"),
        ({**WORDS, "model": {"vocab": [["[UNK]", 0.0], ["seldom", -1.5], ["rare", -2.0]]}}, "'rare' is 1 in one and 2 in the other"),
        ({**WORDS, "added_tokens": [{"id": 0, "content": "[UNK]"}, {"id": 3, "content": "<new>"}]}, "'<new>' is None in one and 3 in the other"),
        ({**WORDS, "model": {"vocab": [["[UNK]", 0.0], ["rare", -1.5], ["seldom", -2.0]]}, "normalizer": None}, None),
    ],
)
def test_another_word_that_no_text_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, other: Any, said: str | None) -> None:
    """Two rare words with each other's id, in a file that another version of the libraries is said to have written, were only a warning."""
    if said is None:
        check(monkeypatch, tmp_path, vocabularies=(WORDS, other))
        return
    with pytest.raises(WrongAnswer, match=f"must have one vocabulary; {said}"):
        check(monkeypatch, tmp_path, vocabularies=(WORDS, other))
