"""How many times faster one model is than another: the estimate, its 95 % interval, and when a race has enough rounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bertopt.results import Ratio

if TYPE_CHECKING:
    from bertopt.core import Array

#: Rounds before the intervals of a race are first computed.
MIN_ROUNDS = 8
#: Rounds of a quick look. With so few the interval is five times as wide, which keeps its verdicts honest.
QUICK_ROUNDS = 4
#: Intervals are computed again whenever there are this many times as many rounds: after every round, a race would end at
#: the first interval that chance makes too narrow.
CHECK_GROWTH = 1.25
#: Half-width of an interval, in log time, that is enough: less than half of the dead band, so that a race of equal models
#: can say NO DIFFERENCE.
ENOUGH = 0.008
#: Where models are far apart, this share of their distance is enough, up to `ENOUGH_FAR`: an interval [2.8, 3.4] tells
#: as much as [3.1, 3.2].
ENOUGH_SHARE, ENOUGH_FAR = 0.2, 0.1
#: Share of rounds cut off at each end before the mean is taken, as a disturbed round measures nothing; the second from
#: `MANY_ROUNDS` on.
TRIM, TRIM_MANY, MANY_ROUNDS = 0.2, 0.35, 20
#: A round counts if at most this share of the CPUs was stolen during its turns; the `MIN_KEPT` least disturbed count in any
#: case. Rounds are chosen by CPU steal, never by their timing.
MAX_STEAL, MIN_KEPT = 0.03, 20
#: An interval over disturbed rounds is this many times as wide, since such noise lasts for several rounds (measured on a
#: virtual machine).
DISTURBED_WIDENING = 1.5
#: Largest autocorrelation of successive rounds that the interval is widened for.
MAX_AUTOCORRELATION = 0.5
#: Noise that stays with one process for seconds does not show in the spread of a few rounds: against itself, a real
#: model at 8 × 128 was 2.4 times as far from 1 as the intervals of 8 rounds said. Intervals are widened by
#: 1 + (FEW_ROUNDS / rounds)².
FEW_ROUNDS = 8


@dataclass(frozen=True)
class Interval:
    """Log of how many times faster one model is, and the half-width of its 95 % interval."""

    log_ratio: float
    half_width: float

    @property
    def narrow(self) -> bool:
        """Whether more rounds would tell nothing that matters. It asks for the width, not for a verdict."""
        far = min(ENOUGH_FAR, ENOUGH_SHARE * abs(self.log_ratio))
        return self.half_width <= max(ENOUGH, far)

    def ratio(self) -> Ratio:
        low, high = self.log_ratio - self.half_width, self.log_ratio + self.half_width
        return Ratio(ratio=math.exp(self.log_ratio), low=math.exp(low), high=math.exp(high))


def estimate(log_ratios: Array) -> Interval:
    """Return the trimmed mean of one log ratio per round, with its 95 % interval.

    The interval is Tukey and McLaughlin's: Student's t with the variance of the winsorised values, widened for AR(1)
    autocorrelation of successive rounds. In simulation it detects a 5 % slow-down more often than the bootstrap of
    medians or trimmed means, at no more false alarms.
    """
    from scipy.special import stdtrit

    rounds = len(log_ratios)
    cut = int((TRIM_MANY if rounds >= MANY_ROUNDS else TRIM) * rounds)
    ordered = np.sort(log_ratios)
    # In the order of the rounds, which the autocorrelation needs.
    winsorised = np.clip(log_ratios, ordered[cut], ordered[rounds - 1 - cut])
    deviation = winsorised - winsorised.mean()
    squares = float((deviation**2).sum())
    successive = float((deviation[1:] * deviation[:-1]).sum())
    correlation = min(MAX_AUTOCORRELATION, max(0.0, successive / squares)) if squares else 0.0
    variance = squares / (rounds - 1) / rounds * (1 + correlation) / (1 - correlation)
    error = math.sqrt(variance) / (1 - 2 * cut / rounds)
    t = float(stdtrit(rounds - 2 * cut - 1, 0.975))
    return Interval(float(ordered[cut : rounds - cut].mean()), t * error)


def undisturbed(steal: Array) -> tuple[Array, bool]:
    """Return which rounds count, given the share of CPU time stolen in each, and whether disturbed ones are among them."""
    limit = max(MAX_STEAL, float(np.sort(steal)[:MIN_KEPT][-1]))
    return steal <= limit, limit > MAX_STEAL


def interval(log_ratios: Array, steal: Array) -> Interval:
    """Return the estimate over the rounds that count, its interval widened where they are few or disturbed."""
    counts, disturbed = undisturbed(steal)
    found = estimate(log_ratios[counts])
    few = 1 + (FEW_ROUNDS / int(counts.sum())) ** 2
    return Interval(found.log_ratio, found.half_width * few * (DISTURBED_WIDENING if disturbed else 1.0))


class StoppingRule:
    """Decides when two models have been compared long enough: when their interval is narrow at two checks in a row.

    At the first check, whose interval is widened for few rounds, once is enough.
    """

    def __init__(self, first_check: int = MIN_ROUNDS) -> None:
        self._next_check = first_check
        self._was_narrow = True

    def should_stop(self, rounds: int, interval_now: Callable[[], Interval]) -> bool:
        if rounds < self._next_check:
            return False
        narrow, before = interval_now().narrow, self._was_narrow
        self._was_narrow = narrow
        # Always a round and its reverse.
        self._next_check = 2 * math.ceil(self._next_check * CHECK_GROWTH / 2)
        return narrow and before


def log_ratios(of_ms: Sequence[float], to_ms: Sequence[float]) -> Array:
    """Return the log of how many times faster `of` was in each round: paired, because conditions are similar within one."""
    return np.asarray(np.log(to_ms) - np.log(of_ms))
