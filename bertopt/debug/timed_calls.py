"""Time some calls of a session while a profiler records them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from bertopt.core import Session

if TYPE_CHECKING:
    from bertopt.core import Array

#: Calls before the clock starts; then calls until both least calls and least seconds are over.
WARM_UP, LEAST_RUNS, MOST_RUNS, LEAST_S = 3, 5, 30, 1.0


def call_times(session: Session, inputs: Mapping[str, Array]) -> list[float]:
    """Return milliseconds of some calls on `inputs`, after a few that are not measured."""
    session.load(inputs)
    warm_up(session)
    return timed(session.step)


def warm_up(session: Session) -> None:
    """Run what is not measured."""
    for _ in range(WARM_UP):
        session.step()


def timed(step: Callable[[], None]) -> list[float]:
    """Return milliseconds of some calls of `step`."""
    times: list[float] = []
    while len(times) < LEAST_RUNS or (len(times) < MOST_RUNS and sum(times) < 1000 * LEAST_S):
        start = time.perf_counter_ns()
        step()
        times.append((time.perf_counter_ns() - start) / 1e6)
    return times
