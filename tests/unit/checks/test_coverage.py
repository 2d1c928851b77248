"""The rules of the coverage sweeps: what they run, and which rows stand out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from bertopt.checks import coverage, framing, gates, padded_batches, parity, probes, row_differences, sweep_plan
from bertopt.checks.batch_shapes import MAX_BATCH
from bertopt.core import ShapeLimits
from bertopt.errors import WrongAnswer
from bertopt.report import formatting
from bertopt.results import Limits
from bertopt.results.coverage import Coverage
from bertopt.runtime.batch_limits import BatchLimits, most_tokens
from tests.support.measured import case, measured, swept
from tests.support.specs import EMBEDDING, MINILM, TAGS, TEXT, VALUES, WHOLE
from tests.support.specs import SWEPT as SPEC
from tests.support.specs import spec as tiny_spec

if TYPE_CHECKING:
    from bertopt.core import Array


@pytest.mark.parametrize(
    ("limit", "median", "worst", "passes"),
    [
        (1e-5, 9e-7, 2e-6, True), (1e-5, 9e-7, 2e-2, False), (1e-5, 2e-5, 2e-5, False),
        (6e-2, 1.1e-2, 5.6e-2, True), (6e-2, 1.1e-2, 0.54, False), (6e-2, 0.1, 0.2, False),
        (0.35, 0.13, 0.43, True), (0.35, 0.13, 0.9, False), (0.35, 0.5, 0.6, False),
        (None, 0.13, 0.43, True), (None, 0.13, 0.9, False), (9.0, 1.0, 5.0, True),
        (9.0, math.nan, math.nan, False),
    ],
)  # fmt: skip
def test_a_row_that_stands_out_is_refused(limit: float | None, median: float, worst: float, passes: bool) -> None:
    assert (coverage.failures(swept(median, worst), Limits(rel_l2=limit)) == []) == passes


@pytest.mark.parametrize(("median", "worst", "passes"), [(7.6e-4, 0.071, False), (7.6e-4, 0.018, True), (1e-4, 0.009, True), (0.018, 0.42, True), (0.018, 0.43, False), (0.004, 0.09, True), (0.004, 0.11, False)])
def test_a_row_is_held_to_the_others_where_only_cosines_are_limited(median: float, worst: float, passes: bool) -> None:
    """Two rare tokens that changed places were delivered in bf16: 94 times the median row, half of what 0.99 is as a distance."""
    assert (coverage.failures(swept(median, worst), Limits(cosine_median_min=0.91)) == []) == passes


@pytest.mark.parametrize(("width", "seeds"), [(1, 20), (2, 20)])
def test_rounding_alone_makes_no_row_stand_out(width: int, seeds: int) -> None:
    """A right re-ranker in INT8 was refused: five medians of one number are 3.4 standard deviations."""
    for seed in range(seeds):
        compared = row_differences.Comparer({"logits": 1.0})
        rng = np.random.default_rng(seed)
        for probe in sweep_plan.plan(SPEC, 7, 8192).of(True, WHOLE)[-20:]:
            reference = np.ones((probe.shape[0], width), np.float32)
            compared.add(probe, {"logits": reference + rng.normal(0, 0.15, reference.shape)}, True, {"logits": reference})
        assert coverage.failures(compared.result(7, coverage.shares(SPEC, []), 0), Limits(cosine_median_min=0.91)) == []


@pytest.mark.parametrize(("wrong", "error"), [((0.0, 0.0), 0.0), ((0.3, 0.0), 0.1), ((0.0, 2e4), 0.1)])
def test_several_numbers_are_swept_beside_their_own_sizes(wrong: tuple[float, float], error: float) -> None:
    mask = np.ones((4, 6), np.int64)
    probe = sweep_plan.make_probe(VALUES, "batch sizes", 0, mask, np.arange(24), np.random.default_rng(0))
    right = np.array([[3.0, 2e5]], np.float32).repeat(4, axis=0)
    usual = row_differences.usual_sizes([{"logits": right}], VALUES.gives_numbers)
    compared = row_differences.Comparer(usual)
    compared.add(probe, {"logits": right + np.array(wrong, np.float32)}, True, {"logits": right})
    (output,) = compared.result(0, coverage.shares(VALUES, []), 0).outputs.values()
    assert output.worst == pytest.approx(error / math.sqrt(2))


@pytest.mark.parametrize("fault", ["", "added", "shared"])
def test_one_label_of_many_shows_beside_what_labels_vary_by(fault: str) -> None:
    """One of 77 classes with 4 more in batches of 13 was delivered in INT8: a fifth of such a row is all other classes' scores."""
    rng, many = np.random.default_rng(0), 77
    spec = SPEC.model_copy(update={"labels": tuple(map(str, range(many)))})
    probes = sweep_plan.plan(spec, 7, 8192).of(True, WHOLE)[-40:]
    right = {probe.name: {"logits": (rng.normal(size=(probe.shape[0], many)) * 1.8).astype(np.float32)} for probe in probes}
    compared = row_differences.Comparer(row_differences.usual_sizes(right.values()), row_differences.score_units(right.values(), spec))
    for probe in probes:
        got = right[probe.name]["logits"] + rng.normal(0, 0.05, (probe.shape[0], many))
        if probe is probes[3]:
            got += {"": 0.0, "added": 4.0 * (np.arange(many) == 5), "shared": 4.0 / math.sqrt(many)}[fault]
        compared.add(probe, {"logits": got}, True, right[probe.name])
    found = compared.result(7, coverage.shares(spec, []), 0)
    whole, label = (found.outputs[name] for name in ("logits", "logits, one score"))
    assert label.median == pytest.approx(whole.median, rel=0.2), "one limit fits both"
    failures = coverage.failures(found, Limits(cosine_median_min=0.91))
    assert [failure.text for failure in failures if "one score" not in failure.text] == [], "all labels together hide it"
    assert bool(failures) == (fault == "added")


def test_which_scores_are_compared_by_themselves() -> None:
    few = {"logits": np.array([[1.0, -1, 3], [3, 1, 3]], np.float32), "last_hidden_state": np.ones((2, 4), np.float32)}
    assert row_differences.score_units([few], TEXT) == {}, "of few labels none hides"
    assert row_differences.score_units([few], EMBEDDING) == {}
    # About their means they vary by 1, 1 and 0: a score that does not vary is relative to half its size, and none to less than the usual one.
    (name, units), = row_differences.score_units([few], TAGS).items()
    usual = math.sqrt((5 / 4 + 1 + 9 / 4) / 3)
    assert name == "logits" and units == pytest.approx(math.sqrt(2 * math.log(5 * 16)) * np.array([usual, usual, 1.5]))
    spans = [{"start_logits": np.array([[2.0, -2, 0, 0]], np.float32)}, {"start_logits": np.array([[2.0, -2]], np.float32)}]
    assert row_differences.score_units(spans, tiny_spec("question-answering"))["start_logits"] == pytest.approx([math.sqrt(2 * math.log(16)) * 2])


def test_tokens_of_rows_of_one_are_no_single_numbers() -> None:
    """Answers' first tokens are [B, S]: one number a row where rows have one token, and vectors else."""
    compared = row_differences.Comparer({"start_logits": 1.0})
    for length in (1, 6):
        mask = np.ones((2, length), np.int64)
        probe = sweep_plan.make_probe(SPEC, "batch sizes", length, mask, np.arange(2 * length), np.random.default_rng(0))
        reference = np.ones((2, length), np.float32)
        compared.add(probe, {"start_logits": reference}, True, {"start_logits": reference})
        assert compared.one_number("start_logits") == (length == 1)


@pytest.mark.parametrize(("heads", "text_length", "longest"), [(12, 512, 4729), (16, 512, 4096), (16, 8192, 8192), (16, 6000, 6000), (2, 512, 8192)])
def test_rows_that_no_text_has_are_no_longer_than_scores_have_room_for(heads: int, text_length: int, longest: int) -> None:
    """8,192 tokens of 16 heads have 4 GiB of scores a layer: who serves 512 tokens needs no such machine to export."""
    spec = SPEC.model_copy(update={"heads": heads, "max_length": 8192, "text_length": text_length})
    rows = [probe for probe in sweep_plan.plan(spec, 0, 4096).probes if probe.shape[0] == 1]
    assert max(probe.shape[1] for probe in rows) == longest
    assert next(probe for probe in rows if probe.shape[1] == longest).compared.all()


def test_outputs_that_are_not_finite_are_refused() -> None:
    assert coverage.failures(swept(0.0, 0.0, finite=False), Limits(rel_l2=9.0))


def test_a_single_text_in_reduced_precision_is_left_to_the_limits_on_parity_unless_it_is_lost() -> None:
    assert not coverage.failures(swept(0.1, 0.9, coverage.END_TO_END), Limits(rel_l2=0.35))
    assert coverage.failures(swept(0.1, 1.1, coverage.END_TO_END), Limits(rel_l2=0.35))
    assert not coverage.failures(swept(0.1, 1.1, coverage.END_TO_END), Limits(rel_l2=9.0))
    assert coverage.failures(swept(0.1, math.nan, coverage.END_TO_END), Limits(rel_l2=0.35))
    assert coverage.failures(swept(1e-6, 1e-2, coverage.END_TO_END), Limits(rel_l2=1e-5))


@pytest.mark.parametrize(
    ("small", "large", "limits", "passes"),
    [
        (0.008, 0.02, Limits(rel_l2=0.14), True), (0.008, 0.12, Limits(rel_l2=0.14), False), (1e-4, 0.009, Limits(rel_l2=0.14), True),
        (0.008, math.nan, Limits(rel_l2=0.14), False), (None, 0.1, Limits(rel_l2=0.14), True),
    ],
)  # fmt: skip
def test_rows_of_large_batches_are_held_to_those_of_small_ones(small: Any, large: Any, limits: Limits, passes: bool) -> None:
    found = swept(0.009, 0.02)
    output = found.outputs["logits"].model_copy(update={"small_batches": small, "large_batches": large})
    assert (coverage.failures(found.model_copy(update={"outputs": {"logits": output}}), limits) == []) == passes


@pytest.mark.parametrize(
    ("median", "text_error", "limits", "passes"),
    [
        (0.012, 0.002, Limits(cosine_median_min=0.99), False), (0.009, 0.002, Limits(cosine_median_min=0.99), True), (0.04, 0.01, Limits(cosine_median_min=0.99), True),
        (0.15, 0.1, Limits(cosine_median_min=0.99), False), (0.3, 0.05, Limits(cosine_median_min=0.91), False), (0.3, None, Limits(cosine_median_min=0.91), True),
        (0.3, 0.05, Limits(cosine_median_min=0.91, rel_l2=0.35), True), (0.3, math.nan, Limits(cosine_median_min=0.91), False),
    ],
)  # fmt: skip
def test_the_median_row_of_reduced_precision_is_held_to_real_texts(median: float, text_error: float | None, limits: Limits, passes: bool) -> None:
    """The cosine limit as a distance let rows in bfloat16 differ by 0.14 whose texts differ by 0.002."""
    assert (coverage.failures(swept(median, median), limits, text_error) == []) == passes


@pytest.mark.parametrize(("wrong", "error", "passes"), [(0.2, 0.06, False), (0.2, 0.021, False), (0.2, 0.019, True), (0.05, 0.06, True)])
def test_a_share_of_wrong_rows_is_refused_though_none_stands_out(wrong: float, error: float, passes: bool) -> None:
    rng = np.random.default_rng(3)
    rows = np.where(rng.random(1000) < wrong, error, 0.005)[:, None]
    compared, reference = row_differences.Comparer({"logits": 1.0}), np.ones((1000, 2), np.float32)
    probe = probes.Probe("sweep", "ids", {"input_ids": np.ones((1000, 4), np.int64)}, np.ones((1000, 4), bool), np.ones(1000, bool))
    compared.add(probe, {"logits": reference * (1 + rows)}, True, {"logits": reference})
    failed = coverage.failures(compared.result(7, coverage.shares(SPEC, []), 0), Limits(cosine_median_min=0.99))
    assert [failure.text.split(" of")[0] for failure in failed] == ([] if passes else ["nine rows"])


def differing(wrong: Callable[[Array, Array], Array]) -> Coverage:
    """What a model finds whose rows are off by 0.005 of their size, and by 0.06 where `wrong` of valid [B, S] and second text [B, S]."""
    compared = row_differences.Comparer({"logits": 1.0})
    for probe in sweep_plan.plan(SPEC, 7, 8192).of(True, WHOLE):
        valid = probe.inputs["attention_mask"] == 1
        error = np.where(wrong(valid, valid & (probe.inputs["token_type_ids"] > 0)), 0.06, 0.005)
        reference = np.ones((len(valid), 2), np.float32)
        compared.add(probe, {"logits": reference * (1 + error[:, None])}, True, {"logits": reference})
    return compared.result(7, coverage.shares(SPEC, []), 0)


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        (lambda valid, second: second.sum(1) > 150, "second texts of 129 to 256 tokens"), (lambda valid, second: valid.sum(1) > 300, "rows of 257 to 512 tokens"),
        (lambda valid, second: valid.sum(1) == 2, "rows of 2 tokens"), (lambda valid, second: valid.sum(1) == 0, None),
        (lambda valid, second: np.full(len(valid), len(valid) == 16), "rows in batches of 16"),
    ],
)  # fmt: skip
def test_rows_of_one_length_are_held_to_all_rows(wrong: Any, where: str | None) -> None:
    """An INT8 re-ranker whose second texts were cut off was delivered: its real pairs were short."""
    found = differing(wrong)
    assert {"rows of 2 tokens", "rows of 257 to 512 tokens", "second texts of 1 token"} <= found.outputs["logits"].lengths.keys()
    failed = coverage.failures(found, Limits(cosine_median_min=0.91))
    assert [failure.text.split(" may")[0] for failure in failed] == ([f"the median of {where}"] if where else [])


@pytest.mark.parametrize("first", [0, 1, 6])
def test_rows_without_a_first_text_are_no_pairs(first: int) -> None:
    """Static INT8 is calibrated on none: where a seed drew many, a right model was refused for its second texts of 5 to 8 tokens."""
    ids = np.ones((400, 14), np.int64)
    types = (np.arange(14) >= first).astype(np.int64) * (np.arange(400) < 20)[:, None]
    mask = (np.arange(14) < first + 6) * np.ones_like(ids)
    inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types * mask}
    compared = row_differences.Comparer({"logits": 1.0})
    error = np.where(np.arange(400) < 20, 0.06, 0.005)[:, None]
    reference = np.ones((400, 2), np.float32)
    probe = probes.Probe("sweep", "batch sizes", inputs, mask.astype(bool), np.ones(400, bool))
    compared.add(probe, {"logits": reference * (1 + error)}, True, {"logits": reference})
    failed = coverage.failures(compared.result(7, coverage.shares(SPEC, []), 0), Limits(cosine_median_min=0.91))
    assert [failure.text.split(" may")[0] for failure in failed] == (["the median of second texts of 5 to 8 tokens"] if first else [])


def test_text_by_text() -> None:
    """The token outputs of a text are one vector; a text without the reference's length is lost."""
    reference = {f"{number}/logits": np.ones((number + 1, 4), np.float32) for number in range(6)}
    got = {**reference, "3/logits": reference["3/logits"] * 1.5}
    found = row_differences.end_to_end(got, reference, list("abcdef"))
    assert found.median == 0.0 and found.worst == pytest.approx(0.5) and found.where == "text 'd'"
    for wrong in ({"3/logits": reference["4/logits"]}, {"3/logits": reference["3/logits"] * np.nan}):
        assert not row_differences.end_to_end({**reference, **wrong}, reference, list("abcdef")).worst < 1e9
    reference["3/logits"] = np.zeros((4, 4), np.float32)
    assert row_differences.end_to_end(got, reference, list("abcdef")).worst < 2, "outputs near zero are no measure of themselves"


def test_one_call_has_many_different_short_texts() -> None:
    """A session that mixed up the order of more than eight batches was delivered."""
    found = probes.snippets(probes.built_in_texts())
    assert len(found) == len(set(found)) == probes.SNIPPETS > BatchLimits.texts and max(map(len, found)) <= probes.SNIPPET_LETTERS
    assert probes.snippets(["", "a", "the cat sat", "x" * 99]) == ["a", "the cat", "cat sat", "sat"]
    assert not probes.snippets([])
    assert not coverage.failures(swept(0.1, 0.9, coverage.IN_ONE_CALL), Limits(rel_l2=0.35))
    for limits in (Limits(rel_l2=0.35), Limits(rel_l2=1e-5)):
        assert coverage.failures(swept(0.0, 1.2, coverage.IN_ONE_CALL), limits)


@pytest.mark.parametrize("task", ["text-classification", "fill-mask"])
def test_a_plan_runs_every_id_position_and_batch_size(task: Any) -> None:
    spec = SPEC.model_copy(update={"task": task})
    plan = sweep_plan.plan(spec, 7, most_tokens(spec, launched=False))
    exact, rough = plan.of(False, WHOLE), plan.of(True, WHOLE)
    shares = coverage.shares(spec, exact)
    assert (shares["ids"], shares["positions"], shares["batch_sizes"], shares["token_types"]) == (1.0, 1.0, 1.0, 1.0)
    # In reduced precision every id stands in a row of four.
    short = [probe for probe in rough if probe.padding != "batch sizes"]
    assert coverage.shares(spec, short)["ids"] == 1.0
    assert {probe.shape[1] for probe in short} == {4}
    tokens = sum(probe.compared.size for probe in exact)
    # A model this small runs every length besides, and a batch of documents.
    assert tokens < 2 * spec.vocabulary + 512 * 513 / 2 + 8192
    assert max(probe.compared.size for probe in exact) == (8192 if task == "text-classification" else 2048)


def test_rows_of_batches_begin_and_end_as_texts_do_and_every_id_stands_between() -> None:
    plan = sweep_plan.plan(SPEC, 7, 8192, (101, 102))
    framed, between = 0, set[int]()
    for probe in plan.of(False, WHOLE):
        for ids, mask in zip(probe.inputs["input_ids"], probe.inputs["attention_mask"], strict=True):
            length = int(mask.sum())
            if probe.padding == "batch sizes" and length > 2:
                assert (ids[0], ids[length - 1]) == (101, 102)
                framed += 1
                between.update(ids[1 : length - 1].tolist())
            else:
                between.update(ids[:length].tolist())
    assert framed > 500 and between == set(range(SPEC.vocabulary))
    shapes = [probe.shape for probe in sweep_plan.plan(SPEC, 7, 8192).probes if probe.padding == "batch sizes"]
    assert [probe.shape for probe in plan.probes if probe.padding == "batch sizes"] == shapes, "no frame changes a shape"


@pytest.mark.parametrize("vocabulary", [1, 6, 9, 20])
def test_a_vocabulary_with_fewer_ids_than_a_row_has_tokens(vocabulary: int) -> None:
    few = SPEC.model_copy(update={"vocabulary": vocabulary})
    ids = [probe.inputs["input_ids"] for probe in sweep_plan.plan(few, 0, 8192, (0, 0)).probes]
    assert {int(one) for some in ids for one in some.ravel()} == set(range(vocabulary))


@pytest.mark.parametrize(("ids", "frame"), [([101, 102], (101, 102)), ([1], None), ([7, 101, 102], None), ([], None)])
def test_a_frame_is_what_the_empty_text_becomes(ids: list[int], frame: Any) -> None:
    assert framing.of_empty_text(np.array(ids)) == frame


def test_the_second_text_of_a_pair_is_known_by_types_or_by_what_ends_the_first() -> None:
    ids, mask = np.array([[1, 7, 2, 2, 8, 8, 2, 0], [1, 7, 7, 2, 0, 0, 0, 0]]), np.array([[1] * 7 + [0], [1] * 4 + [0] * 4])
    types = np.array([[0, 0, 0, 1, 1, 1, 1, 0], [0] * 8])
    expected = [[False] * 4 + [True] * 2 + [False] * 2, [False] * 8]
    for inputs in ({}, {"token_type_ids": types}, {"token_type_ids": types * 0}):
        assert framing.second_texts({"input_ids": ids, "attention_mask": mask, **inputs}, (1, 2)).tolist() == expected
    assert not framing.second_texts({"input_ids": ids, "attention_mask": mask}, None).any()


def test_a_small_model_runs_every_length_and_a_larger_one_what_fits_its_budget() -> None:
    small = SPEC.model_copy(update={"layers": 2, "hidden": 32})
    assert coverage.shares(small, sweep_plan.plan(small, 1, 8192).of(False, WHOLE))["lengths"] == 1.0
    exact = sweep_plan.plan(MINILM, 1, 8192).of(False, WHOLE)
    assert 0.3 < coverage.shares(MINILM, exact)["lengths"] < 0.5
    # Of what the predictor cuts off, a sample. Ids that stand in these rows need no others in float32.
    cut = MINILM.model_copy(update={"text_length": 256})
    exact = sweep_plan.plan(cut, 1, 8192).of(False, WHOLE)
    assert {probe.shape[1] for probe in exact if probe.shape[0] == 1} >= set(range(1, 257)), "a length of a batch is run as one text too"
    assert 0.5 < coverage.shares(cut, exact)["lengths"] < 0.8
    assert sum(probe.compared.size for probe in exact) < 2.5 * cut.vocabulary
    base = MINILM.model_copy(update={"layers": 12, "hidden": 768})
    plan = sweep_plan.plan(base, 1, 8192)
    assert coverage.shares(base, plan.of(False, WHOLE))["lengths"] < 0.3
    assert coverage.shares(base, [probe for probe in plan.of(True, WHOLE) if probe.shape[1] == 4])["ids"] == 1.0


@pytest.mark.parametrize("length", [2, 37, 137, 255])
@pytest.mark.parametrize("padded", [False, True], ids=["batch", "text"])
def test_a_model_that_is_wrong_at_one_length_is_refused(length: int, padded: bool) -> None:
    """The length of a batch's rows, or of one text's tokens."""

    def run(inputs: Any, wrong: bool) -> Any:
        texts = inputs["attention_mask"].sum(axis=1)
        logits = np.sin(np.outer(inputs["input_ids"].sum(axis=1) + texts, [1.0, 2.0])).astype(np.float32)
        where = texts == length if padded else np.full(len(texts), inputs["input_ids"].shape[1] == length)
        return {"logits": logits + 0.01 * (wrong & where)[:, None]}

    spec = MINILM.model_copy(update={"text_length": 256})
    plan = sweep_plan.plan(spec, 1, 8192)
    compared = row_differences.Comparer({"logits": 1.0})
    for probe in plan.of(False, WHOLE):
        (got, finite), (reference, _) = (
            coverage.answer(lambda inputs, wrong=wrong: run(inputs, wrong), probe, spec, WHOLE, 1) for wrong in (True, False)
        )
        compared.add(probe, got, finite, reference)
    found = compared.result(1, coverage.shares(spec, plan.of(False, WHOLE)), 1)
    (failure,) = coverage.failures(found, parity.DEFAULT_LIMITS["float32"])
    assert f" × {length}, " in failure.text or padded


def test_text_lengths_count_valid_tokens() -> None:
    probe = sweep_plan.make_probe(SPEC, "batch sizes", 0, np.array([[1, 1, 1, 1], [1, 1, 0, 0]]), np.arange(1, 7), np.random.default_rng(0))
    shares = coverage.shares(SPEC, [probe])
    assert (shares["lengths"], shares["text_lengths"]) == (1 / 512, 2 / 512)


def test_a_row_that_is_smaller_than_usual_is_judged_by_the_usual_size() -> None:
    probe = sweep_plan.plan(SPEC, 1, 8192).probes[2]
    reference = np.ones((probe.shape[0], 3), np.float32)
    reference[0] = 0.01
    compared = row_differences.Comparer({"logits": 1.0})
    compared.add(probe, {"logits": reference + 0.02}, True, {"logits": reference})
    found = compared.result(1, dict.fromkeys(("ids", "positions", "batch_sizes", "lengths", "token_types"), 1.0), 1)
    assert found.outputs["logits"].worst == pytest.approx(0.02, rel=0.02)


def test_another_seed_has_other_lengths_and_the_same_seed_the_same() -> None:
    shapes = [[probe.shape for probe in sweep_plan.plan(SPEC, seed, 8192).probes] for seed in (1, 1, 2)]
    assert shapes[0] == shapes[1] != shapes[2]


def test_the_largest_models_are_swept_in_part_and_say_so() -> None:
    large = SPEC.model_copy(update={"layers": 24, "hidden": 1024, "vocabulary": 250_000})
    probes = sweep_plan.plan(large, 1, 8192).of(False, WHOLE)
    shares = coverage.shares(large, probes)
    assert 0.02 < shares["ids"] < 0.2 and shares["batch_sizes"] == 1.0


def test_a_longest_row_that_takes_minutes_is_run_by_the_stage_to_deliver_alone() -> None:
    """8,192 tokens of 24 layers take 11.5 TFLOP, most of what a stage ran."""
    shapes = ShapeLimits(longest=8192)
    longer = SPEC.model_copy(update={"max_length": 8192, "text_length": 8192, "layers": 6, "hidden": 384})
    for spec, by_every_stage in ((longer, True), (longer.model_copy(update={"layers": 24, "hidden": 1024, "heads": 16}), False)):
        plan = sweep_plan.plan(spec, 1, 8192)
        assert ((1, 8192) in [probe.shape for probe in plan.of(False, shapes, every=False)]) is by_every_stage
        assert (1, 8192) in [probe.shape for probe in plan.of(False, shapes)]


def test_outputs_under_the_clock_are_judged_by_gross_faults() -> None:
    """How many there are depends on the clock: a verdict near a limit would not repeat."""
    limits = parity.DEFAULT_LIMITS["float32"]
    right = case(max_abs=1e-6, rel_l2=1e-6, cosine_min=1.0, cosine_mean=1.0)
    near = right.model_copy(update={"padding": "timed", "rel_l2": 3e-5, "max_abs": 2e-4, "cosine_min": 0.9999})
    wrong = near.model_copy(update={"rel_l2": 1e-3})
    nan = near.model_copy(update={"rel_l2": math.nan})
    assert parity.failures([right, near], limits) == []
    for bad in (wrong, nan):
        (failure,) = parity.failures([right, bad], limits)
        assert "under the clock" in failure.text
    assert parity.judge([right, near], limits, None).worst.value <= 1e-6


def test_the_gates_apply_the_rules() -> None:
    found = measured().model_copy(update={"coverage": swept(0.01, 0.9)})
    (failure,) = gates.find_failures(found, Limits(rel_l2=0.06))
    assert failure.gate == "coverage" and failure.metric == "rel_l2"
    (failure,) = gates.find_failures(found.model_copy(update={"coverage": swept(0.01, math.nan)}), Limits(rel_l2=0.06))
    assert failure.metric is None, "a value that is not finite cannot be waived"


def test_the_padding_token_is_run_as_a_token() -> None:
    exact, rough = (sweep_plan.plan(MINILM, 1, 8192).of(reduced, WHOLE) for reduced in (False, True))
    assert any(((probe.inputs["input_ids"] == MINILM.pad_id) & (probe.inputs["attention_mask"] == 1)).any() for probe in exact)
    short = [probe for probe in rough if probe.padding == sweep_plan.SHORT_ROWS]
    assert coverage.shares(MINILM, [probe for probe in exact if probe.shape[1] < 5])["ids"] < 1.0
    assert any((probe.inputs["input_ids"] == MINILM.pad_id).any() for probe in short)


def test_rows_stand_beside_their_copies() -> None:
    copies = [probe for probe in sweep_plan.plan(MINILM, 1, 8192).of(True, WHOLE) if "beside their copies" in probe.name]
    assert [probe.shape[0] for probe in copies] == [2, 32, 21, 11]
    for probe, times in zip(copies, (2, 2, 3, 11), strict=True):
        rows = [row.tobytes() for row in np.concatenate(list(probe.inputs.values()), axis=1)]
        assert set(Counter(rows).values()) == {times} and probe.compared.shape == probe.inputs["input_ids"].shape


def test_batches_between_a_few_rows_and_the_largest_have_long_rows() -> None:
    """A model that is wrong for 9 to 31 rows of more than 20 tokens was delivered."""
    for seed in range(20):
        plan = sweep_plan.plan(MINILM, seed, 8192)
        shapes = [probe.shape for probe in plan.of(False, WHOLE)]
        for least, most, tokens in ((2, 8, 512), (9, 15, 512), (16, 16, 366), (17, 23, 853), (24, 24, 266), (25, 31, 597), (32, 32, 426)):
            assert any(least <= batch <= most and batch * sequence >= tokens for batch, sequence in shapes if sequence < 256)
        for rows in (16, 24, 32):
            assert any(batch == rows and 16 < sequence < 128 for batch, sequence in shapes), "the largest batch is no tile longer"
        after = next(at for at, shape in enumerate(shapes) if shape == max(shapes, key=lambda shape: shape[0] * shape[1])) + 1
        assert shapes[after : after + 3] == [(1, 12), (1, 4), (1, 4)], "what a large batch leaves behind, in buffers that take turns too"
        lengths = {sequence for batch, sequence in shapes if batch == 1}
        assert all({edge - 1, edge, edge + 1} & lengths for edge in padded_batches.TILES), "programs choose code by tiles"
        early = [probe.shape for probe in plan.of(False, WHOLE, every=False)]
        assert any(batch == length >= 4 for batch, length in early), "rows and length mixed up are right for a square alone"
        assert {batch for batch, length in early if length >= 4} >= set(range(1, MAX_BATCH + 1)), "no row of a frame alone"
    for longest in (1, 2, 12, 40):
        small = SPEC.model_copy(update={"max_length": longest, "text_length": longest})
        assert {probe.shape[0] for probe in sweep_plan.plan(small, 1, 8192).probes} >= set(range(1, MAX_BATCH + 1))


def test_a_gpu_runs_batch_sizes_between_a_processors_and_the_largest() -> None:
    """A model that was wrong for 64 to 200 rows could be delivered: a GPU's predictor makes batches of up to 16,384."""
    for seed in range(20):
        plan = sweep_plan.plan(MINILM, seed, 65_536)
        sizes = {probe.shape[0] for probe in plan.of(False, WHOLE, every=False)}
        assert sizes >= set(range(1, MAX_BATCH + 1)) and any(64 <= size <= 200 for size in sizes)
        assert any(570 < size <= 1024 for size in sizes)
        assert max(probe.shape[0] * probe.shape[1] for probe in plan.probes) == 65_536
    assert max(probe.shape[0] for probe in sweep_plan.plan(MINILM, 1, 8192).of(False, WHOLE, every=False)) == 32


def test_the_docs_say_what_is_run_of_minilm() -> None:
    spec = MINILM.model_copy(update={"text_length": 256})
    shares = coverage.shares(spec, sweep_plan.plan(spec, 788393475, 8192).of(False, WHOLE))
    swept = Coverage(seed=788393475, outputs={}, rows=0, tokens=0, finite=True, **shares)
    docs = (Path(__file__).parents[3] / "docs/checks.md").read_text("utf-8")
    assert f"checked: {formatting.coverage(swept)}\n" in docs


def test_the_checkpoint_answers_in_one_call_as_in_separate_ones() -> None:
    """Two texts of one length that change places in the code that all stages share were delivered."""
    alone = {f"{number}/logits, alone": np.array([1.0, number], np.float32) for number in (0, 2)}
    together = {f"{number}/logits": np.array([1.0, number], np.float32) for number in range(3)}
    row_differences.check_alone(alone | together, list("abc"))
    row_differences.check_alone(alone, list("abc"))  # fill-mask is not run in one call
    with pytest.raises(WrongAnswer, match=r"text '[ac]' must be the same in a call for it and in one for 3 texts"):
        row_differences.check_alone(alone | together | {"0/logits": together["2/logits"], "2/logits": together["0/logits"]}, list("abc"))


def test_long_rows_of_a_small_vocabulary_differ() -> None:
    """All ids followed each other in one order: of 32 ids only 32 pairs of neighbours were run, and long rows were nearly equal."""
    small = SPEC.model_copy(update={"vocabulary": 33, "pad_id": 32})
    neighbours = set[tuple[int, int]]()
    for probe in sweep_plan.plan(small, 0, 8192).of(False, WHOLE):
        for row, length in zip(probe.inputs["input_ids"], probe.inputs["attention_mask"].sum(axis=1), strict=True):
            neighbours.update(pairwise(row[:length].tolist()))
    assert len(neighbours) > 700
    ids = np.arange(5) * 7
    every = sweep_plan.in_turn(ids, 0, 23)
    assert every[:5].tolist() == ids.tolist() and all(sorted(every[at : at + 5]) == ids.tolist() for at in (5, 10, 15))
    assert all((sweep_plan.in_turn(ids, first, count) == every[first : first + count]).all() for first in range(12) for count in (0, 1, 5, 11))
