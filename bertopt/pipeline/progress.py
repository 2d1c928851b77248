"""Say what a run does now, and estimate how long it still takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Self

#: Called with what is being done, such as `bf16: parity`; with None where something is done.
ProgressCallback = Callable[[str | None], None]


class Progress(str):
    """What a run does now, such as `bf16: parity`, with the seconds that it still takes by estimate, None while unknown."""

    seconds_left: float | None

    def __new__(cls, doing: str, seconds_left: float | None = None) -> Self:
        progress = super().__new__(cls, doing)
        progress.seconds_left = seconds_left
        return progress


class TimeLeft:
    """Estimates a run's seconds from the stages done so far.

    `steps` are those of the recipe and one for the end of the run, `race_s` the seconds of one stage's timing: the reference,
    which has no opponent, is timed for less.
    """

    def __init__(self, steps: int, race_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self.steps, self.race_s, self.now = steps, race_s, now
        self._since = now()
        self._reference_s: float | None = None
        self._step_s: list[float] = []

    def reference_done(self) -> None:
        self._reference_s, self._since = self.now() - self._since, self.now()

    def step_done(self, counts: bool) -> None:
        """Go to the next step. The seconds of a step that was reused or skipped do not count."""
        if counts:
            self._step_s.append(self.now() - self._since)
        self.steps, self._since = self.steps - 1, self.now()

    def seconds(self) -> float | None:
        """Return the estimate, None until the reference was measured."""
        if self._reference_s is None:
            return None
        spent = self.now() - self._since
        # During the first step the reference runs what all are compared on, which may take longer than estimated: as long at least as until now.
        each = sum(self._step_s) / len(self._step_s) if self._step_s else max(self._reference_s + self.race_s, spent)
        current = max(0.0, each - spent) if self.steps else 0.0
        return current + each * max(0, self.steps - 1)
