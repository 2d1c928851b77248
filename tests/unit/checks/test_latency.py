"""Latency: races with made-up clocks, verdicts on simulated noise, and what is noticed about the machine."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bertopt.checks import latency
from bertopt.checks import timed_steps as clocks
from bertopt.checks.latency import Contender, Turn
from bertopt.core import Session, Spec
from bertopt.pipeline.race import Budget, race_case
from bertopt.results import Ratio
from bertopt.system import cpu_contention
from bertopt.system.cpu_contention import Machine, Seen

NAN = math.nan


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


def test_race_is_interleaved_there_and_back(clock: Clock) -> None:
    racing = [clock.contender(name, ms, 0.05) for name, ms in (("a", 2.0), ("b", 4.0), ("c", 90.0))]
    latency.race(racing, 3.0)
    assert [c.per_turn for c in racing] == pytest.approx([10, 10, 1], abs=1)
    rounds = {len(c.rounds) for c in racing}
    assert len(rounds) == 1
    assert latency.MIN_ROUNDS <= rounds.pop() < latency.MAX_ROUNDS
    assert all(len(turn.taken) == c.per_turn for c in racing for turn in c.rounds)
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
    assert [len(c.rounds) for c in slow] == [latency.MIN_ROUNDS] * 2


def test_race_stops_when_it_knows_and_says_what_is_left(clock: Clock) -> None:
    pair = [clock.contender("a", 100.0, 0.001), clock.contender("b", 100.0, 0.001)]
    left = latency.race(pair, 60.0)
    assert len(pair[0].rounds) == latency.MIN_ROUNDS
    assert left == pytest.approx(60.0 - clock.now)
    # Far apart, one need not know so exactly.
    far = [clock.contender("c", 100.0, 0.03), clock.contender("d", 400.0, 0.03)]
    latency.race(far, 60.0)
    assert len(far[0].rounds) == latency.MIN_ROUNDS
    near = [clock.contender("e", 100.0, 0.03), clock.contender("f", 103.0, 0.03)]
    latency.race(near, 60.0)
    assert len(near[0].rounds) > 2 * latency.MIN_ROUNDS


def test_turns_have_as_many_steps_whatever_disturbs_the_warm_up(clock: Clock) -> None:
    """The first step of a turn takes longer, so that a turn of fewer steps looks slower."""

    def cold(name: str, disturbed: float) -> Contender:
        given = clock.contender(name, 3.0)
        turn, first = given.turn, iter([50.0, disturbed])
        given.turn = lambda steps: Turn([next(first, 3.5), *turn(steps).taken[1:]])
        return given

    pair = [cold("a", 3.0), cold("b", 19.0)]
    latency.race(pair, 1.0)
    assert {len(turn.taken) for c in pair for turn in c.rounds} == {pair[0].per_turn} and pair[0].per_turn > 2
    assert latency.ratio((pair[0], pair[1])).ratio == 1.0


def test_alone_there_is_nothing_to_know(clock: Clock) -> None:
    alone = clock.contender("a", 10.0, 0.3)
    latency.race([alone], 60.0)
    assert len(alone.rounds) == latency.MIN_ROUNDS


def test_warm_up_is_not_kept(clock: Clock) -> None:
    given = clock.contender("a", 10.0)
    turn, first = given.turn, iter([700.0, 250.0])
    given.turn = lambda steps: Turn([next(first, value) for value in turn(steps).taken])
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


# Ratios and verdicts


def raced(of: np.ndarray, to: np.ndarray, withheld: np.ndarray | None = None) -> tuple[Contender, Contender]:
    """Two contenders with these medians, one a round, and what was withheld meanwhile."""
    lost = np.zeros((2, len(of))) if withheld is None else withheld
    a, b = (
        Contender(name, lambda _: Turn([]), rounds=[
            Turn([float(ms)] * 2, withheld=float(share)) for ms, share in zip(given, shares, strict=True)
        ])
        for name, given, shares in (("a", of, lost[0]), ("b", to, lost[1]))
    )  # fmt: skip
    return a, b


def same(pair: tuple[Contender, Contender]) -> bool:
    """Whether two processes are known to run alike within 0.5 %."""
    middle, half = latency._interval(*pair)
    return abs(middle) + half <= 0.005


@pytest.mark.parametrize("jitter", [0.0, 0.001, 0.02])
@pytest.mark.parametrize("seed", range(4))
def test_an_unchanged_model_is_never_faster_or_slower(clock: Clock, jitter: float, seed: int) -> None:
    a, b = clock.contender(f"a{seed}", 10.0, jitter), clock.contender(f"b{seed}", 10.0, jitter)
    latency.race([a, b], 2.0, seed)
    found = latency.ratio((a, b))
    assert found.verdict == "INCONCLUSIVE"
    assert found.low <= found.ratio <= found.high
    if jitter < 0.01:
        assert same((a, b))
    assert latency.ratio((a, b)) == found


@pytest.mark.parametrize("jitter", [0.0, 0.05])
def test_twice_as_fast_is_faster(clock: Clock, jitter: float) -> None:
    a, b = clock.contender("a", 10.0, jitter), clock.contender("b", 20.0, jitter)
    latency.race([a, b], 2.0)
    assert latency.ratio((a, b)).verdict == "FASTER"
    assert latency.ratio((a, b)).ratio == pytest.approx(2.0, rel=0.1)
    assert latency.ratio((b, a)).verdict == "SLOWER"


def test_a_drift_that_hits_both_is_no_difference() -> None:
    drift = np.array([10 + i for i in range(10)])
    assert same(raced(drift, drift))


def test_no_difference_takes_several_pairs_of_processes() -> None:
    """One pair may differ by more than that for longer than any race."""
    pair = raced(np.full(1000, 10.0), np.full(1000, 10.0))
    assert [latency.ratio(*[pair] * count).verdict for count in (1, 2, 4)] == [*["INCONCLUSIVE"] * 2, "NO DIFFERENCE"]
    found = latency.ratio(*[pair] * 9)
    assert (found.low, found.high) == pytest.approx((math.exp(-latency.PLACEMENT / 3), math.exp(latency.PLACEMENT / 3)))


def test_every_pair_of_processes_counts_alike() -> None:
    """However many rounds it needed, with the noise of all: the mean's standard error."""
    noise = np.random.default_rng(0).normal(0, 0.02, (2, 400))
    long = raced(np.exp(noise[0]), np.exp(noise[1] + 0.06))
    short = raced(np.full(8, 10.0), np.full(8, 10.0))
    middle, half = latency._interval(*long)
    found = latency.ratio(long, short)
    assert math.log(found.ratio) == pytest.approx(middle / 2)
    assert math.log(found.high / found.ratio) == pytest.approx(math.sqrt(half**2 / 4 + latency.PLACEMENT**2 / 2))


def test_rounds_from_which_much_was_withheld_do_not_count() -> None:
    """Even where they are most, as long as enough are left."""
    calm, lost = np.full(80, 10.0), np.zeros((2, 80))
    slow = calm.copy()
    slow[30:] = 19.0
    lost[0, 30:55] = lost[1, 55:] = 0.2
    assert latency.ratio(raced(slow, calm, lost)).ratio == pytest.approx(1.0)
    assert same(raced(slow, calm, lost)) and not same(raced(slow, calm))


def test_disturbed_rounds_that_must_count_widen_the_interval() -> None:
    noise = np.exp(np.random.default_rng(0).normal(0, 0.05, (2, 80)))
    lost = np.full((2, 80), 0.2)
    lost[:, :5] = 0.0
    logs, disturbed = latency._logs(*raced(*noise, lost))
    assert (len(logs), disturbed) == (80, True)
    lost[:, 5:20] = 0.1
    logs, disturbed = latency._logs(*raced(*noise, lost))
    assert (len(logs), disturbed) == (20, True)
    lost[:, :20] = latency.WITHHELD
    logs, disturbed = latency._logs(*raced(*noise, lost))
    assert (len(logs), disturbed) == (20, False)
    middle, half = latency._interval(*raced(*noise, lost))
    lost[0, 0] = 0.1
    assert latency._interval(*raced(*noise, lost)) == pytest.approx((middle, latency.DISTURBED * half))


def test_a_race_notes_what_was_withheld(clock: Clock) -> None:
    """As a share of the turn that it was withheld in."""
    a, b = clock.contender("a", 10.0), clock.contender("b", 30.0)
    lost = {"a": 0.0, "b": 0.25}
    latency.race([a, b], 0.5, withheld=lambda: clock.now * lost[clock.awake or "a"])
    assert {turn.withheld for turn in a.rounds} == {0.0}
    assert [turn.withheld for turn in b.rounds] == pytest.approx([0.25] * len(b.rounds))


def test_a_race_of_workers_asks_the_machine_and_keeps_to_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    class Begun(Exception):
        pass

    given: dict[str, Any] = {}

    def begin(contenders: Any, seconds: float, **options: Any) -> float:
        given.update(options, seconds=seconds)
        raise Begun

    monkeypatch.setattr(latency, "race", begin)
    monkeypatch.setattr(Machine, "_ticks", lambda _: (9.0, 3.0, 5.0, 1.0))
    monkeypatch.setattr("bertopt.system.cpu_contention.os.cpu_count", lambda: 2)
    with pytest.raises(Begun):
        race_case({}, (1, 8), [], Budget(2.0, 9.0, 0.01), 1.0, None)
    assert (given["seconds"], given["narrow"], given["withheld"]()) == (3.0, 0.01, 2.0)
    # Four pairs share the seconds, and their mean is to be as narrow.
    with pytest.raises(Begun):
        race_case({}, (1, 8), [], Budget(2.0, 9.0, 0.01, 4), 1.0, None)
    assert (given["seconds"], given["narrow"]) == (1.5, 0.02)


def test_a_few_disturbed_rounds_change_nothing() -> None:
    calm = np.full(20, 10.0)
    disturbed = calm.copy()
    disturbed[[2, 9, 17]] = [90.0, 40.0, 25.0]
    assert latency.ratio(raced(disturbed, calm)).ratio == pytest.approx(1.0)
    assert same(raced(disturbed, calm))


def test_student() -> None:
    table = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 7: 2.365, 10: 2.228, 20: 2.086, 60: 2.000}
    for df, quantile in table.items():
        assert latency._student(df) == pytest.approx(quantile, rel=0.01)


#: Noise of one kind of machine, in log time: each turn's own, and how much of it stays from round to round; the shared
#: mood's steps; how often a turn is disturbed, and how much; and what two processes differ by for good.
MACHINES = {
    "quiet": (0.008, 0.0, 0.003, 0.02, 0.2, 0.003),
    "usual": (0.02, 0.2, 0.01, 0.06, 0.3, 0.004),
    "spiky": (0.02, 0.2, 0.01, 0.25, 0.4, 0.004),
    "drifting": (0.01, 0.2, 0.05, 0.05, 0.3, 0.004),
    # Processes that differ as much as was seen for the smallest models.
    "placed": (0.02, 0.2, 0.01, 0.06, 0.3, 0.009),
}
RACES = 1000


def simulate(
    kind: str, slower: float, seed: int, processes: int = 1, narrow: float = latency.NARROW, most: int = 30
) -> Counter[str]:
    """Verdicts of `RACES` simulated races of so many processes a side, each stopped as `latency.race` stops.

    `most` is how many rounds the budget holds; 30 is a model that takes 40 ms, in a run's own 2.5 s.
    """
    sigma, stays, mood_step, often, much, placement = MACHINES[kind]
    verdicts: Counter[str] = Counter()
    for number in range(RACES):
        # Of its own, so that no race depends on when another ended.
        rng = np.random.default_rng((seed, number))
        pairs = []
        for _ in range(processes):
            base = math.log1p(slower) + rng.normal(0, placement)
            racing = [Contender(name, lambda _: Turn([])) for name in "ab"]
            mood, own = rng.normal(0, 0.1), rng.normal(0, sigma, 2)
            ends = latency.Ends(narrow * math.sqrt(processes))
            for done in range(most):
                if ends.now(racing, done):
                    break
                own = stays * own + math.sqrt(1 - stays**2) * rng.normal(0, sigma, 2)
                mood += rng.normal(0, mood_step)
                spikes = np.where(rng.random(2) < often, rng.exponential(much, 2), 0.0)
                for contender, log_ms in zip(racing, mood + own + spikes + np.array([base, 0.0]), strict=True):
                    contender.rounds.append(Turn([math.exp(float(log_ms))]))
            pairs.append((racing[0], racing[1]))
        verdicts[latency.ratio(*pairs).verdict] += 1
    return verdicts


@pytest.mark.parametrize("kind", MACHINES)
def test_false_alarms(kind: str) -> None:
    found = simulate(kind, 0.0, seed=1)
    assert found["FASTER"] + found["SLOWER"] <= 0.015 * RACES, found


@pytest.mark.parametrize("kind", ["usual", "placed"])
def test_four_processes_a_side_are_hardly_ever_wrong(kind: str) -> None:
    """As README states them. A tenth of what is asked for in false alarms, a fifth in slow-downs that are missed."""
    alike = simulate(kind, 0.0, 3, processes=4, narrow=0.02, most=200)
    assert alike["FASTER"] + alike["SLOWER"] <= 0.001 * RACES, alike
    slow = simulate(kind, 0.05, 4, processes=4, narrow=0.02, most=200)
    assert slow["SLOWER"] >= 0.99 * RACES, slow


@pytest.mark.parametrize(("kind", "share"), [("quiet", 0.99), ("usual", 0.93), ("drifting", 0.97)])
def test_a_five_percent_slow_down_is_found(kind: str, share: float) -> None:
    found = simulate(kind, 0.05, seed=2)
    assert found["SLOWER"] >= share * RACES and not found["FASTER"], found


def test_a_race_that_ends_when_narrow_is_as_sure_as_it_says() -> None:
    """Rounds with the long tails of a shared machine. Looked at after every other round, 11 % of intervals missed."""
    rng = np.random.default_rng(4)
    apart, lengths = [], []
    for _ in range(300):
        a, b = raced(np.ones(1000), np.exp(0.08 * rng.standard_t(3, 1000)))
        ends, racing = latency.Ends(0.016), (a, b)
        for done in range(2, 1000, 2):
            if done == ends.look:
                racing = replace(a, rounds=a.rounds[:done]), replace(b, rounds=b.rounds[:done])
            if ends.now(racing, done):
                break
        middle, half = latency._interval(*racing)
        apart.append(middle / half)
        lengths.append(done)
    assert max(lengths) < 500
    assert np.std(apart) < 1.12 / 1.96
    assert np.mean(np.abs(apart) > 1) < 0.08


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (1.2, 1.5, "FASTER"), (1.0101, 1.02, "FASTER"), (0.5, 0.9, "SLOWER"), (0.98, 0.9899, "SLOWER"),
        (0.995, 1.005, "NO DIFFERENCE"), (0.99, 1.01, "NO DIFFERENCE"), (1.0, 1.0, "NO DIFFERENCE"),
        (0.9, 1.1, "INCONCLUSIVE"), (1.0, 1.2, "INCONCLUSIVE"), (1.005, 1.011, "INCONCLUSIVE"),
        (0.8, 1.0, "INCONCLUSIVE"), (NAN, NAN, "INCONCLUSIVE"), (0.0, math.inf, "INCONCLUSIVE"),
    ],
)  # fmt: skip
def test_verdicts(low: float, high: float, verdict: str) -> None:
    assert Ratio(ratio=1.0, low=low, high=high).verdict == verdict


def test_ratio_in_words() -> None:
    assert str(Ratio(ratio=1.841, low=1.811, high=1.873)) == "FASTER 1.84x [1.81, 1.87]"


# Figures


def timed(samples: list[float], late: float = 0.0, **fields: Any) -> Contender:
    return Contender("x", lambda _: Turn([]), rounds=[Turn(samples[start : start + 100], late) for start in range(0, len(samples), 100)],
                     **fields)  # fmt: skip


def test_p99_only_from_many_samples() -> None:
    many = [float(i) for i in range(latency.P99_SAMPLES)]
    found = latency.measure([{"stage": timed(many)}], (2, 8), 0)
    assert found.p99_ms == pytest.approx(4949, abs=1)
    assert (found.n, found.kind, found.batch, found.sequence) == (5000, "shape", 2, 8)
    assert latency.measure([{"stage": timed(many[:-1])}], (2, 8), 0).p99_ms is None


def test_figures_of_a_shape_and_of_the_mix() -> None:
    mine, other = timed([10.0] * 500), timed([20.0] * 500)
    found = latency.measure([{"stage": mine, "reference": other, "parent": mine}], (4, 8), 0)
    assert (found.p50_ms, found.p90_ms, found.texts_per_s) == (10.0, 10.0, 400.0)
    assert found.vs_reference is not None and found.vs_reference.ratio == pytest.approx(2)
    assert found.vs_reference.low == pytest.approx(2 * math.exp(-latency.PLACEMENT))
    assert found.vs_reference.high == pytest.approx(2 * math.exp(latency.PLACEMENT))
    assert found.vs_parent is not None and found.vs_parent.ratio == 1.0 and found.warning is None
    mix = latency.measure([{"stage": mine, "parent": other}], None, 12)
    assert (mix.kind, mix.batch, mix.sequence, mix.n, mix.texts_per_s) == ("mix", None, None, 12, 1200.0)
    assert (mix.vs_reference, mix.vs_parent) == (None, found.vs_reference)
    first = latency.measure([{"stage": mine, "reference": other}], (4, 8), 0)
    assert first.vs_parent == first.vs_reference == found.vs_reference


def test_figures_of_several_processes() -> None:
    """All samples count, all ratios, and what voids one team's voids them all."""
    teams = [{"stage": timed([ms] * 500), "reference": timed([20.0] * 500)} for ms in (10.0, 20.0, 20.0)]
    found = latency.measure(teams, (4, 8), 0, ["busy"])
    assert (found.n, found.p50_ms, found.warning) == (1500, 20.0, "busy")
    assert found.vs_reference is not None and found.vs_reference.ratio == pytest.approx(2 ** (1 / 3))
    teams[1]["stage"].compiled = 2
    voided = latency.measure(teams, (4, 8), 0)
    assert (voided.warning, voided.vs_reference) == ("void: 2 graphs were compiled while the clock ran", None)
    late = [teams[0], {"stage": timed([1.0] * 500, late=15.0), "reference": timed([20.0] * 500)}]
    assert "not ready" in (latency.measure(late, (4, 8), 0).warning or "")


def test_a_noisy_machine_is_mentioned() -> None:
    noisy = timed([value for i in range(10) for value in [10.0 if i % 2 else 30.0] * 100])
    found = latency.measure([{"stage": noisy, "reference": timed([20.0] * 1000)}], (4, 8), 0, ["others were busy"])
    assert found.warning is not None
    assert found.warning.startswith("others were busy; the interval is") and "too noisy" in found.warning


def test_compiling_under_the_clock_voids_the_figures(clock: Clock) -> None:
    counted = iter([3, 3])
    still = clock.contender("still", 10.0, graphs=lambda: next(counted))
    graphs = iter([1, 4])
    compiling = clock.contender("compiling", 10.0, graphs=lambda: next(graphs))
    latency.race([still, compiling], 1.0)
    found = latency.measure([{"stage": compiling, "reference": still, "parent": still}], (1, 8), 0)
    assert found.warning == "void: 3 graphs were compiled while the clock ran"
    assert (found.vs_reference, found.vs_parent) == (None, None)
    assert latency.measure([{"stage": still}], (1, 8), 0).warning is None


def test_answers_that_come_after_the_clock_stopped_void_the_figures() -> None:
    other = timed([20.0] * 500)
    found = latency.measure([{"stage": timed([1.0] * 500, late=15.0), "reference": other}], (1, 8), 0)
    assert found.warning is not None and "not ready when the clock stopped" in found.warning
    assert (found.vs_reference, found.vs_parent) == (None, None)
    assert latency.measure([{"stage": timed([1.0] * 500, late=0.1), "reference": other}], (1, 8), 0).warning is None
    # Fetching for the first time takes a little longer, which is much beside a step of no length.
    assert latency.measure([{"stage": timed([0.001] * 500, late=0.05), "reference": other}], (1, 8), 0).warning is None


# The machine


def test_a_calm_machine_gives_no_warning() -> None:
    assert cpu_contention.findings(Seen([0.002] * 9, others=0.05, stolen=0.01, throttled=0.0, available=4.0)) == []
    assert cpu_contention.findings(Seen([], 0, 0, 0, 0)) == [] == cpu_contention.findings(Seen([0.002, 0.004], 0, 0, 0, 1.0))
    # One calibration that was disturbed is no drift, and where others are hidden their time is negative.
    assert cpu_contention.findings(Seen([0.02, 0.002, 0.002, 0.002, 0.002, 0.002, 0.002, 0.02, 0.002], -1.0, 0, 0, 4.0)) == []


def test_what_disturbs_is_named() -> None:
    assert cpu_contention.findings(Seen([], others=1.0, stolen=0.0, throttled=0.0, available=4.0)) == [
        "other processes used 25% of the CPUs meanwhile"
    ]
    assert cpu_contention.findings(Seen([], 0.0, 0.4, 0.0, 4.0)) == ["the hypervisor withheld 10% of the CPUs"]
    assert cpu_contention.findings(Seen([], 0.0, 0.0, 0.4, 4.0)) == ["a CPU quota held processes back for 0.4 s"]
    slower = [0.0020, 0.0021, 0.0022, 0.0025, 0.0026, 0.0027]
    assert cpu_contention.findings(Seen(slower, 0, 0, 0, 4.0)) == ["the machine became 30% slower meanwhile"]
    assert cpu_contention.findings(Seen(slower[::-1], 0, 0, 0, 4.0)) == ["the machine became 23% faster meanwhile"]


def test_several_watches_give_each_warning_once() -> None:
    calm, busy = Seen([0.002] * 9, 0.1, 0.0, 0.0, 4.0), Seen([0.002, 0.002, 0.003], 2.0, 0.0, 0.0, 4.0)
    assert cpu_contention.findings(calm, busy, Seen([0.003, 0.003, 0.0025], 0.9, 0.0, 0.0, 4.0)) == [
        "other processes used 25% of the CPUs meanwhile", "the machine became 50% slower meanwhile"
    ]  # fmt: skip
    # As a share of all the time, so that one short watch does not speak for all.
    assert cpu_contention.findings(*[calm] * 9, Seen([], 2.0, 0.0, 0.0, 4.0)) == []


def test_the_timed_processes_are_not_others() -> None:
    """What processes under watch use is counted as theirs, and only theirs."""
    spin = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(spin), subprocess.Popen(spin)]
    try:
        both, none = Machine([process.pid for process in processes]), Machine([])
        while sum(cpu_contention._cpu_s(process.pid) for process in processes) < 0.5:
            both.calibrate()
        used = [now - then for now, then in zip(both._ticks(), both._before, strict=True)]
        unseen = [now - then for now, then in zip(none._ticks(), none._before, strict=True)]
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.wait()
    assert used[2] - unseen[2] >= 0.4
    assert len(both.speeds) > 2 and min(both.speeds) > 0


# Runs under the clock


SPEC = Spec(family="bert", task="text-classification", inputs=("input_ids", "attention_mask", "token_type_ids"),
            outputs=("logits",), layers=1, heads=1, hidden=4, vocabulary=50, token_types=2, pad_id=7, max_length=16,
            text_length=16, labels=("a", "b"), parameters=1)  # fmt: skip


class Doubling(Session):
    """Answers twice its input ids, in memory that it uses again."""

    def __init__(self) -> None:
        self.memory = np.zeros((2, 6), np.float32)

    def load(self, inputs: Mapping[str, np.ndarray]) -> None:
        self.inputs = inputs["input_ids"]

    def step(self) -> None:
        self.memory[:] = 2 * self.inputs

    def fetch(self) -> dict[str, np.ndarray]:
        return {"logits": self.memory}


def test_fresh_inputs_are_never_padding_and_never_alike() -> None:
    dice = np.random.default_rng(0)
    made = [clocks.fresh(SPEC, (2, 6), dice) for _ in range(300)]
    assert len({inputs["input_ids"].tobytes() for inputs in made}) == len(made)
    ids = np.stack([inputs["input_ids"] for inputs in made])
    assert set(np.unique(ids)) == set(range(50)) - {7} and ids.dtype == np.int64
    assert list(made[0]) == list(SPEC.inputs) and made[0]["attention_mask"].all()
    assert made[0]["token_type_ids"].tolist() == [[0, 0, 0, 1, 1, 1]] * 2


def test_a_sample_is_what_was_answered_to_its_inputs() -> None:
    dice = np.random.default_rng(0)
    batches = [clocks.fresh(SPEC, (2, 6), dice) for _ in range(4)]
    taken, late, (inputs, answers) = clocks.time_steps(Doubling(), batches, keep=1)
    assert len(taken) == 4 and min(taken) >= 0 and math.isfinite(late)
    assert inputs is batches[1]
    np.testing.assert_array_equal(answers["logits"], 2 * batches[1]["input_ids"])


def test_turned_texts_have_the_same_words() -> None:
    assert [clocks.turned("a cat sat", by) for by in range(4)] == ["a cat sat", "cat sat a", "sat a cat", "a cat sat"]
    assert [clocks.turned(text, 5) for text in ("", "one", "狗坐着")] == ["", "one", "狗坐着"]


def test_the_keeper_chooses_evenly_and_within_bounds() -> None:
    def sample(number: int, size: int = 1) -> clocks.Sample:
        return {"x": np.full(size, number)}, {}

    kept = Counter[int]()
    for seed in range(400):
        keeper = clocks.Keeper(np.random.default_rng(seed))
        for number in range(10):
            keeper.give(sample(number))
        taken = [int(inputs["x"][0]) for inputs, _ in keeper.take()]
        assert len(set(taken)) == clocks.SAMPLES and keeper.take() == []
        kept.update(taken)
    assert min(kept.values()) > 100 and max(kept.values()) < 220
    large = clocks.Keeper(np.random.default_rng(0))
    for number in range(3):
        large.give(sample(number, clocks.SAMPLE_BYTES))
    assert len(large.take()) == 1
