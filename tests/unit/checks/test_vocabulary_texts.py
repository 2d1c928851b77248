"""Texts of a tokenizer's own words, for tokenizers to which the built-in texts are unknown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from bertopt.checks import probes, vocabulary_texts
from bertopt.modeling import checkpoint
from bertopt.pipeline.measurement_plan import MeasurementPlan
from bertopt.pipeline.race import Budget
from bertopt.recipe.texts import Texts
from bertopt.runtime.own_texts import own_texts
from bertopt.runtime.tokenization import Tokenizer
from tests.support.proteins import write_protein
from tests.support.tiny_models import Tiny


def stage(directory: Path, source: Path) -> tuple[Path, checkpoint.Spec]:
    model = checkpoint.load(source)
    directory.mkdir()
    checkpoint.write_snapshot(model, directory)
    return directory, model.spec


@pytest.mark.parametrize("task", ["token-classification", "fill-mask"])
def test_proteins_get_texts_of_amino_acids(tmp_path: Path, task: str) -> None:
    directory, spec = stage(tmp_path / "stage", write_protein(tmp_path / "checkpoint", task, extra={"max_position_embeddings": 1026}))
    found = own_texts(directory, spec)
    assert found == own_texts(directory, spec) and len(found) == vocabulary_texts.COUNT + vocabulary_texts.KEPT
    ids = [tokens.ids for tokens in Tokenizer(directory, spec).encode(found)]
    lengths = [len(row) - 2 for row in ids]
    assert min(lengths) == 0 and max(lengths) == vocabulary_texts.LONGEST and len(set(lengths)) > 60
    own = np.concatenate([row[1:-1] for row in ids])
    assert (own == 3).mean() < 0.05 and set(range(4, 31)) <= set(own.tolist())
    masks = [row.count(32) for row in ids]
    assert 20 < sum(map(bool, masks)) < 60 and max(masks) > 200 and any("<mask>" in text and " " in text for text in found) and any("<mask>" in text and " " not in text for text in found)


def test_a_model_whose_tokens_are_not_scaled_gets_no_mask_tokens(tmp_path: Path) -> None:
    directory, spec = stage(tmp_path / "stage", write_protein(tmp_path / "checkpoint", extra={"token_dropout": False}))
    found = own_texts(directory, spec)
    assert found and not any("<mask>" in text for text in found)


def test_known_texts_stay(tiny: Tiny, tmp_path: Path) -> None:
    directory, spec = stage(tmp_path / "stage", tiny("bert"))
    assert own_texts(directory, spec) == []
    given = Texts(("a",), source="file")
    assert given.for_tokenizer([]) is given


def test_words_that_need_spaces_get_them() -> None:
    words = ["[UNK]", "[CLS]", "[SEP]", *(f"gene{number}" for number in range(50))]

    def encode(texts: Sequence[str]) -> list[list[int]]:
        return [[1, *(words.index(word) if word in words else 0 for word in text.split()), 2] for text in texts]

    own = vocabulary_texts.own_words(encode, words, 0, [0, 1, 2])
    assert own == words[3:]
    found = vocabulary_texts.replaced(encode, own, "[MASK]")
    assert len(found) == vocabulary_texts.COUNT + vocabulary_texts.KEPT
    made = found[vocabulary_texts.KEPT :]
    assert all(set(text.split()) <= {*words[3:], "[MASK]"} for text in made) and sum("[MASK]" in text for text in made) == vocabulary_texts.COUNT // 4
    assert vocabulary_texts.own_words(encode, words[:4], 0, [0, 1, 2]) == vocabulary_texts.replaced(encode, [], None) == [], "no words to make texts of"


def test_a_plan_probes_them_in_place_of_the_built_in_texts() -> None:
    spec, own = probes_spec(), ["MKV", "AAL", "G"]
    built_in = Texts(tuple(probes.built_in_texts()))
    plan = MeasurementPlan.of(spec, [(1, 8)], built_in.for_tokenizer(own), Budget())
    assert plan.sample()[0] == own and plan.mix == tuple(own)
    given = Texts(("MKVA", "LLG"), source="file").for_tokenizer(own)
    plan = MeasurementPlan.of(spec, [(1, 8)], given, Budget())
    assert plan.sample()[0] == ["MKVA", "LLG", *own] and plan.mix == ("MKVA", "LLG")


def probes_spec() -> checkpoint.Spec:
    return checkpoint.Spec(
        family="esm", task="token-classification", inputs=("input_ids", "attention_mask"), outputs=("logits",), layers=2, heads=2, hidden=32, vocabulary=33,
        token_types=0, pad_id=1, max_length=64, text_length=64, parameters=1, positions="none", dropped_id=32,
    )  # fmt: skip


def test_rows_of_random_ids_have_mask_tokens_in_every_second_row() -> None:
    spec = probes_spec()
    for model in (spec, spec.model_copy(update={"vocabulary": 4107, "dropped_id": 2, "pad_id": 1})):
        seen = set[bool]()
        for probe in probes.grid(model, [(1, 8), (4, 16)], None):
            ids, mask = probe.inputs["input_ids"], probe.inputs["attention_mask"].astype(bool)
            masked = ((ids == model.dropped_id) & mask).sum(axis=1)
            kept = mask.sum(axis=1) - masked
            assert (kept[mask.any(axis=1)] > 0).all(), "a row of mask tokens alone has no answer"
            if probe.shape[0] > 1 and probe.padding in ("none", "right", "holes"):
                there = mask.sum(axis=1) > 2
                assert (masked[there] > 0).any() and (masked[there] == 0).any()
            if probe.padding == "none":
                seen.update((masked[mask.sum(axis=1) > 1] > 0).tolist())
        assert seen == {True, False}
    plain = spec.model_copy(update={"dropped_id": None})
    with_ids = {probe.name: probe.inputs["input_ids"] for probe in probes.grid(plain, [(4, 16)], None)}
    assert {int(row) for ids in with_ids.values() for row in (ids == 32).sum(axis=1)} != {0}


def test_random_rows_have_few_mask_tokens_many_and_hardly_others() -> None:
    """A share of 1 in 6 alone let a count in too few bits pass."""
    spec, shares, most = probes_spec().model_copy(update={"max_length": 1026}), list[float](), 0
    for probe in probes.grid(spec, [(8, 64), (1, 1024)], None):
        ids, mask = probe.inputs["input_ids"], probe.inputs["attention_mask"].astype(bool)
        masked = ((ids == spec.dropped_id) & mask).sum(axis=1)
        most = max(most, int(masked.max()))
        shares += (masked / mask.sum(axis=1).clip(1))[(masked > 0) & (mask.sum(axis=1) > 20)].tolist()
    assert most > 256 and all(any(abs(share - wanted) < 0.1 for share in shares) for wanted in (1 / 6, 1 / 2, 9 / 10))
