"""Plans for a device where a call takes as long as its launch or its work, whichever is longer: a GPU, simulated."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from bertopt.core import Profile, Session, ShapeLimits, Spec
from bertopt.errors import ResourceError
from bertopt.modeling import packing
from bertopt.runtime import batch_plan, cost_model
from bertopt.runtime.batch_limits import most_tokens
from bertopt.runtime.batch_plan import BatchLimits, plan
from bertopt.runtime.cost_model import Costs
from bertopt.runtime.runner import following
from tests.support.specs import spec

PADDED = spec("feature-extraction", pooling="mean", hidden=384, vocabulary=30000, max_length=512, text_length=512)
PACKED = PADDED.model_copy(update={"layout": "packed", "row_length": 512})


class Device(Session):
    """max(launch, tokens / rate) seconds a call, on a clock that only it moves; no memory beyond `most` tokens."""

    asynchronous = True
    #: What a runtime raises where memory ends.
    full: Exception = ResourceError("out of memory")

    def __init__(self, launch: float, rate: float, most: float = np.inf) -> None:
        self.launch, self.rate, self.most, self.now = launch, rate, most, 0.0

    def load(self, inputs: Mapping[str, Any]) -> None:
        self.tokens = inputs["input_ids"].size
        if self.tokens > self.most:
            raise self.full

    def step(self) -> None:
        self.now += max(self.launch, self.tokens / self.rate)

    def fetch(self) -> dict[str, Any]:
        return {}

    def seconds(self, tokens: float) -> float:
        return max(self.launch, tokens / self.rate)


@pytest.fixture(params=[(6e-3, 2.5e6), (1e-3, 2.5e6), (3e-3, 20e6), (3e-4, 20e6)], ids=str)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device(*request.param)
    monkeypatch.setattr(cost_model.time, "perf_counter", lambda: found.now)
    return found


def lengths_of(kind: str) -> np.ndarray:
    rng = np.random.default_rng(7)
    median, spread = (40, 0.7) if kind == "mix" else (8, 0.4)
    return np.clip(rng.lognormal(np.log(median), spread, 65_536).round(), 3, 512).astype(np.int64)


def share(device: Device, of: Spec, lengths: np.ndarray, costs: Costs, limits: BatchLimits) -> float:
    """Useful tokens a second, as a share of the device's rate."""
    seconds, start, end = 0.0, 0, limits.first_texts
    while start < len(lengths):
        chosen = plan(of, lengths[start:end], costs, limits)
        start, end = end, end + following(lengths[start:end], limits, costs)
        used = -np.sort(-chosen.rows.used)
        for low, high in chosen.batches:
            assert high - low <= limits.rows and (high - low) * used[low] <= limits.tokens
            seconds += device.seconds(float((high - low) * used[low]))
    return float(lengths.sum() / seconds / device.rate)


@pytest.mark.parametrize("kind", ["mix", "short"])
@pytest.mark.parametrize("of", [PADDED, PACKED], ids=["padded", "packed"])
def test_a_gpu_is_kept_at_its_rate(device: Device, of: Spec, kind: str) -> None:
    limits = BatchLimits.of(device, of, None)
    costs = cost_model.measure(device, of, limits)
    assert costs.launch == pytest.approx(device.launch * device.rate, rel=0.2)
    # Where a launch is worth 60,000 tokens, all the short texts are eleven batches, and one more for the first piece is
    # much. It pays all the same: that device runs all the texts in less time than one thread tokenises them.
    eleven_batches = (device.launch, device.rate) == (3e-3, 20e6) and kind == "short" and of is PADDED
    assert share(device, of, lengths_of(kind), costs, limits) >= (0.76 if eleven_batches else 0.85)


@pytest.mark.parametrize("count", [2, 16, 64, 90])
def test_a_window_of_texts_is_one_batch_where_a_launch_is_worth_more(count: int) -> None:
    """On its first GPU a padded model ran every text of a window by itself: no batch was allowed to cost a launch."""
    lengths = lengths_of("mix")[:count]
    limits = BatchLimits.of(Device(1.0, 1.0), PADDED, None)
    assert len(plan(PADDED, lengths, Costs(call=0.0, launch=15_000.0), limits).batches) == 1
    packed = plan(PACKED, lengths, Costs(call=0.0, launch=15_000.0), limits)
    assert len(packed.batches) == 1


ONE_ROW = PADDED.model_copy(update={"layout": "packed", "row_length": 32_768, "one_row": True})


@pytest.mark.parametrize("count", [1, 7, 300, 1024, 1025, 20_000])
def test_one_row_batches_hold_every_text_once_and_little_else(count: int) -> None:
    lengths = lengths_of("mix")[:count]
    sizes = tuple(sorted({64 << n for n in range(10)} | {96 << n for n in range(9)}))
    limits = BatchLimits(16_384, 65_536, 512, buckets=sizes)
    chosen = plan(ONE_ROW, lengths, Costs(call=0.0, pair=1e-4, launch=300.0), limits)
    assert chosen.rows.used.sum() == lengths.sum() and chosen.rows.used.max() <= 32_768
    for row in range(len(chosen.rows.used)):
        inside = np.flatnonzero(chosen.rows.row == row)
        order = inside[np.argsort(chosen.rows.column[inside])]
        assert (chosen.rows.column[order] == np.cumsum(lengths[order]) - lengths[order]).all()
    room = sum(limits.bucket(int(used)) for used in chosen.rows.used)
    assert room <= max(1.35 * lengths.sum(), 256)


def test_a_few_full_batches_are_better_than_even_ones() -> None:
    """Texts of two batches and a little more, where a launch is worth a full batch: three launches, whatever is padded."""
    lengths = np.sort(np.concatenate([np.full(200, 40), np.full(16_000, 8)]))
    limits = BatchLimits(16_384, 65_536, 512)
    chosen = plan(PADDED, lengths, Costs(call=0.0, launch=60_000.0), limits)
    assert len(chosen.batches) == 3
    covered = sorted(chosen.batches)
    assert covered[0][0] == 0 and covered[-1][1] == len(lengths)
    assert all(before[1] == after[0] for before, after in pairwise(covered))


@pytest.mark.parametrize("launch", [50.0, 1000.0, 20_000.0])
def test_batches_of_many_texts_cost_little_more_than_the_best(launch: float) -> None:
    """The best are found by trying every cut, which takes too long for more texts."""
    rng = np.random.default_rng(3)
    limits, costs = BatchLimits(16_384, 16_384, 512), Costs(call=0.0, pair=1e-3, launch=launch)
    for _ in range(20):
        count = int(rng.integers(batch_plan.FEW + 1, 500))
        lengths = np.where(rng.random(count) < rng.random() / 5, 512, rng.integers(3, rng.integers(4, 200), count))
        used = -np.sort(-lengths)
        (best,) = batch_plan._cheapest(used, np.arange(count + 1), np.array([np.inf]), costs, limits)
        least = sum(float(costs.batch(high - low, int(used[low]))) for low, high in best)
        assert plan(PADDED, lengths, costs, limits).cost <= 1.1 * least


def test_long_texts_in_small_batches_are_cut_without_a_search() -> None:
    chosen = plan(PADDED, np.full(9000, 512), Costs(call=0.0, launch=4096.0), BatchLimits(16_384, 4096, 512))
    assert len(chosen.batches) == 1125 and all(high - low == 8 for low, high in chosen.batches)


@pytest.mark.parametrize("full", [
    ResourceError("no memory for the context"),
    type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("BFCArena::AllocateRawInternal Failed to allocate memory for requested buffer of size 4096"),
])  # fmt: skip
def test_shapes_grow_until_memory_ends(monkeypatch: pytest.MonkeyPatch, full: Exception) -> None:
    """Sessions raise what their runtime raises: only workers make a ResourceError of it."""
    device = Device(6e-3, 20e6, most=9000)
    device.full = full
    monkeypatch.setattr(cost_model.time, "perf_counter", lambda: device.now)
    limits = BatchLimits.of(device, PADDED, None)
    costs = cost_model.measure(device, PADDED, limits)
    assert costs.tokens_max == 8192, "the largest batch that ran"
    # Work was never seen beside the launch: batches are as full as they can be.
    assert costs.launch >= 8192
    chosen = plan(PADDED, lengths_of("mix")[:2000], costs, limits)
    used = -np.sort(-chosen.rows.used)
    assert max((high - low) * used[low] for low, high in chosen.batches) <= 8192


def test_other_errors_are_not_taken_for_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(6e-3, 20e6, most=9000)
    device.full = RuntimeError("CUDA error: an illegal memory access was encountered")
    monkeypatch.setattr(cost_model.time, "perf_counter", lambda: device.now)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        cost_model.measure(device, PADDED, BatchLimits.of(device, PADDED, None))


class Cpu(Device):
    asynchronous = False


def test_a_processor_keeps_its_batches() -> None:
    limits = BatchLimits.of(Cpu(0.0, 1.0), PADDED, None)
    assert (limits.rows, limits.tokens, limits.texts) == (32, 8192, 256)
    engine = ShapeLimits(longest=512, profiles=(Profile(opt=(1, 64), max=(8, 64)), Profile(opt=(1, 64), max=(1, 512))))
    limits = BatchLimits.of(Cpu(0.0, 1.0), PADDED, engine)
    assert (limits.most_rows(64), limits.most_rows(65), limits.length) == (8, 1, 512)
    assert BatchLimits.of(Device(1.0, 1.0), PADDED, None, tokens=4096).tokens == 4096


def test_no_batch_over_the_vocabulary_is_larger_than_those_that_are_checked() -> None:
    """The sweeps ran 2,048 tokens of such a model and the predictor 8,192: a model that was wrong beyond 3,000 was delivered."""
    fills = PADDED.model_copy(update={"task": "fill-mask", "pooling": None})
    for device in (Cpu(0.0, 1.0), Device(1.0, 1.0)):
        limits = BatchLimits.of(device, fills, None)
        assert limits.tokens == most_tokens(fills, device.asynchronous) == 2048
        chosen = plan(fills, np.full(64, 200), Costs(call=60_000.0), limits)
        assert max((high - low) * 200 for low, high in chosen.batches) == 2000
    assert BatchLimits.of(Cpu(0.0, 1.0), fills, None, tokens=8192).tokens == 8192


def test_a_call_plans_as_many_texts_together_as_the_device_wants() -> None:
    assert following(np.array([7, 9]), BatchLimits(32, 8192, 512), None) == 256
    launched = BatchLimits(8192, 65_536, 512, first_texts=2048, texts=65_536, together=131_072)
    assert following(np.array([100, 28]), launched, None) == 2048, "two full batches: a GPU waits for what is tokenised"
    assert following(np.array([100, 28]), launched, Costs(launch=2000.0)) == 2048
    assert following(np.array([100, 28]), launched, Costs(launch=60_000.0)) == 15_000, "sixteen launches"
    assert following(np.array([1, 1]), launched, None) == 65_536 and following(np.array([10**7]), launched, None) == 1


def test_packed_batches_hold_whole_rows(device: Device) -> None:
    limits = BatchLimits.of(device, PACKED, None)
    chosen = plan(PACKED, lengths_of("short")[:5000], Costs(launch=50_000.0), limits)
    assert sum(high - low for low, high in chosen.batches) == len(chosen.rows.used)
    assert packing.best_fit(np.array([3, 4]), 8).used.tolist() == [7]


def test_a_packed_model_on_a_gpu_gets_a_gpus_batches() -> None:
    from bertopt.sessions.packed import PackedSession

    limits = BatchLimits.of(PackedSession(Device(1.0, 1.0), PACKED), PACKED, None)
    assert (limits.rows, limits.tokens) == (16_384, 65_536)
