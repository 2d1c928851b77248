"""Models that keep something by a batch's shape, or are wrong where one row of many stands out, and where the sweeps see it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from bertopt.checks import coverage, sweep_plan
from bertopt.checks.probes import Probe
from bertopt.core import Precision
from bertopt.results import Limits
from tests.support.specs import MINILM, WHOLE
from tests.unit.checks.test_coverage import differing
from tests.unit.checks.test_near_copies import PLAN, failures, right

SEEDS = range(10)


def lengths(probe: Probe) -> np.ndarray:
    return np.asarray(probe.inputs["attention_mask"].sum(axis=1))


def copies(probe: Probe) -> np.ndarray:
    ids = probe.inputs["input_ids"]
    return np.asarray((ids[:, None] == ids[None]).all(axis=2).sum(axis=1))


def mask_of_the_last(key: Callable[[Probe], Any]) -> Callable[[Probe], np.ndarray]:
    """A batch is read with the last one's mask, if that had its shape and `key`."""
    last: dict[Any, np.ndarray] = {}

    def model(probe: Probe) -> np.ndarray:
        name = (probe.shape, key(probe))
        if name not in last:
            last.clear()
            last[name] = probe.inputs["attention_mask"]
        inputs = {**probe.inputs, "attention_mask": last[name]}
        return right(Probe(probe.name, probe.padding, inputs, probe.compared, probe.rows))

    return model


def wrong_where(which: Callable[[Probe], np.ndarray]) -> Callable[[Probe], np.ndarray]:
    """Rows are those of the reference turned round `which`."""
    return lambda probe: np.where(which(probe)[:, None], right(probe)[:, ::-1], right(probe))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("key", [lambda probe: int(lengths(probe).sum()), lambda probe: tuple(sorted(lengths(probe)))], ids=["tokens", "lengths"])
def test_a_model_that_keeps_a_mask_by_how_many_tokens_a_batch_has_is_refused(key: Any, precision: Precision) -> None:
    """Such a model was delivered in reduced precision: no two batches had one shape and as many tokens."""
    assert failures(mask_of_the_last(key), PLAN.of(precision != "float32", WHOLE), precision)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_model_that_is_wrong_for_a_row_that_is_there_many_times_beside_others_is_refused(precision: Precision) -> None:
    """Copies stood three times in a batch at most, or alone."""

    def many(probe: Probe) -> np.ndarray:
        found = copies(probe)
        return np.asarray((found > 4) & (found < len(found)))

    assert failures(wrong_where(many), PLAN.of(precision != "float32", WHOLE), precision)


SEEN: dict[str, Callable[[Probe], bool]] = {
    "a row there 8 times or more, beside as many others": lambda probe: bool((copies(probe) == 1).sum() >= 8 and copies(probe).max() >= 8),
    "one short row among long ones": lambda probe: len(lengths(probe)) > 1 and sorted(lengths(probe))[0] < 6 and sorted(lengths(probe))[1] > 20,
    "more than 8 rows from short to long": lambda probe: len(lengths(probe)) > 8 and bool((np.diff(lengths(probe)) >= 0).all()) and len(set(lengths(probe))) > 4,
    **{f"a short row padded to {width}": lambda probe, width=width: probe.shape[0] > 1 and probe.shape[1] == width and bool((lengths(probe) < 10).any()) for width in (128, 256)},
}  # fmt: skip


@pytest.mark.parametrize("seen", SEEN)
def test_batches_that_services_make_are_run_whatever_the_seed(seen: str) -> None:
    """Models that were wrong there were delivered, of most seeds."""
    spec = MINILM.model_copy(update={"text_length": 256})
    for seed in SEEDS:
        assert any(map(SEEN[seen], sweep_plan.plan(spec, seed, 8192, (101, 102)).of(False, WHOLE)))


def test_as_many_tokens_come_in_rows_of_other_lengths_right_after() -> None:
    for seed in SEEDS:
        probes = sweep_plan.plan(MINILM, seed, 8192, (101, 102)).of(True, WHOLE)
        followed = [(before, probe) for before, probe in itertools.pairwise(probes) if probe.before]
        assert all(probe.before == (before,) for before, probe in followed), "what is run again comes after the same"
        one_shape = [(lengths(before), lengths(probe)) for before, probe in followed if before.shape == probe.shape and probe.shape[0] > 8]
        assert any(one.sum() == other.sum() and (one != other).any() for one, other in one_shape)


@pytest.mark.parametrize(("most_tokens", "longest"), [(8192, 512), (65_536, 512), (8192, 130)])
def test_many_rows_are_mostly_padding(most_tokens: int, longest: int) -> None:
    """Where padding had 4 less in attention's scores, not infinity less, embeddings in INT8 of 3 to 10 tokens padded to 128 were off by 0.049,
    those without padding by 0.006. No batch had such rows but a few."""
    for seed in SEEDS:
        spec = MINILM.model_copy(update={"max_length": longest, "text_length": longest})
        plan = sweep_plan.plan(spec, seed, most_tokens, (101, 102))
        largest = max(plan.of(True, WHOLE), key=lambda probe: probe.compared.size)
        short = 8 * lengths(largest) < largest.shape[1]
        assert short.sum() >= 16 and lengths(largest)[~short].min() >= largest.shape[1] // 2 and lengths(largest).max() == largest.shape[1]
        packed = [lengths(probe) for probe in plan.of(True, WHOLE, packed=True) if probe.shape == largest.shape and probe.padding == sweep_plan.MANY_TEXTS]
        assert [each.min() >= largest.shape[1] // 2 for each in packed] == [True], "a packed batch has no padding, and as many tokens as before"


@pytest.mark.parametrize("wrong", [True, False])
def test_rows_that_are_mostly_padding_are_held_to_others_of_as_many_tokens(wrong: bool) -> None:
    found = differing(lambda valid, second: wrong & (8 * valid.sum(1) < valid.shape[1]))
    failed = coverage.failures(found, Limits(cosine_median_min=0.91))
    assert [failure.text.split(" may")[0] for failure in failed] == ["the median of short rows that are mostly padding"] * wrong
