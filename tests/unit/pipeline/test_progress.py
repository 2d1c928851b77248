"""The estimate of how long a run still takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from bertopt import pipeline
from bertopt.pipeline.progress import ProgressCallback, TimeLeft
from bertopt.recipe.parser import Recipe, Step, from_dict
from bertopt.results import Report, Stage
from bertopt.spec import Spec


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


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


def test_the_sweeps_and_the_delivery_at_the_end_count_as_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run was said to end in 2 minutes that took 12: the checks of the stage to deliver were in no estimate."""
    clock, seen = Clock(), dict[str, float | None]()

    class EveryStep10s:
        stopped, unreached = "it", ()

        def __init__(self, recipe: Recipe, report: Report, store: object, workers: object, texts: object, budget: object, on_progress: ProgressCallback) -> None:
            self.report, self.on_progress = report, on_progress
            self.spec = Spec.model_construct(task="text-classification")
            report.model["warnings"] = []

        def _take(self, name: str) -> None:
            self.on_progress(f"{name}: building")
            clock.seconds += 10.0
            self.report.stages.append(Stage(index=0, name=name, status="ok"))

        def open_reference(self) -> None:
            self._take("reference")

        def run_step(self, step: Step) -> None:
            self._take(step.name)

        def warn(self, *texts: str) -> None:
            assert not texts

        def race_the_fastest(self) -> None:
            self.on_progress("it: latency beside another")

        def sweep(self) -> None:
            self.on_progress("it: every id and length")
            clock.seconds += 4.0

        def deliver(self, build_only: bool) -> None:
            self.on_progress("it: delivering")

    monkeypatch.setattr(pipeline, "Job", EveryStep10s)
    monkeypatch.setattr(pipeline, "TimeLeft", lambda steps, race_s: TimeLeft(steps, 0.0, clock))
    recipe = from_dict({"schema_version": 1, "model": "org/name", "steps": [{"pass": "use_sdpa"}, {"pass": "export_onnx"}]})

    def on_report(report: Report, doing: str | None, left_s: float | None) -> None:
        if doing is not None:
            seen[doing] = left_s

    pipeline.run(recipe, tmp_path / "out", on_report=on_report)
    assert seen["use_sdpa: building"] == 30.0 and seen["export_onnx: building"] == 20.0
    assert seen["it: every id and length"] == 10.0 and seen["it: delivering"] == 6.0
