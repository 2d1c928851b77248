"""The outputs that an artefact records: that they depend on what its own texts consist of."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import bertopt
from bertopt.errors import WrongAnswer
from bertopt.runtime import replay
from tests.support.artefacts import write_artefact
from tests.support.proteins import VOCABULARY, write_protein
from tests.support.tiny_models import Tiny


def test_exchanged_amino_acids_show(tmp_path: Path) -> None:
    """To a tokenizer of proteins the fixed texts were rows of unknown words, with a few letters among them."""
    checkpoint = write_protein(tmp_path / "checkpoint")
    recorded = replay.answers(bertopt.load(write_artefact(checkpoint, tmp_path / "right", "eager")))
    weights = load_file(checkpoint / "model.safetensors")
    table = weights["esm.embeddings.word_embeddings.weight"]
    one, other = VOCABULARY.index("L"), VOCABULARY.index("A")
    table[[one, other]] = table[[other, one]]
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    found = replay.answers(bertopt.load(write_artefact(checkpoint, tmp_path / "wrong", "eager")))
    with pytest.raises(WrongAnswer, match="differ from those recorded"):
        replay.check(found, recorded, "float32", "it")


def test_texts_of_concurrent_calls_differ(tmp_path: Path) -> None:
    """All 33 texts of a call were equal: outputs of another text would not have shown."""
    predictor = bertopt.load(write_artefact(write_protein(tmp_path / "checkpoint"), tmp_path / "artifact", "eager"))
    for word in ("one", "two two"):
        texts = replay._short_texts(predictor, word)
        ids = [tuple(row.ids) for row in predictor.tokenizer.encode(texts)]
        assert len(texts) == replay.MANY and len(set(ids)) > 30 and 3 not in {number for row in ids for number in row}
    own = [row.ids for row in predictor.tokenizer.encode(replay._own_texts(predictor))]
    assert [row.count(32) > 0 for row in own] == [False, True] * 4 and len({tuple(row) for row in own}) == len(own)


def test_known_words_are_recorded_as_ever(tiny: Tiny, tmp_path: Path) -> None:
    predictor = bertopt.load(write_artefact(tiny("bert"), tmp_path / "artifact", "eager"))
    assert replay._own_texts(predictor) == [] and replay._short_texts(predictor, "one")[1] == "one 1"
    assert len(replay.answers(predictor)) == len(replay.TEXTS) + 2 + replay.MANY + len(replay.PAIRS)
