"""The estimate of how long a run still takes."""

from __future__ import annotations

from bertopt.pipeline.progress import Progress, TimeLeft


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_progress_is_its_words() -> None:
    progress = Progress("bf16: parity", 12.0)
    assert progress == "bf16: parity" and progress.seconds_left == 12.0
    assert Progress("starting").seconds_left is None


def test_time_left_is_estimated_from_the_stages_done() -> None:
    clock = Clock()
    left = TimeLeft(3, 10.0, clock)
    assert left.seconds() is None
    clock.seconds = 5.0
    left.reference_done()
    # Three steps of the reference's 5 s and 10 s of timing.
    assert left.seconds() == 45.0
    clock.seconds = 9.0
    assert left.seconds() == 41.0
    clock.seconds = 22.0
    assert left.seconds() == 34.0, "a first step of 17 s: the others will hardly take the 15 s of before"
    clock.seconds = 25.0
    left.step_done(counts=True)
    assert left.seconds() == 40.0
    left.step_done(counts=False)
    # A reused step says nothing about the next.
    assert left.seconds() == 20.0
    clock.seconds = 60.0
    assert left.seconds() == 0.0
    left.step_done(counts=True)
    assert left.seconds() == 0.0
