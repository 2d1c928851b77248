"""The cost of running a batch, in units of one token's time, by which rows and batches are planned."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bertopt.core import Session, Spec
from bertopt.modeling import packing
from bertopt.runtime.batch_limits import BatchLimits
from bertopt.system import out_of_memory

if TYPE_CHECKING:
    from bertopt.core import Array

#: Shapes [B, S] timed: a small one, one of many tokens, and as many tokens in longer rows, whose attention costs more.
SMALL, WIDE, LONG = (2, 16), (8, 32), (1, 256)
#: They are timed in turn until each has taken ENOUGH_S in all, at least FEWEST and at most MOST times.
ENOUGH_S, FEWEST, MOST = 0.05, 4, 12
#: Most tokens that a call may cost: a larger result means a disturbed measurement. (On a GPU it may cost more, but batches are full there.)
HIGHEST_CALL = 512.0
#: Seconds of work in Python for one batch that `Session.run_all` does not include (arrays, answers).
AROUND_S = 1e-4


#: On a GPU, rows of this many tokens double in number until a call takes GROWN times as long as the first; each is timed LAUNCHED_RUNS times.
LAUNCHED_LENGTH, GROWN, LAUNCHED_RUNS = 128, 3.0, 4


@dataclass(frozen=True)
class Costs:
    """A batch of R rows with L tokens each costs `call` + max(`launch`, R (L + `pair` L²)) tokens. A batch has at most `tokens_max` tokens
    if the device's memory sets a limit."""

    call: float = 64.0
    pair: float = 0.0
    launch: float = 0.0
    tokens_max: int | None = None

    def batch(self, rows: Any, length: Any) -> Any:
        """Return the cost of `rows` rows of `length` tokens, in tokens: numbers, or arrays of one shape."""
        work = rows * (length + self.pair * length * length)
        return self.call + (np.maximum(work, self.launch) if self.launch else work)


def expected(spec: Spec) -> Costs:
    """Return estimated costs. A layer does about 24 H² operations for a token and 4 H for each pair of tokens in attention (Hoffmann et al.
    2022, appendix F)."""
    return Costs(pair=1 / (6 * spec.hidden))


def measure(session: Session, spec: Spec, limits: BatchLimits) -> Costs:
    """Time `session` (which takes `spec.network_inputs`) on a few shapes, with a batch on every stream.

    Where the times are implausible, as on a busy machine, `expected` is used instead.
    """
    return _measure_launched(session, spec, limits) if session.asynchronous else _measure(session, spec, limits)


def _measure(session: Session, spec: Spec, limits: BatchLimits) -> Costs:
    """Time three shapes, which takes about as long as 2,000 tokens on each stream."""
    known = expected(spec)
    lengths = [min(s, limits.length, spec.max_length) for _, s in (SMALL, WIDE, LONG)]
    shapes = [(min(b, limits.most_rows(s)), s) for (b, _), s in zip((SMALL, WIDE, LONG), lengths, strict=True)]
    seconds = _seconds(session, spec, shapes)
    # Seconds of a call, of a token, and of a pair of tokens in a row.
    terms = np.array([[1, b * s, b * s * s] for b, s in shapes], float)
    if np.linalg.matrix_rank(terms) == 3:
        call, token, pair = np.linalg.solve(terms, seconds)
    elif shapes[0] != shapes[1]:
        pairless = np.stack([terms[:2, 0], terms[:2, 1] + known.pair * terms[:2, 2]], axis=1)
        call, token = np.linalg.solve(pairless, seconds[:2])
        pair = known.pair * token
    else:
        return known
    if token <= 0:
        return known
    return Costs(
        call=float(np.clip((call + AROUND_S) / token, 0, HIGHEST_CALL)),
        pair=float(np.clip(pair / token, known.pair / 4, known.pair * 16)),
    )


def _measure_launched(session: Session, spec: Spec, limits: BatchLimits) -> Costs:
    """Time growing batches on a GPU, where a call takes as long as the launch or the work, whichever is longer, until the time grows with the
    batch, the limits are reached or memory runs out. If the time never grows, a launch counts as much as a full batch."""
    pair = expected(spec).pair
    length = min(LAUNCHED_LENGTH, limits.length, spec.max_length)
    tokens: list[int] = []
    seconds: list[float] = []
    rows, tokens_max = 1, None
    while rows <= limits.most_rows(length) and rows * length <= limits.tokens:
        try:
            seconds.append(_shortest(session, spec, (rows, length)))
        except Exception as error:
            if not tokens or not out_of_memory.ended(error):
                raise
            tokens_max = tokens[-1]
            break
        tokens.append(rows * length)
        if seconds[-1] >= GROWN * seconds[0]:
            break
        rows *= 2
    grown = len(seconds) > 1 and seconds[-1] >= GROWN / 2 * seconds[0]
    token = (seconds[-1] - seconds[-2]) / (tokens[-1] - tokens[-2]) if grown else 0.0
    launch = seconds[0] / token if token > 0 else float(tokens[-1])
    return Costs(call=0.0, pair=pair, launch=launch, tokens_max=tokens_max)


def _shortest(session: Session, spec: Spec, shape: tuple[int, int]) -> float:
    """Return the shortest time [s] of one batch of `shape` after a run to warm up."""
    inputs = packing.random_rows(spec, *shape, np.random.default_rng(0))
    times = []
    for _ in range(1 + LAUNCHED_RUNS):
        start = time.perf_counter()
        session.run(inputs)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def _seconds(session: Session, spec: Spec, shapes: Sequence[tuple[int, int]]) -> Array:
    """Return the shortest time of each shape [B, S], on random texts that fill it, after one run to warm up.

    Shapes take turns, as in real calls, since runtimes may plan memory again for each new shape."""
    rng = np.random.default_rng(0)
    best, spent = np.full(len(shapes), np.inf), np.zeros(len(shapes))
    for number in range(MOST + 1):
        for place, shape in enumerate(shapes):
            inputs = [packing.random_rows(spec, *shape, rng) for _ in range(session.streams)]
            start = time.perf_counter()
            for _ in session.run_all(inputs):
                pass
            taken = time.perf_counter() - start
            if number:
                best[place], spent[place] = min(best[place], taken), spent[place] + taken
        if number >= FEWEST and spent.min() >= ENOUGH_S:
            break
    return best
