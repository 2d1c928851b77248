"""Latency: contenders timed in interleaved rounds in random order, so that a drifting machine hits all alike."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from bertopt.results import Latency, Ratio

if TYPE_CHECKING:
    from bertopt.core import Array

#: Fewest samples for which a p99 says anything.
P99_SAMPLES = 5000
#: Most is what a long budget may spend on one case.
MIN_ROUNDS, MAX_ROUNDS = 8, 4000
#: Intervals are looked at first after `MIN_ROUNDS`, then whenever there are so many times as many rounds, and end a race
#: when narrow twice in a row. Looked at after every other round, a race ends at the first interval that chance makes too
#: narrow.
LOOK = 1.25
#: Half-width of an interval, as a share of its ratio, that is narrow enough to stop before the budget is spent. Where
#: contenders are far apart, `NARROW_APART` of their distance is narrow enough.
NARROW, NARROW_APART = 0.004, 0.1
#: Share of rounds left out at each end before their mean is taken, a disturbed round being no measurement, and the same where
#: there are `MANY` rounds.
TRIM, TRIM_MANY, MANY = 0.2, 0.35, 20
#: Share of its CPUs that may be withheld from the machine during a turn for its round to count, and of how many rounds the
#: least disturbed count all the same: chosen by what was withheld, never by what was measured. An interval with disturbed
#: rounds in it is `DISTURBED` times as wide, since such noise lasts for several rounds (measured on a virtual machine).
WITHHELD, LEAST_KEPT, DISTURBED = 0.03, 20, 1.5
#: Most that one round is taken to resemble the one before it, when the interval is widened for it.
ALIKE = 0.5
#: What two processes that run the same model may differ by for longer than a race, for reasons unknown: a half-width that
#: no number of rounds makes smaller, only more pairs of processes do (measured; see ARCHITECTURE.md).
PLACEMENT = 0.018
#: Noise that stays with one process for seconds does not show in the spread of a few rounds: against itself, the real
#: model at 8 × 128 was 2.4 times as far from 1 as 8 rounds' intervals said. So they are widened by
#: 1 + (FEW / rounds)².
FEW = 8
#: Width of an interval, as a share of its ratio, from which a figure carries a warning.
NOISY = 0.25
#: Each turn of the fastest contender lasts about this long, so that what wakes it up is small beside it. The others' have
#: as many steps up to `LONGEST` times that: the first step after waking takes 7 to 10 % longer than the median, so that
#: a model in turns of one step looked 15 % slower than itself in turns of five.
TURN_MS, LONGEST = 20.0, 4
#: Steps of the warm-up, of which the fastest counts: one that was disturbed says nothing.
WARM_UP = 3
#: Share of a step, and milliseconds at least, that may still have to be done when its clock has stopped.
LATE, LATE_MS = 0.5, 0.1


@dataclass(frozen=True)
class Turn:
    """Milliseconds of each step in a row, and how much longer than a mere copy it took to get one of their answers.

    The race adds for what share of this time the machine's CPUs were withheld.
    """

    taken: list[float]
    late: float = 0.0
    withheld: float = 0.0

    @cached_property
    def median(self) -> float:
        return float(np.median(self.taken))


@dataclass
class Contender:
    """Something to time: `turn(n)` runs n times without a break."""

    name: str
    turn: Callable[[int], Turn]
    wake: Callable[[], None] = lambda: None
    sleep: Callable[[], None] = lambda: None
    #: How many graphs the runtime has compiled so far; one more while the clock ran voids the figures.
    graphs: Callable[[], int] = lambda: 0
    per_turn: int = 1
    compiled: int = 0
    rounds: list[Turn] = field(default_factory=list)

    def samples(self) -> Array:
        return np.concatenate([np.asarray(turn.taken) for turn in self.rounds])

    def medians(self) -> Array:
        return np.array([turn.median for turn in self.rounds])

    def late(self) -> bool:
        """Whether the answers were not ready when the clock stopped: a step that does not wait for its device."""
        late = float(np.median([turn.late for turn in self.rounds]))
        return late > max(LATE_MS, LATE * float(np.median(self.medians())))


def race(
    contenders: Sequence[Contender], budget_s: float, seed: int = 0, between: Callable[[], None] = lambda: None,
    withheld: Callable[[], float] = lambda: 0.0, narrow: float = NARROW,
) -> float:  # fmt: skip
    """Time all contenders in turn, in a random order and then its reverse, until the first one's intervals are
    `narrow` or the budget is spent. Gives the seconds that are left of it.

    Stopping looks at widths, never at verdicts, so that no verdict is waited for. The first turns of each warm it up and
    are not kept. All others sleep meanwhile, and all when `between` is called before, between and after rounds.
    `withheld` tells for how many seconds the machine had no CPUs so far.
    """
    rng = np.random.default_rng(seed)
    start = time.monotonic()
    ends = Ends(narrow)
    once = []
    for contender in contenders:
        contender.wake()
        taken = contender.turn(1).taken
        if taken[0] < 5 * TURN_MS:
            # The first run pays for allocations; measure a short one again.
            taken = contender.turn(WARM_UP).taken
        once.append(max(0.01, min(taken)))
        contender.compiled = -contender.graphs()
        contender.sleep()
    steps = min(100, TURN_MS / min(once, default=1.0))
    for contender, ms in zip(contenders, once, strict=True):
        contender.per_turn = max(1, int(min(steps, LONGEST * TURN_MS / ms)))
    order = rng.permutation(len(contenders))
    for done in range(MAX_ROUNDS):
        # Alone there is nothing to compare, so no interval to narrow.
        if done >= MIN_ROUNDS and (
            len(contenders) == 1 or time.monotonic() - start > budget_s or ends.now(contenders, done)
        ):
            break
        between()
        # There and back again: what drifts steadily hits all alike.
        order = order[::-1] if done % 2 else rng.permutation(len(contenders))
        for i in order:
            contender = contenders[i]
            contender.wake()
            began, before = time.monotonic(), withheld()
            turn = contender.turn(contender.per_turn)
            lost, took = withheld() - before, time.monotonic() - began
            contender.rounds.append(replace(turn, withheld=lost / took if lost else 0.0))
            contender.sleep()
    between()
    for contender in contenders:
        contender.wake()
        contender.compiled += contender.graphs()
        contender.sleep()
    return max(0.0, budget_s - (time.monotonic() - start))


@dataclass
class Ends:
    """Whether a race knows enough: the first contender's intervals against all others are `narrow`.

    `look` is the number of rounds at which to look next, always a round and its reverse. At the first, with the interval
    that few rounds give, one look is enough.
    """

    narrow: float
    look: int = MIN_ROUNDS
    before: bool = True

    def now(self, contenders: Sequence[Contender], done: int) -> bool:
        if done < self.look:
            return False
        against = [_interval(contenders[0], other) for other in contenders[1:]]
        enough = all(half <= max(self.narrow, NARROW_APART * abs(middle)) for middle, half in against)
        before, self.before = self.before, enough
        self.look = 2 * math.ceil(self.look * LOOK / 2)
        return enough and before


def estimate(logs: Array) -> tuple[float, float]:
    """The trimmed mean of one log ratio a round, and half of its 95 % interval.

    The interval is Tukey and McLaughlin's, Student's t with the variance of the winsorised values, widened where
    successive rounds resemble each other, as AR(1) noise wants. In simulation (tests/unit/checks/test_latency.py) it finds a 5 %
    slow-down in more races than the bootstrap of medians or of trimmed means does, at no more false alarms.
    """
    n = len(logs)
    cut = int((TRIM_MANY if n >= MANY else TRIM) * n)
    ordered = np.sort(logs)
    winsorised = np.clip(logs, ordered[cut], ordered[n - 1 - cut])
    apart = winsorised - winsorised.mean()
    total = float((apart**2).sum())
    alike = min(ALIKE, max(0.0, float((apart[1:] * apart[:-1]).sum()) / total)) if total else 0.0
    error = math.sqrt(total / (n - 1) / n * (1 + alike) / (1 - alike)) / (1 - 2 * cut / n)
    return float(ordered[cut : n - cut].mean()), _student(n - 2 * cut - 1) * error


def _student(df: float) -> float:
    """The 97.5 % quantile of Student's t, by its expansion in 1/df (Fisher and Cornish)."""
    z = 1.96
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / df**power for power, term in enumerate(terms))


def _logs(of: Contender, to: Contender) -> tuple[Array, bool]:
    """Log of how many times faster `of` was in each round that counts: paired, since a round shares the machine's mood.
    Then whether disturbed ones had to be counted."""
    logs = np.log(to.medians()) - np.log(of.medians())
    lost = np.array([max(ours.withheld, theirs.withheld) for ours, theirs in zip(of.rounds, to.rounds, strict=True)])
    limit = max(WITHHELD, float(np.sort(lost)[:LEAST_KEPT][-1]))
    return logs[lost <= limit], limit > WITHHELD


def _interval(of: Contender, to: Contender) -> tuple[float, float]:
    """The estimate, its interval widened where rounds are few or disturbed."""
    logs, disturbed = _logs(of, to)
    middle, half = estimate(logs)
    return middle, half * (1 + (FEW / len(logs)) ** 2) * (DISTURBED if disturbed else 1.0)


def ratio(*pairs: tuple[Contender, Contender]) -> Ratio:
    """How many times faster the first of each pair is than the second, with its 95 % interval.

    Each pair, raced by itself, is two processes of the same two models, and counts alike.
    """
    found = [_interval(of, to) for of, to in pairs]
    middle = sum(middle for middle, _ in found) / len(found)
    half = math.hypot(*(half for _, half in found)) / len(found)
    half = math.hypot(half, PLACEMENT / math.sqrt(len(found)))
    return Ratio(ratio=math.exp(middle), low=math.exp(middle - half), high=math.exp(middle + half))


def measure(
    teams: Sequence[Mapping[str, Contender]], shape: tuple[int, int] | None, texts: int, noticed: Sequence[str] = ()
) -> Latency:
    """The figures of `stage` after the races of one team or more, against `reference` and `parent` where they ran.

    `shape` is None for the mix, in which a sample is all `texts`. `noticed` is what was wrong with the machine meanwhile.
    """
    stages = [team["stage"] for team in teams]
    samples = np.concatenate([stage.samples() for stage in stages])
    p50, p90 = (float(value) for value in np.quantile(samples, [0.5, 0.9]))
    voided = []
    compiled = sum(stage.compiled for stage in stages)
    if compiled > 0:
        voided.append(f"void: {compiled} graphs were compiled while the clock ran")
    if any(stage.late() for stage in stages):
        voided.append("void: answers were not ready when the clock stopped; step() must wait for its device")

    def against(role: str) -> Ratio | None:
        return ratio(*((team["stage"], team[role]) for team in teams)) if role in teams[0] and not voided else None

    vs_reference = against("reference")
    spread = (vs_reference.high - vs_reference.low) / vs_reference.ratio if vs_reference else 0.0
    warnings = [*voided, *noticed]
    if spread > NOISY:
        warnings.append(f"the interval is {spread:.0%} of the ratio: the machine is too noisy to trust it")
    return Latency(
        kind="shape" if shape else "mix", batch=shape[0] if shape else None, sequence=shape[1] if shape else None,
        n=len(samples) if shape else texts, p50_ms=p50, p90_ms=p90,
        p99_ms=float(np.quantile(samples, 0.99)) if len(samples) >= P99_SAMPLES else None,
        texts_per_s=(shape[0] if shape else texts) / (p50 / 1e3),
        vs_reference=vs_reference, vs_parent=against("parent" if "parent" in teams[0] else "reference"),
        warning="; ".join(warnings) or None,
    )  # fmt: skip
