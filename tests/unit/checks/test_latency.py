"""Latency: races with made-up clocks, and the figures of what was timed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from bertopt.checks import latency, ratio
from bertopt.checks.latency import Contender, Turn
from bertopt.checks.ratio import Interval
from tests.support.races import raced, same, verdict


class Clock:
    """A clock that only turns move, and only while their contender alone is awake."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.log: list[str] = []
        self.awake: str | None = None
        monkeypatch.setattr("bertopt.checks.latency.time.monotonic", lambda: self.now)

    def contender(self, name: str, ms: float, jitter: float = 0.0, **fields: Any) -> Contender:
        rng = np.random.default_rng(sum(map(ord, name)))

        def turn(steps: int) -> Turn:
            assert self.awake == name
            self.log.append(f"{name} runs {steps}")
            taken = ms * max(0.01, 1 + jitter * rng.standard_normal()) * np.ones(steps)
            self.now += float(taken.sum()) / 1e3
            return Turn([float(each) for each in taken])

        def wake() -> None:
            assert self.awake is None
            self.awake = name

        def sleep() -> None:
            assert self.awake == name
            self.awake = None

        return Contender(name, turn, wake, sleep, **fields)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


# Races


def test_race_is_interleaved_there_and_back(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Interval, "narrow", False)
    racing = [clock.contender(name, ms, 0.05) for name, ms in (("a", 2.0), ("b", 4.0), ("c", 90.0))]
    latency.race(racing, 3.0)
    assert [c.per_turn for c in racing] == pytest.approx([10, 10, 1], abs=1)
    rounds = {len(c.rounds) for c in racing}
    assert len(rounds) == 1
    assert ratio.MIN_ROUNDS <= rounds.pop() < latency.MAX_ROUNDS
    assert all(len(turn.step_ms) == c.per_turn for c in racing for turn in c.rounds)
    runs = [line[0] for line in clock.log][6:]
    thirds = ["".join(runs[i : i + 3]) for i in range(0, len(runs), 3)]
    assert all(sorted(third) == ["a", "b", "c"] for third in thirds)
    assert all(back == there[::-1] for there, back in zip(thirds[::2], thirds[1::2], strict=False))
    assert len(set(thirds[::2])) > 2
    assert clock.awake is None


def test_race_stops_in_time(clock: Clock) -> None:
    noisy = [clock.contender(name, 100.0, 0.3) for name in ("a", "b")]
    warm_up = latency.WARM_UP * 2 * 0.1
    assert latency.race(noisy, 4.0 + warm_up) == 0.0
    assert 19 <= len(noisy[0].rounds) <= 25
    endless = [clock.contender(name, 0.001, 0.3) for name in ("c", "d")]
    latency.race(endless, 1e9)
    assert [(len(c.rounds), c.per_turn) for c in endless] == [(latency.MAX_ROUNDS, 100)] * 2
    slow = [clock.contender(name, 5000.0, 0.3) for name in ("e", "f")]
    latency.race(slow, 0.0)
    assert [len(c.rounds) for c in slow] == [ratio.MIN_ROUNDS] * 2


def test_a_race_stops_when_intervals_are_narrow_and_returns_what_is_left(clock: Clock) -> None:
    pair = [clock.contender("a", 100.0, 0.001), clock.contender("b", 100.0, 0.001)]
    left = latency.race(pair, 60.0)
    assert len(pair[0].rounds) == ratio.MIN_ROUNDS
    assert left == pytest.approx(60.0 - clock.now)
    # Far apart, a wider interval is enough.
    far = [clock.contender("c", 100.0, 0.03), clock.contender("d", 400.0, 0.03)]
    latency.race(far, 60.0)
    assert len(far[0].rounds) == ratio.MIN_ROUNDS
    near = [clock.contender("e", 100.0, 0.03), clock.contender("f", 103.0, 0.03)]
    latency.race(near, 60.0)
    assert len(near[0].rounds) > 2 * ratio.MIN_ROUNDS


def test_an_opponent_leaves_the_race_when_its_interval_is_narrow(clock: Clock) -> None:
    """The slow reference need not run as long as the parent, which is nearly as fast."""
    stage, reference, parent = (
        clock.contender(name, ms, 0.03) for name, ms in (("stage", 100.0), ("reference", 400.0), ("parent", 103.0))
    )
    latency.race([stage, reference, parent], 60.0)
    assert len(reference.rounds) == ratio.MIN_ROUNDS
    assert len(parent.rounds) == len(stage.rounds) > 2 * ratio.MIN_ROUNDS
    assert latency.compare(stage, reference) == latency.compare(
        Contender("s", stage.turn, rounds=stage.rounds[: ratio.MIN_ROUNDS]), reference
    )


def test_a_quick_look_takes_few_rounds_and_says_how_little_it_knows(clock: Clock) -> None:
    a, b = clock.contender("a", 100.0, 0.03), clock.contender("b", 103.0, 0.03)
    latency.race([a, b], 0.0, min_rounds=ratio.QUICK_ROUNDS)
    assert len(a.rounds) == ratio.QUICK_ROUNDS
    assert latency.compare(a, b).ratio().verdict == "INCONCLUSIVE"


def test_turns_have_as_many_steps_whatever_disturbs_the_warm_up(clock: Clock) -> None:
    """The first step of a turn takes longer, so that a turn of fewer steps looks slower."""

    def cold(name: str, disturbed: float) -> Contender:
        given = clock.contender(name, 3.0)
        turn, first = given.turn, iter([50.0, disturbed])
        given.turn = lambda steps: Turn([next(first, 3.5), *turn(steps).step_ms[1:]])
        return given

    pair = [cold("a", 3.0), cold("b", 19.0)]
    latency.race(pair, 1.0)
    assert {len(turn.step_ms) for c in pair for turn in c.rounds} == {pair[0].per_turn} and pair[0].per_turn > 2
    assert latency.compare(pair[0], pair[1]).log_ratio == 0.0


def test_alone_there_is_nothing_to_know(clock: Clock) -> None:
    alone = clock.contender("a", 10.0, 0.3)
    latency.race([alone], 60.0)
    assert len(alone.rounds) == ratio.MIN_ROUNDS


def test_warm_up_is_not_kept(clock: Clock) -> None:
    given = clock.contender("a", 10.0)
    turn, first = given.turn, iter([700.0, 250.0])
    given.turn = lambda steps: Turn([next(first, value) for value in turn(steps).step_ms])
    latency.race([given], 0.1)
    assert given.per_turn == 1
    assert set(given.samples()[1:]) == {10.0}


def test_between_rounds_all_sleep(clock: Clock) -> None:
    seen: list[int] = []

    def between() -> None:
        assert clock.awake is None
        seen.append(len(clock.log))

    pair = [clock.contender("a", 10.0), clock.contender("b", 10.0)]
    latency.race(pair, 1.0, between=between)
    warm_up = 4
    assert seen == [warm_up + 2 * done for done in range(len(pair[0].rounds) + 1)]


@pytest.mark.parametrize("jitter", [0.0, 0.001, 0.02])
@pytest.mark.parametrize("seed", range(4))
def test_an_unchanged_model_is_never_faster_or_slower(clock: Clock, jitter: float, seed: int) -> None:
    a, b = clock.contender(f"a{seed}", 10.0, jitter), clock.contender(f"b{seed}", 10.0, jitter)
    latency.race([a, b], 2.0, seed)
    found = latency.compare(a, b).ratio()
    assert found.verdict in ("NO DIFFERENCE", "INCONCLUSIVE")
    assert found.low <= found.ratio <= found.high
    if jitter < 0.01:
        assert verdict(b, a) == "NO DIFFERENCE"
    assert latency.compare(a, b).ratio() == found


@pytest.mark.parametrize("jitter", [0.0, 0.05])
def test_twice_as_fast_is_faster(clock: Clock, jitter: float) -> None:
    a, b = clock.contender("a", 10.0, jitter), clock.contender("b", 20.0, jitter)
    latency.race([a, b], 2.0)
    assert (verdict(a, b), verdict(b, a)) == ("FASTER", "SLOWER")
    assert latency.compare(a, b).ratio().ratio == pytest.approx(2.0, rel=0.1)


def test_a_few_disturbed_steps_of_a_turn_change_nothing() -> None:
    """Turns of as many steps are compared by their least disturbed steps, others by the median, which few steps do not shift."""
    calm, disturbed = [10.0] * 8, [10.0] * 4 + [13.0] * 4
    turns = [Turn(calm)] * 12, [Turn(disturbed)] * 12
    a, b = (Contender(name, lambda _: Turn([]), per_turn=8, rounds=list(rounds)) for name, rounds in zip("ab", turns, strict=True))
    assert latency.compare(a, b).log_ratio == 0
    shorter = Contender("c", lambda _: Turn([]), per_turn=4, rounds=[Turn([10.0, 10.0, 13.0, 13.0])] * 12)
    assert latency.compare(a, shorter).log_ratio == pytest.approx(math.log(1.15))


def test_a_drift_that_hits_both_is_no_difference() -> None:
    drift = np.array([10 + i for i in range(10)])
    assert same(raced(drift, drift))


def test_rounds_with_much_steal_do_not_count() -> None:
    """Even where they are most, as long as enough are left."""
    calm, steal = np.full(80, 10.0), np.zeros((2, 80))
    slow = calm.copy()
    slow[30:] = 19.0
    steal[0, 30:55] = steal[1, 55:] = 0.2
    assert latency.compare(*raced(slow, calm, steal)).log_ratio == pytest.approx(0.0)
    assert same(raced(slow, calm, steal)) and not same(raced(slow, calm))


def test_a_race_notes_the_cpu_steal(clock: Clock) -> None:
    """As a share of the turn that it happened in."""
    a, b = clock.contender("a", 10.0), clock.contender("b", 30.0)
    share = {"a": 0.0, "b": 0.25}
    latency.race([a, b], 0.5, stolen=lambda: clock.now * share[clock.awake or "a"])
    assert {turn.steal_share for turn in a.rounds} == {0.0}
    assert [turn.steal_share for turn in b.rounds] == pytest.approx([0.25] * len(b.rounds))


def test_a_few_disturbed_rounds_change_nothing() -> None:
    calm = np.full(20, 10.0)
    disturbed = calm.copy()
    disturbed[[2, 9, 17]] = [90.0, 40.0, 25.0]
    assert latency.compare(*raced(disturbed, calm)).log_ratio == pytest.approx(0.0)
    assert same(raced(disturbed, calm))


# Figures


def timed(samples: list[float], unfinished: float = 0.0, **fields: Any) -> Contender:
    return Contender("x", lambda _: Turn([]), rounds=[Turn(samples[start : start + 100], unfinished) for start in range(0, len(samples), 100)],
                     **fields)  # fmt: skip


def test_p99_only_from_many_samples() -> None:
    many = [float(i) for i in range(latency.P99_SAMPLES)]
    found = latency.measure({"stage": timed(many)}, (2, 8), 0)
    assert found.p99_ms == pytest.approx(4949, abs=1)
    assert (found.n, found.kind, found.batch, found.sequence) == (5000, "shape", 2, 8)
    assert latency.measure({"stage": timed(many[:-1])}, (2, 8), 0).p99_ms is None


def test_figures_of_a_shape_and_of_the_mix() -> None:
    mine, other = timed([10.0] * 500), timed([20.0] * 500)
    found = latency.measure({"stage": mine, "reference": other, "parent": mine}, (4, 8), 0)
    assert (found.p50_ms, found.p90_ms, found.texts_per_s) == (10.0, 10.0, 400.0)
    assert found.vs_reference is not None and found.vs_reference.ratio == pytest.approx(2)
    assert found.vs_reference.low == found.vs_reference.high == found.vs_reference.ratio
    assert found.vs_parent is not None and found.vs_parent.ratio == 1.0 and found.warning is None
    mix = latency.measure({"stage": mine, "parent": other}, None, 12)
    assert (mix.kind, mix.batch, mix.sequence, mix.n, mix.texts_per_s) == ("mix", None, None, 12, 1200.0)
    assert (mix.vs_reference, mix.vs_parent) == (None, found.vs_reference)
    first = latency.measure({"stage": mine, "reference": other}, (4, 8), 0)
    assert first.vs_parent == first.vs_reference == found.vs_reference


def test_a_noisy_machine_is_mentioned() -> None:
    noisy = timed([value for i in range(10) for value in [10.0 if i % 2 else 30.0] * 100])
    found = latency.measure({"stage": noisy, "reference": timed([20.0] * 1000)}, (4, 8), 0, ["others were busy"])
    assert found.warning is not None
    assert found.warning.startswith("others were busy; the interval [") and "too noisy" in found.warning


def test_compiling_under_the_clock_voids_the_figures(clock: Clock) -> None:
    counted = iter([3, 3])
    still = clock.contender("still", 10.0, graphs=lambda: next(counted))
    graphs = iter([1, 4])
    compiling = clock.contender("compiling", 10.0, graphs=lambda: next(graphs))
    latency.race([still, compiling], 1.0)
    found = latency.measure({"stage": compiling, "reference": still, "parent": still}, (1, 8), 0)
    assert found.warning == "void: 3 graphs were compiled while the clock ran"
    assert (found.vs_reference, found.vs_parent) == (None, None)
    assert latency.measure({"stage": still}, (1, 8), 0).warning is None


def test_work_that_is_unfinished_when_the_clock_stops_voids_the_figures() -> None:
    other = timed([20.0] * 500)
    found = latency.measure({"stage": timed([1.0] * 500, unfinished=15.0), "reference": other}, (1, 8), 0)
    assert found.warning is not None and "still busy when the clock stopped" in found.warning
    assert (found.vs_reference, found.vs_parent) == (None, None)
    assert latency.measure({"stage": timed([1.0] * 500, unfinished=0.1), "reference": other}, (1, 8), 0).warning is None
    # Fetching for the first time takes a little longer, which is much beside a step of no length.
    assert latency.measure({"stage": timed([0.001] * 500, unfinished=0.05), "reference": other}, (1, 8), 0).warning is None
