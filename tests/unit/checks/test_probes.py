"""Probes: every shape and padding, texts and pairs, and what of them is compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from bertopt.checks import probes
from bertopt.core import Profile, ShapeLimits
from tests.support.compared import probe
from tests.support.specs import TEXT, spec

Array = np.ndarray


def test_grid_has_every_shape_and_padding() -> None:
    found = list(probes.grid(TEXT, [(1, 8), (4, 6), (4, 6)], None))
    every = set(probes.PADDINGS)
    paddings = {shape: {p.padding for p in found if p.shape == shape} for shape in {p.shape for p in found}}
    # One row has no other to be valid beside a masked one; one token leaves nothing to pad.
    assert paddings == {
        (1, 8): every - {"masked_row"}, (4, 6): every, (1, 1): {"none"}, (1, 32): every - {"masked_row"}
    }  # fmt: skip
    assert len({p.name for p in found}) == len(found)


def test_prompts_stand_before_texts_of_several_lengths() -> None:
    found = probes.prompted(["", " ", "four", "a", "three words more", "a"], {"query": "query: ", "document": ""}.values())
    assert found == ["query: a", "query: four", "query: three words more"]
    assert len(probes.prompted(probes.built_in_texts(), [f"task {number}: " for number in range(40)])) == 24
    assert probes.prompted(["one"], ["q: "]) == ["q: one"] and probes.prompted([""], ["q: "]) == probes.prompted(["one"], []) == []


def test_no_valid_token_is_the_padding_token() -> None:
    for p in probes.grid(TEXT, [(1, 8), (8, 16), (3, 2)], None):
        mask = p.inputs["attention_mask"].astype(bool)
        ids = p.inputs["input_ids"]
        assert not (ids[mask] == TEXT.pad_id).any()
        assert ids.min() >= 0
        assert ids.max() < TEXT.vocabulary
        assert all(value.dtype == np.int64 and value.flags.c_contiguous for value in p.inputs.values())
        assert tuple(p.inputs) == TEXT.inputs
        if p.padding in ("right", "left", "masked_row"):
            assert (ids[~mask] == TEXT.pad_id).all()


def test_masks_are_what_they_are_called() -> None:
    masks = {p.padding: p.inputs["attention_mask"] for p in probes.grid(TEXT, [(4, 6)], None) if p.shape == (4, 6)}
    assert masks["none"].all()
    for name, side in (("right", 1), ("left", -1)):
        lengths = masks[name].sum(axis=1)
        assert lengths.tolist() == sorted(set(lengths.tolist()), reverse=True)
        assert lengths[0] == 6
        assert (np.diff(masks[name], axis=1) * side <= 0).all()
    assert masks["holes"][:, 0].all()
    assert not masks["holes"].all()
    assert (np.diff(masks["holes"], axis=1) > 0).any()
    assert masks["one_token"].tolist() == [[1, 0, 0, 0, 0, 0]] * 4
    assert masks["masked_row"].sum(axis=1).tolist() == [6, 6, 0, 6]


def test_what_counts() -> None:
    for p in probes.grid(TEXT, [(4, 6)], None):
        assert (p.compared == p.inputs["attention_mask"].astype(bool)).all()
        assert p.rows.tolist() == [bool(row.any()) for row in p.compared]
    assert probe(TEXT, "masked_row").rows.tolist() == [True, True, False, True]


def test_vocabularies_are_compared_at_a_few_tokens() -> None:
    for p in probes.grid(spec("fill-mask"), [(4, 16)], None):
        mask = p.inputs["attention_mask"].astype(bool)
        assert not (p.compared & ~mask).any()
        assert p.compared.sum(axis=1).tolist() == [min(probes.WIDE_TOKENS, n) for n in mask.sum(axis=1)]


def test_texts_of_a_model_that_fills_masks_have_masks_and_these_are_compared() -> None:
    given = [" ".join(f"word{i}" for i in range(length)) for length in (1, 3, 4, 9, 30, 60)]
    found = probes.masked(given, "[MASK]")
    assert found[:2] == given[:2] and [text.split().count("[MASK]") for text in found[2:]] == [3, 4, 2, 3]
    assert probes.masked([given[-1]] * 4, "[MASK]")[3].split().count("[MASK]") == 8, "a model that was wrong for five masks was delivered"
    assert all(a in (b, "[MASK]") for text, other in zip(found, given, strict=True) for a, b in zip(text.split(), other.split(), strict=True))

    def encode(of: Sequence[Any]) -> list[dict[str, Any]]:
        ids = [[4 if word == "[MASK]" else 9 for word in text.split()] for text in of]
        longest = max(map(len, ids))
        rows = np.array([row + [0] * (longest - len(row)) for row in ids])
        return [{"input_ids": rows, "attention_mask": (rows > 0).astype(int), "token_type_ids": 0 * rows}]

    for p in probes.texts(spec("fill-mask"), encode, found, mask_id=4):
        ids, lengths = p.inputs["input_ids"], p.inputs["attention_mask"].sum(axis=1)
        assert p.compared[ids == 4].all() and not p.compared[ids == 0].any()
        assert p.compared.sum(axis=1).tolist() == [min(probes.WIDE_TOKENS, n) for n in lengths]


def test_pairs_have_a_second_segment() -> None:
    assert probe(TEXT, "none").inputs["token_type_ids"].tolist() == [[0] * 6, [0, 0, 0, 1, 1, 1]] * 2
    assert probe(TEXT, "none", (1, 8)).inputs["token_type_ids"].tolist() == [[0] * 4 + [1] * 4]
    single = spec(inputs=("input_ids", "attention_mask"), token_types=0)
    assert tuple(probe(single, "none").inputs) == ("input_ids", "attention_mask")


def test_rows_with_holes_have_all_types_in_any_order() -> None:
    """Types that fall again, and more than two in a row, were in no row."""
    types = probe(spec(token_types=4), "holes", (8, 16)).inputs["token_type_ids"]
    assert set(types.ravel().tolist()) == {0, 1, 2, 3} and not types[:, 0].any() and (np.diff(types, axis=1) < 0).any(axis=1).all()
    single = spec(inputs=("input_ids", "attention_mask"), token_types=0)
    assert "token_type_ids" not in probe(single, "holes").inputs


@pytest.mark.parametrize(
    ("largest", "shapes"),
    [
        (None, {(4, 6), (32, 8), (1, 1), (1, 32)}),
        ([(4, 16)], {(4, 6), (1, 1)}),
        ([(32, 32)], {(4, 6), (32, 8), (1, 1), (1, 32)}),
        ([(1, 32), (4, 8)], {(4, 6), (1, 1), (1, 32)}),
    ],
)
def test_shapes_that_do_not_fit_are_skipped(
    largest: list[tuple[int, int]] | None, shapes: set[tuple[int, int]]
) -> None:
    limits = largest and ShapeLimits(longest=32, profiles=tuple(Profile(opt=(1, 1), max=most) for most in largest))
    found = probes.grid(TEXT, [(4, 6), (32, 8), (2, 33)], limits or None)
    assert {p.shape for p in found} == shapes


def test_probes_are_the_same_every_time() -> None:
    shapes = [(4, 6), (2, 8)]
    first = list(probes.grid(TEXT, shapes, None))
    assert probes.digest(list(probes.grid(TEXT, shapes, None))) == probes.digest(first)
    assert probes.digest(list(probes.grid(TEXT, shapes, None, seed=1))) != probes.digest(first)
    # A shape's probes do not depend on the others of the grid.
    alone = {p.name: probes.digest([p]) for p in probes.grid(TEXT, [(2, 8)], None)}
    assert alone.items() <= {p.name: probes.digest([p]) for p in first}.items()


def test_built_in_texts() -> None:
    found = probes.built_in_texts()
    assert len(found) == 150
    assert len(set(found)) == 150
    assert "" in found
    assert max(len(text.split()) for text in found) > 400
    for first, last in (("a", "z"), ("а", "я"), ("\u0600", "\u06ff"), ("\u4e00", "\u9fff"), ("\u0900", "\u097f")):
        assert any(first <= character <= last for text in found for character in text)


def test_text_probes_hold_every_text_once() -> None:
    def encode(batch: Any) -> list[dict[str, Array]]:
        longest = max(1, *(len(text) for text in batch))
        mask = np.array([[int(i < max(1, len(text))) for i in range(longest)] for text in batch], np.int64)
        return [{"input_ids": mask, "attention_mask": mask, "token_type_ids": mask * 0}]

    of = ["x" * (7 * i % 20) for i in range(21)]
    found = list(probes.texts(TEXT, encode, of))
    numbers = [[int(n) for n in p.name.removeprefix("texts ").split(", ")] for p in found]
    assert sorted(n for batch in numbers for n in batch) == list(range(21))
    assert all(len(batch) <= probes.TEXT_BATCH for batch in numbers)
    # The first mixes short and long.
    lengths = [len(of[n]) for n in numbers[0]]
    assert max(lengths) - min(lengths) > 10
    assert {p.padding for p in found} == {"text"}
    (only,) = probes.texts(TEXT, encode, ["one"])
    assert only.name == "texts 0"
    # Short texts are not padded to a long one's length: only the first batch holds both.
    spread = list(probes.texts(TEXT, encode, ["x" * n for n in (*range(1, 29), 250, 300, 310, 500)]))
    padding = [int((p.inputs["attention_mask"] == 0).sum()) for p in spread]
    assert padding[0] > 1000 and max(padding[1:]) <= probes.MAX_PADDING


def test_a_service_s_batches_and_repeated_inputs_are_probed() -> None:
    found = list(probes.serving(TEXT, 32))
    assert (found[0].shape, found[0].padding) == ((32, 8), "right")
    repeated = found[1:]
    assert len(repeated) == probes.REPEATS == len({p.name for p in repeated}) > 2
    assert all((p.inputs["input_ids"] == repeated[0].inputs["input_ids"]).all() for p in repeated)
    assert not {p.name for p in found} & {p.name for p in probes.grid(TEXT, [(32, 8), (1, 8)], None)}


def test_pairs_for_models_that_take_them() -> None:
    texts = [f"{'x' * i}" for i in range(11)]
    found = probes.pairs(TEXT, texts)
    assert found[0] == ("", "x" * 10) and found[-2:] == [("x" * 5, "x" * 5), ("x" * 5, "")] and len(found) == 7
    assert all(len(query) < len(passage) for query, passage in found[:-2])
    single = spec("feature-extraction", token_types=0, inputs=("input_ids", "attention_mask"))
    assert probes.pairs(single, texts) == []
    reranker = spec(token_types=1, labels=("relevance",))
    assert probes.pairs(reranker, texts) == found, "RoBERTa's re-rankers take pairs with two separators and one token type"
    assert probes.pairs(spec("question-answering", token_types=0), texts) == found[:-1], "a question has a context"
    many = probes.pairs(TEXT, [str(i) for i in range(1000)])
    assert len(many) == len(set(many)) == probes.PAIRS + 2


def test_the_longest_probe_leaves_room_in_memory() -> None:
    long = spec(max_length=8192, heads=12)
    lengths = {p.shape[1] for p in probes.grid(long, [(1, 8)], None)}
    assert max(lengths) < 8192
    assert 4 * 12 * max(lengths) ** 2 <= probes.SCORE_BYTES < 4 * 12 * (max(lengths) + 1) ** 2
    assert max(p.shape[1] for p in probes.grid(spec(max_length=512, heads=12), [(1, 8)], None)) == 512


def test_a_long_row_has_one_padding_pattern_unless_the_recipe_states_it() -> None:
    long = spec(max_length=8192, heads=12)

    def patterns(*shapes: tuple[int, int]) -> dict[tuple[int, int], int]:
        return dict(Counter(probe.shape for probe in probes.grid(long, shapes, None)))

    (longest,) = (shape for shape in patterns((1, 8)) if shape[1] > probes.LONG)
    assert patterns((1, 8)) == {(1, 8): 5, (1, 1): 1, (1, probes.LONG): 5, longest: 1}
    assert patterns((2, 2048), longest)[2, 2048] == 6 and patterns(longest)[longest] == 5
    (row,) = (probe for probe in probes.grid(long, [(1, 8)], None) if probe.shape == longest)
    assert row.padding == "right"


@pytest.mark.parametrize("family", ["modernbert", "ultrabert"])
def test_windows_see_nothing_where_a_head_reads_padding(family: str) -> None:
    local = spec(family=family, token_types=0, inputs=("input_ids", "attention_mask"))
    left = next(p for p in probes.grid(local, [(4, 8)], None) if p.padding == "left")
    assert left.rows.tolist() == [True, False, False, False]
    free = local.model_copy(update={"left_padding_invariant": True})
    assert next(p for p in probes.grid(free, [(4, 8)], None) if p.padding == "left").rows.all()


def test_texts_end_to_end_are_of_all_lengths() -> None:
    texts = [str(i) for i in range(200)]
    lengths = [(7 * i) % 200 for i in range(200)]
    chosen = [lengths[int(text)] for text in probes.of_all_lengths(texts, lengths)]
    assert len(chosen) == probes.END_TO_END_TEXTS and (min(chosen), max(chosen)) == (0, 199)
    assert max(np.diff(chosen)) <= 7, "no length is far from one that is run"
    assert probes.of_all_lengths(["one"], [3]) == ["one"]
