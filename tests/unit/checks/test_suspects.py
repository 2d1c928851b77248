"""A wrong id is wrong beside any others; a row that rounding hit hard is not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from bertopt.checks import coverage, row_differences, suspects, sweep_plan
from bertopt.checks.probes import Probe
from bertopt.checks.sweep_plan import SHORT_ROWS
from tests.support.specs import SWEPT as SPEC
from tests.support.specs import WHOLE

Vectors = dict[str, dict[str, np.ndarray]]
WRONG = 77
TABLE = np.random.default_rng(0).standard_normal((SPEC.vocabulary, 8)).astype(np.float32)


def reference(probe: Probe) -> np.ndarray:
    """One vector [B, 8] a row: the sum of its ids' embeddings."""
    return np.asarray(TABLE[probe.inputs["input_ids"]].sum(axis=1))


def noisy(probe: Probe) -> np.ndarray:
    """The same rounded: 2 % off, one row of a hundred 60 % off."""
    expected = reference(probe)
    rng = np.random.default_rng(np.random.default_rng(1).integers(1000) + len(probe.name) + int(probe.inputs["input_ids"].sum()))
    often = 0.002 if probe.padding == "batch sizes" else 0.01
    share = np.where(rng.random(len(expected)) < often, 0.6, 0.02)[:, None]
    return np.asarray(expected + share * np.linalg.norm(expected, axis=1, keepdims=True) * rng.standard_normal(expected.shape) / np.sqrt(8))


def wrong(probe: Probe) -> np.ndarray:
    """And one id has another one's embedding."""
    changed = np.where(probe.inputs["input_ids"] == WRONG, WRONG + 1, probe.inputs["input_ids"])
    right = Probe(probe.name, probe.padding, probe.inputs, probe.compared, probe.rows)
    off = reference(Probe(probe.name, probe.padding, {**probe.inputs, "input_ids": changed}, probe.compared, probe.rows)) - reference(right)
    return np.asarray(noisy(probe) + off)


def wrong_row(probe: Probe) -> np.ndarray:
    """And the third row of batches of 9 is another's."""
    got = noisy(probe)
    return got[[0, 1, 3, 3, *range(4, 9)]] if len(got) == 9 else got


def wrong_length(probe: Probe) -> np.ndarray:
    """And rows of 77 tokens are half as large."""
    return noisy(probe) * (0.5 if probe.shape[1] == 77 else 1)


def wrong_copy(probe: Probe) -> np.ndarray:
    """And a row that stands in its batch before is half as large."""
    seen, again = set[bytes](), []
    for row in probe.inputs["input_ids"]:
        again.append(row.tobytes() in seen)
        seen.add(row.tobytes())
    return noisy(probe) * np.where(again, 0.5, 1)[:, None]


def swept(
    model: Callable[[Probe], np.ndarray], settle: bool, paddings: Sequence[str] = ("ids", SHORT_ROWS), alone: bool = False
) -> Any:
    """How far the worst row is from what is allowed. With `alone` a batch of one row gives another output less."""
    plan = sweep_plan.plan(SPEC, 1, 8192)
    probes = [probe for probe in plan.of(True, WHOLE) if probe.padding in paddings]
    size = float(np.sqrt(8 * 4 / 8))
    compared = row_differences.Comparer({"logits": size, "hidden": size})

    def outputs(model: Callable[[Probe], np.ndarray], probe: Probe) -> dict[str, np.ndarray]:
        every = ("logits", "hidden") if alone and len(probe.compared) > 1 else ("logits",)
        return {name: model(probe) for name in every}

    def run(asked: Sequence[Probe]) -> tuple[Vectors, Vectors]:
        return {probe.name: outputs(model, probe) for probe in asked}, {probe.name: outputs(reference, probe) for probe in asked}

    got, expected = run(probes)
    for probe in probes:
        compared.add(probe, got[probe.name], True, expected[probe.name])
    if settle:
        suspects.settle(compared, SPEC, 3, run)
    shares = dict.fromkeys(("ids", "positions", "batch_sizes", "lengths", "token_types"), 1.0)
    found = compared.result(3, shares, 1).outputs.values()
    return max(output.worst / coverage.allowed_row(output.median, 0.0) for output in found)


def test_rows_that_rounding_hit_are_right_and_a_wrong_id_is_not() -> None:
    assert swept(noisy, settle=False) > 1.5, "without a second look a right model is refused"
    assert swept(noisy, settle=True) <= 1.0
    assert swept(wrong, settle=True) > 1.5


def test_a_batch_that_rounding_hit_is_right_and_a_wrong_row_or_length_is_not() -> None:
    paddings = ("batch sizes",)
    assert swept(noisy, False, paddings) > 1.5, "without a second look a right model is refused"
    assert swept(noisy, True, paddings) <= 1.0
    assert swept(wrong_row, True, paddings) > 1.5
    assert swept(wrong_length, True, paddings) > 1.5
    assert swept(wrong_copy, True, paddings) > 1.5


@pytest.mark.parametrize("paddings", [("ids", SHORT_ROWS), ("batch sizes",)])
def test_outputs_that_some_probes_do_not_give_are_judged_by_their_own_probes(paddings: tuple[str, ...]) -> None:
    assert swept(noisy, True, paddings, alone=True) <= 1.0
    assert swept(wrong if "ids" in paddings else wrong_row, True, paddings, alone=True) > 1.5


def test_too_many_rows_that_stand_out_need_no_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspects, "MOST", 2)
    assert swept(noisy, settle=True) > 1.5


def test_other_ids_keep_what_is_equal_and_none_is_the_padding() -> None:
    for spec in (SPEC, SPEC.model_copy(update={"pad_id": 7}), SPEC.model_copy(update={"pad_id": SPEC.vocabulary})):
        other = suspects._other_ids(spec, np.random.default_rng(0))
        real = np.delete(other, spec.pad_id)
        assert sorted(real) == sorted(set(range(len(other))) - {spec.pad_id}) and other[spec.pad_id] in real
        assert other[: spec.vocabulary].max() < spec.vocabulary + (spec.pad_id < spec.vocabulary)
        assert np.mean(other == np.arange(len(other))) < 0.01


def test_padding_stays_and_its_id_as_a_token_is_replaced() -> None:
    """A row whose own tokens hold the padding's id may stand out for it; what is masked must not change."""
    plan = sweep_plan.plan(SPEC, 3, 8192)
    probe = next(each for each in plan.probes if each.padding == "batch sizes" and (each.inputs["attention_mask"] == 0).any())
    valid = probe.inputs["attention_mask"] == 1
    ids = np.where(valid & (np.arange(valid.shape[1]) == 1), SPEC.pad_id, probe.inputs["input_ids"])
    probe = Probe(probe.name, probe.padding, {**probe.inputs, "input_ids": ids}, probe.compared, probe.rows)
    asked = list[Probe]()

    def run(again: Sequence[Probe]) -> tuple[Vectors, Vectors]:
        asked.extend(again)
        return tuple({each.name: {"logits": reference(each)} for each in again} for _ in range(2))  # type: ignore[return-value]

    compared = row_differences.Comparer({"logits": 4.0})
    suspects._settle_batches(compared, [(probe, 0)], SPEC, np.random.default_rng(0), run)
    assert len(asked) == suspects.TIMES
    for each in asked:
        assert (each.inputs["input_ids"][valid] != SPEC.pad_id).all()
        assert np.array_equal(each.inputs["input_ids"][~valid], ids[~valid])


def test_the_tokens_around_texts_stay_in_batches_that_are_run_again() -> None:
    plan = sweep_plan.plan(SPEC, 3, 8192, (5, 6))
    probe = next(probe for probe in plan.probes if probe.padding == "batch sizes" and probe.shape[0] > 1 and probe.shape[1] > 3)
    seen = []

    def run(asked: Sequence[Probe]) -> tuple[Vectors, Vectors]:
        seen.extend(asked)
        found = {each.name: {"logits": reference(each)} for each in asked}
        return found, found

    compared = row_differences.Comparer({"logits": 1.0})
    compared.add(probe, {"logits": reference(probe)}, True, {"logits": reference(probe)})
    suspects._settle_batches(compared, [(probe, 0)], SPEC, np.random.default_rng(0), run, plan.frame)
    ids = probe.inputs["input_ids"]
    kept = np.isin(ids, (5, 6)) | (probe.inputs["attention_mask"] == 0)
    for again in seen:
        assert (again.inputs["input_ids"][kept] == ids[kept]).all() and (again.inputs["input_ids"][~kept] != ids[~kept]).mean() > 0.9


def test_the_worst_is_what_is_furthest_beyond_its_own_figure() -> None:
    """Scores that are off further than rows may be left no second look for these."""
    spec = SPEC.model_copy(update={"labels": tuple(map(str, range(20)))})
    probes = sweep_plan.plan(spec, 1, 8192).of(True, WHOLE)
    probes = [probe for probe in probes if probe.padding == "batch sizes"][:20]
    compared = row_differences.Comparer({"logits": 1.0}, {"logits": np.ones(20)})
    for number, probe in enumerate(probes):
        right = np.ones((probe.shape[0], 20))
        # Half of the batches have one score that is far off; all scores of the last one are off by half of that.
        wrong = np.zeros_like(right)
        wrong[:, 0] = 3.0 if number < 10 else 0.5
        if number == 19:
            wrong[:] = 1.6
        compared.add(probe, {"logits": right + wrong}, True, {"logits": right})
    worst, _ = suspects._standing_out(compared, ("batch sizes",))[0]
    assert worst.name == probes[19].name
