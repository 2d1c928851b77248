"""Latency: contenders timed in interleaved rounds in random order, so that a drifting machine hits all alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from bertopt.results import Latency, Ratio

if TYPE_CHECKING:
    from bertopt.core import Array

#: Fewest samples for which a p99 says anything.
P99_SAMPLES = 5000
RESAMPLES = 2000
MIN_ROUNDS, MAX_ROUNDS = 7, 40
#: Width of an interval, as a share of its ratio, from which a figure carries a warning.
NOISY = 0.25
#: Each turn of a contender lasts about this long, so that what wakes it up is small beside it.
TURN_MS = 20.0


@dataclass
class Contender:
    """Something to time: `turn(n)` runs n times without a break and gives milliseconds of each."""

    name: str
    turn: Callable[[int], list[float]]
    wake: Callable[[], None] = lambda: None
    sleep: Callable[[], None] = lambda: None
    #: How many graphs the runtime has compiled so far; one more while the clock ran voids the figures.
    graphs: Callable[[], int] = lambda: 0
    per_turn: int = 1
    compiled: int = 0
    rounds: list[list[float]] = field(default_factory=list)

    def samples(self) -> Array:
        return np.concatenate([np.asarray(taken) for taken in self.rounds])

    def medians(self) -> Array:
        return np.array([np.median(taken) for taken in self.rounds])


def race(contenders: Sequence[Contender], budget_s: float, seed: int = 0) -> None:
    """Time all contenders in turn, in a new random order each round, until the budget is spent.

    The first turns of each warm it up and are not kept. All others sleep meanwhile.
    """
    rng = np.random.default_rng(seed)
    start = time.monotonic()
    for contender in contenders:
        contender.wake()
        (once,) = contender.turn(1)
        if once < 5 * TURN_MS:
            # The first run pays for allocations; measure a short one again.
            (once,) = contender.turn(1)
        contender.per_turn = max(1, min(100, int(TURN_MS / max(once, 0.01))))
        contender.compiled = -contender.graphs()
        contender.sleep()
    # Alone there is nothing to compare, so no interval to narrow.
    fewest = MIN_ROUNDS if len(contenders) > 1 else 3
    for done in range(MAX_ROUNDS):
        if done >= fewest and time.monotonic() - start > budget_s:
            break
        for i in rng.permutation(len(contenders)):
            contender = contenders[i]
            contender.wake()
            contender.rounds.append(contender.turn(contender.per_turn))
            contender.sleep()
    for contender in contenders:
        contender.wake()
        contender.compiled += contender.graphs()
        contender.sleep()


def ratio(of: Contender, to: Contender, seed: int = 0) -> Ratio:
    """How many times faster `of` is than `to`: the ratio of their median round medians, with the 2.5 % and 97.5 %
    quantiles over bootstrap resamples of whole rounds (paired, since a round shares the machine's mood)."""
    mine, theirs = of.medians(), to.medians()
    rng = np.random.default_rng(seed)
    # Few rounds understate their own spread: widen as Student's t does, by its expansion in 1/df (Fisher and Cornish).
    z, df = 1.96, len(mine) - 1
    student = z + (z**3 + z) / (4 * df) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)
    widen = student / z * (len(mine) / df) ** 0.5
    picks = rng.integers(0, len(mine), (RESAMPLES, len(mine)))
    ratios = np.median(theirs[picks], axis=1) / np.median(mine[picks], axis=1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    middle = float(np.median(theirs) / np.median(mine))
    return Ratio(ratio=middle, low=middle - widen * (middle - float(low)), high=middle + widen * (float(high) - middle))


def measure(
    contender: Contender,
    shape: tuple[int, int] | None,
    texts: int,
    reference: Contender | None,
    parent: Contender | None,
) -> Latency:
    """The figures of one contender after a race. `shape` is None for the mix, in which a sample is all `texts`."""
    samples = contender.samples()
    p50, p90 = (float(value) for value in np.quantile(samples, [0.5, 0.9]))
    void = contender.compiled > 0
    vs_reference = ratio(contender, reference) if reference and not void else None
    spread = (vs_reference.high - vs_reference.low) / vs_reference.ratio if vs_reference else 0.0
    warning = None
    if void:
        warning = f"void: {contender.compiled} graphs were compiled while the clock ran"
    elif spread > NOISY:
        warning = f"the interval is {spread:.0%} of the ratio: the machine is too noisy to trust it"
    return Latency(
        kind="shape" if shape else "mix", batch=shape[0] if shape else None, sequence=shape[1] if shape else None,
        n=len(samples) if shape else texts, p50_ms=p50, p90_ms=p90,
        p99_ms=float(np.quantile(samples, 0.99)) if len(samples) >= P99_SAMPLES else None,
        texts_per_s=(shape[0] if shape else texts) / (p50 / 1e3),
        vs_reference=vs_reference, vs_parent=ratio(contender, parent) if parent and not void else None,
        warning=warning,
    )  # fmt: skip
