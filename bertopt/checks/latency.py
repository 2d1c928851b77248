"""Race contenders in interleaved rounds in random order, so that a drifting machine affects all alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np

from bertopt.checks.ratio import MIN_ROUNDS, Interval, StoppingRule, interval, log_ratios
from bertopt.results import Latency, Ratio

if TYPE_CHECKING:
    from bertopt.core import Array

#: Most rounds of one case, however long the budget.
MAX_ROUNDS = 4000
#: Fewest samples for which a p99 is given.
P99_SAMPLES = 5000
#: Width of an interval, as a share of its ratio, from which a figure carries a warning.
NOISY = 0.25
#: Each turn of the fastest contender lasts about this long, so that the cost of waking it is small. The others run as many
#: steps, up to `MAX_TURN` times this long: the first step after waking takes 7 to 10 % longer than the median, so that
#: a model in turns of one step looked 15 % slower than itself in turns of five.
TURN_MS, MAX_TURN = 20.0, 4
#: The quantile of a turn's steps that is compared. A model that is slow in few of its steps alone differs in its p90, not here.
LEAST_DISTURBED = 0.1
#: Steps of the warm-up, of which the fastest counts.
WARM_UP = 3
#: Share of a step, and milliseconds at least, that may be unfinished when its clock stops.
UNFINISHED_SHARE, UNFINISHED_MS = 0.5, 0.1


@dataclass(frozen=True)
class Turn:
    """Milliseconds of successive steps, and how much work of one of them was unfinished when its clock stopped.

    The race adds the share of CPU time stolen from the machine during this turn.
    """

    step_ms: list[float]
    unfinished_ms: float = 0.0
    steal_share: float = 0.0

    @cached_property
    def median(self) -> float:
        return float(np.median(self.step_ms))

    @cached_property
    def least_disturbed(self) -> float:
        """Return the time of the steps that other processes disturbed least; a disturbance can only add time."""
        return float(np.quantile(self.step_ms, LEAST_DISTURBED))


@dataclass
class Contender:
    """Something to time: `turn(n)` runs n steps without a break."""

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
        return np.concatenate([np.asarray(turn.step_ms) for turn in self.rounds])

    def unfinished(self) -> bool:
        """Whether steps did not wait for their device."""
        unfinished = float(np.median([turn.unfinished_ms for turn in self.rounds]))
        step = float(np.median([turn.median for turn in self.rounds]))
        return unfinished > max(UNFINISHED_MS, UNFINISHED_SHARE * step)


def race(
    contenders: Sequence[Contender], budget_s: float, seed: int = 0, between: Callable[[], None] = lambda: None,
    stolen: Callable[[], float] = lambda: 0.0, min_rounds: int = MIN_ROUNDS,
) -> float:  # fmt: skip
    """Time all contenders in turn, in a random order and then its reverse. Return the seconds left of the budget.

    An opponent of the first contender leaves the race when the interval of their ratio is narrow; the race ends when all
    have left or the budget is spent. Stopping goes by widths, never by verdicts. The first turns of each warm it up and
    are not kept. All others sleep while one runs, and all while `between` is called before, between and after rounds.
    `stolen` returns for how many seconds so far the machine had no CPUs.
    """
    rng = np.random.default_rng(seed)
    start = time.monotonic()
    _warm_up(contenders)
    rules = [StoppingRule(min_rounds) for _ in contenders]
    active = list(range(len(contenders)))
    order = rng.permutation(active)
    for number in range(MAX_ROUNDS):
        if number >= min_rounds and time.monotonic() - start > budget_s:
            break
        active = [i for i in active if i == 0 or not rules[i].should_stop(number, partial(compare, contenders[0], contenders[i]))]
        # Alone there is nothing to compare.
        if number >= min_rounds and len(active) == 1:
            break
        between()
        # There and back again, so that a steady drift affects all alike.
        order = order[::-1] if number % 2 else rng.permutation(active)
        for i in order:
            _take_turn(contenders[i], stolen)
    between()
    for contender in contenders:
        contender.wake()
        contender.compiled += contender.graphs()
        contender.sleep()
    return max(0.0, budget_s - (time.monotonic() - start))


def _warm_up(contenders: Sequence[Contender]) -> None:
    """Run each a few times, and set the number of steps of its turns."""
    fastest = []
    for contender in contenders:
        contender.wake()
        step_ms = contender.turn(1).step_ms
        if step_ms[0] < 5 * TURN_MS:
            # The first run pays for allocations; measure a short one again.
            step_ms = contender.turn(WARM_UP).step_ms
        fastest.append(max(0.01, min(step_ms)))
        contender.compiled = -contender.graphs()
        contender.sleep()
    steps = min(100, TURN_MS / min(fastest, default=1.0))
    for contender, ms in zip(contenders, fastest, strict=True):
        contender.per_turn = max(1, int(min(steps, MAX_TURN * TURN_MS / ms)))


def _take_turn(contender: Contender, stolen: Callable[[], float]) -> None:
    contender.wake()
    start, stolen_before = time.monotonic(), stolen()
    turn = contender.turn(contender.per_turn)
    stolen_s, seconds = stolen() - stolen_before, time.monotonic() - start
    contender.rounds.append(replace(turn, steal_share=stolen_s / seconds if stolen_s else 0.0))
    contender.sleep()


def compare(of: Contender, to: Contender) -> Interval:
    """Return how many times faster `of` is than `to`, over the rounds that both ran.

    The `LEAST_DISTURBED` steps of a turn are compared: on shared CPUs they spread less than the median, so that half the
    rounds give as narrow an interval. Turns of unequally many steps, of models more than `MAX_TURN` times apart, are compared
    by the median: of few steps a low quantile is nearer to it than of many.
    """
    rounds = list(zip(of.rounds, to.rounds, strict=False))
    equal = of.per_turn == to.per_turn
    ours_ms, theirs_ms = ([turn.least_disturbed if equal else turn.median for turn in turns] for turns in zip(*rounds, strict=True))
    logs = log_ratios(ours_ms, theirs_ms)
    return interval(logs, np.array([max(ours.steal_share, theirs.steal_share) for ours, theirs in rounds]))


def measure(
    raced: Mapping[str, Contender], shape: tuple[int, int] | None, texts: int, warnings: Sequence[str] = ()
) -> Latency:
    """Return the figures of `stage` after a race, against `reference` and `parent` where they ran.

    `shape` is None for the mix, in which a sample is all `texts`. `warnings` are about the machine.
    """
    stage = raced["stage"]
    samples = stage.samples()
    p50, p90 = (float(value) for value in np.quantile(samples, [0.5, 0.9]))
    voided = []
    if stage.compiled > 0:
        voided.append(f"void: {stage.compiled} graphs were compiled while the clock ran")
    if stage.unfinished():
        voided.append("void: the device was still busy when the clock stopped; step() must wait for it")

    def against(role: str) -> Ratio | None:
        return compare(stage, raced[role]).ratio() if role in raced and not voided else None

    vs_reference = against("reference")
    width = (vs_reference.high - vs_reference.low) / vs_reference.ratio if vs_reference else 0.0
    every = [*voided, *warnings]
    if vs_reference and width > NOISY:
        every.append(f"the interval [{vs_reference.low:.3g}, {vs_reference.high:.3g}] of the ratio is too wide to trust: the machine is too noisy")
    return Latency(
        kind="shape" if shape else "mix", batch=shape[0] if shape else None, sequence=shape[1] if shape else None,
        n=len(samples) if shape else texts, p50_ms=p50, p90_ms=p90,
        p99_ms=float(np.quantile(samples, 0.99)) if len(samples) >= P99_SAMPLES else None,
        texts_per_s=(shape[0] if shape else texts) / (p50 / 1e3),
        vs_reference=vs_reference, vs_parent=against("parent" if "parent" in raced else "reference"),
        warning="; ".join(every) or None,
    )  # fmt: skip
