"""Which numbers of rows the sweeps run with texts of which lengths, whatever the seed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from bertopt.checks import batch_shapes, sweep_plan
from bertopt.checks.probes import Probe
from bertopt.core import Spec
from tests.support.specs import MINILM, SWEPT, WHOLE

TRUNCATED = MINILM.model_copy(update={"text_length": 256})
BASE = MINILM.model_copy(update={"layers": 12, "hidden": 768})
SEEDS = range(10)
Range = tuple[int, int]
LENGTHS: tuple[Range, ...] = ((1, 4), (5, 8), (9, 16), (17, 40), (41, 128), (129, 255), (256, 512))
#: Numbers of rows, and how many of LENGTHS they have.
ROWS: dict[Range, int] = {(1, 1): 7, (2, 4): 7, (5, 8): 7, (9, 16): 6, (17, 31): 6, (32, 32): 5}
#: The same for every stage: what takes 256 tokens or little more.
EARLY: dict[Range, int] = {(5, 8): 4, (9, 16): 4, (17, 31): 3}


def batches(spec: Spec, seed: int, every: bool = True, most_tokens: int = 8192) -> list[Probe]:
    """The sweeps but for those of ids."""
    return [probe for probe in sweep_plan.plan(spec, seed, most_tokens, (101, 102)).of(True, WHOLE, every) if probe.padding == "batch sizes"]


def lengths(probe: Probe) -> np.ndarray:
    return np.asarray(probe.inputs["attention_mask"].sum(axis=1))


def in_cell(probe: Probe, rows: Range, tokens: Range) -> bool:
    """Whether the number of rows of a batch and the lengths of all of them lie in these ranges."""
    return rows[0] <= probe.shape[0] <= rows[1] and tokens[0] <= lengths(probe).min() and lengths(probe).max() <= tokens[1]


@pytest.mark.parametrize("spec", [TRUNCATED, BASE, SWEPT], ids=["minilm", "12 layers", "tiny"])
@pytest.mark.parametrize(("every", "ranges"), [(True, ROWS), (False, EARLY)], ids=["to deliver", "every stage"])
def test_texts_of_every_length_come_in_batches_of_every_size(spec: Spec, every: bool, ranges: dict[Range, int]) -> None:
    """A model that was wrong for more than 8 rows of 5 to 8 tokens was delivered, or for 32 of 41 to 128: with most seeds no batch was such."""
    for seed in SEEDS:
        run = batches(spec, seed, every)
        missing = [(rows, tokens) for rows, count in ranges.items() for tokens in LENGTHS[:count] if not any(in_cell(probe, rows, tokens) for probe in run)]
        assert not missing, f"seed {seed}"


def test_the_largest_batches_have_long_texts_too() -> None:
    for seed in SEEDS:
        found = [lengths(probe) for probe in batches(BASE, seed)]
        assert any(len(each) == 32 and (each > 128).sum() >= 16 for each in found)
        assert any(9 <= len(each) <= 16 and each.min() > 255 for each in found), "documents"


def pairs(probe: Probe) -> np.ndarray:
    return np.asarray(probe.inputs["token_type_ids"].any(axis=1))


@pytest.mark.parametrize("rows", [(2, 8), (9, 32)])
def test_one_text_among_pairs_and_one_pair_among_texts(rows: Range) -> None:
    """A model that was wrong for the one row of a batch that is no pair was delivered."""
    for seed in SEEDS:
        found = [pairs(probe) for probe in batches(TRUNCATED, seed) if rows[0] <= probe.shape[0] <= rows[1] and probe.shape[1] > 40]
        assert any(each.sum() == 1 for each in found) and any(each.sum() == len(each) - 1 for each in found)


AFTER: dict[str, tuple[int, Callable[[Probe], bool]]] = {
    "a short text": (8000, lambda probe: probe.shape[0] == 1 and probe.shape[1] < 16),
    "several rows": (2000, lambda probe: 2 <= probe.shape[0] <= 8 and probe.shape[1] > 40),
    "a long text": (1000, lambda probe: probe.shape[0] == 1 and probe.shape[1] > 128),
}


@pytest.mark.parametrize("after", AFTER)
def test_a_large_batch_is_followed_by(after: str) -> None:
    """A model that was wrong for several rows right after a large batch was delivered: only single texts came there."""
    tokens, what = AFTER[after]
    for spec, seed in itertools.product((TRUNCATED, BASE), SEEDS):
        run = sweep_plan.plan(spec, seed, 8192, (101, 102)).of(True, WHOLE)
        assert any(before.compared.size > tokens and what(probe) for before, probe in itertools.pairwise(run))


@pytest.mark.parametrize(("spec", "tokens", "early"), [(TRUNCATED, 107_500, 8_200), (BASE, 83_500, 6_100)], ids=["minilm", "12 layers"])
def test_what_the_sweeps_take(spec: Spec, tokens: int, early: int) -> None:
    """With batches drawn one by one the same models took 104,800 and 80,300 tokens; 7,800 and 5,800 of every stage."""
    for every, most in ((True, tokens), (False, early)):
        found = [sum(probe.compared.size for probe in sweep_plan.plan(spec, seed, 8192, (101, 102)).of(True, WHOLE, every)) for seed in SEEDS]
        assert np.mean(found) < most


def of_small_models() -> Iterator[Spec]:
    for longest in (1, 2, 3, 4, 12, 40):
        yield SWEPT.model_copy(update={"max_length": longest, "text_length": longest})


@pytest.mark.parametrize("spec", of_small_models(), ids=lambda spec: f"{spec.max_length} tokens")
@pytest.mark.parametrize("most_tokens", [64, 2048, 8192])
def test_batches_are_no_longer_than_the_model_takes_and_no_larger_than_the_predictor_makes(spec: Spec, most_tokens: int) -> None:
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        early = batch_shapes.of_every_stage(spec, rng, most_tokens)
        assert [batch.rows for batch in early] == [1, *range(1, batch_shapes.MAX_BATCH + 1)]
        single = batch_shapes.single_rows(spec, rng, early, 1e9, 1e9)
        assert {batch.columns for batch in (*early, *single) if batch.rows == 1} == set(range(1, spec.max_length + 1))
        late = batch_shapes.to_deliver(spec, rng, most_tokens)
        assert max(batch.rows * batch.columns for batch in late) <= most_tokens
        for batch in (*early, *single, *late):
            mask = batch_shapes.mask_of(batch, rng)
            assert mask.shape == (batch.rows, batch.columns) and 1 <= batch.columns <= spec.max_length
            assert mask.sum(axis=1).min() >= max(1, batch.columns // 2) and mask.sum(axis=1).max() == batch.columns
