"""Estimate how much longer a run takes."""

from __future__ import annotations

import time
from collections.abc import Callable

#: Called with the current activity, such as `bf16: parity`, and with None when a row was added or the run has ended.
ProgressCallback = Callable[[str | None], None]


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
