"""Intervals of ratios, when a race may stop, and verdicts on simulated noise."""

from __future__ import annotations

import math
from collections import Counter
from functools import cache

import numpy as np
import pytest

from bertopt.checks import latency, ratio
from bertopt.checks.latency import Contender, Turn
from bertopt.checks.ratio import Interval, StoppingRule
from bertopt.results import Ratio
from tests.support.races import verdict

NAN = math.nan


@pytest.mark.parametrize(
    ("log_ratio", "half_width", "narrow"),
    [(0.0, 0.008, True), (0.0, 0.0081, False), (0.03, 0.0081, False), (-0.1, 0.02, True), (0.1, 0.021, False),
     (math.log(3), 0.1, True), (math.log(3), 0.11, False), (0.0, NAN, False)],
)  # fmt: skip
def test_narrow_depends_on_the_distance(log_ratio: float, half_width: float, narrow: bool) -> None:
    assert Interval(log_ratio, half_width).narrow is narrow


def test_the_stopping_rule_wants_two_narrow_intervals_in_a_row() -> None:
    def checks(*widths: float) -> list[int]:
        """At which rounds the rule asks, until it stops."""
        rule, asked, given = StoppingRule(), list[int](), iter(widths)
        for rounds in range(100):

            def now(rounds: int = rounds) -> Interval:
                asked.append(rounds)
                return Interval(0.0, next(given))

            if rule.should_stop(rounds, now):
                return asked
        raise AssertionError(asked)

    assert checks(0.001) == [8]
    assert checks(0.1, 0.001, 0.001) == [8, 10, 14]
    assert checks(0.1, 0.001, 0.1, 0.001, 0.001) == [8, 10, 14, 18, 24]


@pytest.mark.parametrize(("low", "high", "verdict"), [
    (2.0, 5.9, "FASTER"), (1.39, 349.57, "INCONCLUSIVE"), (2.97, 13.73, "INCONCLUSIVE"), (0.01, 0.9, "INCONCLUSIVE"), (0.5, 0.9, "SLOWER"),
])  # fmt: skip
def test_an_interval_that_tells_nothing_is_no_verdict(low: float, high: float, verdict: str) -> None:
    assert Ratio(ratio=math.sqrt(low * high), low=low, high=high).verdict == verdict


def test_disturbed_rounds_that_must_count_widen_the_interval() -> None:
    steal = np.full(80, 0.2)

    def counted() -> tuple[int, bool]:
        counts, disturbed = ratio.undisturbed(steal)
        return int(counts.sum()), disturbed

    steal[:5] = 0.0
    assert counted() == (80, True)
    steal[5:20] = 0.1
    assert counted() == (20, True)
    steal[:20] = ratio.MAX_STEAL
    assert counted() == (20, False)
    logs = np.random.default_rng(0).normal(0, 0.05, 80)
    calm = ratio.interval(logs, steal)
    steal[0] = 0.1
    found = ratio.interval(logs, steal)
    assert (found.log_ratio, found.half_width) == pytest.approx(
        (calm.log_ratio, ratio.DISTURBED_WIDENING * calm.half_width)
    )


def test_the_interval_is_yuen_s_where_rounds_are_independent() -> None:
    """The trimmed mean, and Student's t times the winsorised standard error."""
    logs = np.array([0.3, -0.2, 0.1, 0.5, -0.4, 0.0, 0.2, -0.1, 9.0, -9.0])
    found = ratio.estimate(logs)
    kept = np.array([-0.2, -0.1, 0.0, 0.1, 0.2, 0.3])
    assert found.log_ratio == pytest.approx(kept.mean())
    winsorised = np.array([*kept, -0.2, -0.2, 0.3, 0.3])
    assert found.half_width == pytest.approx(2.5706 * winsorised.std(ddof=1) / (0.6 * math.sqrt(10)), rel=1e-4)


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
FALSE_ALARMS = 0.01


@cache
def simulate(kind: str, slower: float, seed: int, most: int = 30) -> Counter[str]:
    """Verdicts of `RACES` simulated races, each stopped as `latency.race` stops.

    `most` is how many rounds the budget holds; 30 is a model that takes 40 ms, in a run's default 2.5 s.
    """
    sigma, stays, mood_step, often, much, placement = MACHINES[kind]
    verdicts: Counter[str] = Counter()
    for number in range(RACES):
        # One generator per race, so that no race depends on when another ended.
        rng = np.random.default_rng((seed, number))
        base = math.log1p(slower) + rng.normal(0, placement)
        racing = [Contender(name, lambda _: Turn([])) for name in "ab"]
        mood, own = rng.normal(0, 0.1), rng.normal(0, sigma, 2)
        rule = StoppingRule()
        for done in range(most):
            if rule.should_stop(done, lambda racing=racing: latency.compare(*racing)):  # type: ignore[misc]
                break
            own = stays * own + math.sqrt(1 - stays**2) * rng.normal(0, sigma, 2)
            mood += rng.normal(0, mood_step)
            spikes = np.where(rng.random(2) < often, rng.exponential(much, 2), 0.0)
            for contender, log_ms in zip(racing, mood + own + spikes + np.array([base, 0.0]), strict=True):
                contender.rounds.append(Turn([math.exp(float(log_ms))]))
        verdicts[verdict(*racing)] += 1
    return verdicts


@pytest.mark.parametrize("kind", MACHINES)
def test_false_alarms(kind: str) -> None:
    found = simulate(kind, 0.0, seed=1)
    assert found["FASTER"] + found["SLOWER"] <= FALSE_ALARMS * RACES, found


@pytest.mark.parametrize(("kind", "share"), [("quiet", 0.9), ("usual", 0.3)])
def test_equal_models_are_said_to_be(kind: str, share: float) -> None:
    found = simulate(kind, 0.0, seed=1)
    assert found["NO DIFFERENCE"] >= share * RACES, found


@pytest.mark.parametrize(("kind", "share"), [("quiet", 0.99), ("usual", 0.85), ("drifting", 0.95)])
def test_a_five_percent_slow_down_is_found(kind: str, share: float) -> None:
    found = simulate(kind, 0.05, seed=2)
    assert found["SLOWER"] >= share * RACES and not found["FASTER"], found


@pytest.mark.parametrize("slower", [0.0, 0.05, 0.25, 2.0])
def test_a_race_that_ends_when_narrow_is_as_sure_as_it_says(slower: float) -> None:
    """At every distance. Rounds with the long tails of a shared machine: checked after every other round, 11 % of
    intervals missed."""
    rng = np.random.default_rng(4)
    errors, lengths = [], []
    for _ in range(300):
        logs = math.log1p(slower) + 0.04 * rng.standard_t(3, 1000)
        rule = StoppingRule()
        for done in range(1000):
            if rule.should_stop(done, lambda: ratio.interval(logs[:done], np.zeros(done))):  # noqa: B023
                break
        found = ratio.interval(logs[:done], np.zeros(done))
        errors.append((found.log_ratio - math.log1p(slower)) / found.half_width)
        lengths.append(done)
    assert max(lengths) < 500
    assert np.std(errors) < 1.12 / 1.96
    assert np.mean(np.abs(errors) > 1) < 0.08


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (1.2, 1.5, "FASTER"), (1.0201, 1.03, "FASTER"), (0.5, 0.9, "SLOWER"), (0.97, 0.9799, "SLOWER"),
        (0.995, 1.005, "NO DIFFERENCE"), (0.98, 1.02, "NO DIFFERENCE"), (1.0, 1.0, "NO DIFFERENCE"),
        (0.9, 1.1, "INCONCLUSIVE"), (1.0, 1.2, "INCONCLUSIVE"), (1.015, 1.021, "INCONCLUSIVE"),
        (0.8, 1.0, "INCONCLUSIVE"), (NAN, NAN, "INCONCLUSIVE"), (0.0, math.inf, "INCONCLUSIVE"),
    ],
)  # fmt: skip
def test_verdicts(low: float, high: float, verdict: str) -> None:
    assert Ratio(ratio=1.0, low=low, high=high).verdict == verdict


def test_ratio_in_words() -> None:
    assert str(Ratio(ratio=1.841, low=1.811, high=1.873)) == "FASTER 1.84x [1.81, 1.87]"
    assert str(Ratio(ratio=349.57, low=1.39, high=146_051.4)) == "INCONCLUSIVE 350x [1.39, >10,000]"
    assert str(Ratio(ratio=0.5, low=0.0001, high=0.9)) == "INCONCLUSIVE 0.50x [<0.01, 0.90]"
    assert Ratio(ratio=1.39, low=0.66, high=1.47).brief() == "INCONCLUSIVE 0.66x to 1.47x"
    assert Ratio(ratio=2.0, low=1.9, high=2.1).brief() == "FASTER 2.00x"
