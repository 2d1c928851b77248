"""Run a recipe: build each step in a worker, verify, measure, judge and record it, and deliver the result."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bertopt._version import __version__
from bertopt.pipeline import calibration_texts
from bertopt.pipeline.job import Job
from bertopt.pipeline.progress import TimeLeft
from bertopt.pipeline.race import Budget
from bertopt.pipeline.store import Store
from bertopt.recipe.parser import Recipe
from bertopt.recipe.texts import read_or_built_in
from bertopt.results import Report
from bertopt.system import disk_full, environment
from bertopt.workers.client import Workers

#: Exit code and reason in the report of a run that has not ended.
INTERRUPTED = 130
UNFINISHED = "this run has not ended, or was interrupted: nothing is delivered; run the same command again to continue"

#: Called with the report so far, the current activity, such as `quantize_int8: parity` (None after a row was added), and the estimated
#: seconds until the run ends (None while unknown).
ReportCallback = Callable[[Report, str | None, float | None], None]


def run(
    recipe: Recipe, out: Path, build_only: bool = False, fresh: bool = False, on_report: ReportCallback | None = None
) -> Report:
    """Run `recipe` in the directory `out` and return the report, which is also written to `out/report.json`.

    Failures of a stage are rows of the report; UsageError, IntegrityError and the like end the run and are raised.
    """
    started = time.monotonic()
    texts = read_or_built_in(recipe.inputs.texts)
    report = Report(bertopt_version=__version__, recipe=recipe.resolved(), environment=environment.describe(), model={})
    budget = Budget.of(recipe.timing)
    # One more: the sweeps over the stage to deliver, and its delivery, take about as long as a step.
    left = TimeLeft(len(recipe.steps) + 1, budget.total_s(len(recipe.inputs.shapes)))

    def on_progress(doing: str | None) -> None:
        if on_report:
            on_report(report, doing, left.seconds())

    def record(ended: bool = False) -> None:
        report.wall_s = time.monotonic() - started
        # The report that an interrupted run leaves must not look like one that passed.
        open_ = {} if ended or report.exit_code else {"exit_code": INTERRUPTED, "reason": UNFINISHED}
        store.write_report(report.model_copy(update=open_))

    with disk_errors(), Store(out, fresh, on_progress) as store, Workers() as workers:
        on_progress("starting")
        job = Job(recipe, report, store, workers, texts, budget, on_progress)
        job.open_reference()
        left.reference_done()
        for step in recipe.steps:
            job.run_step(step)
            row = report.stages[-1]
            left.step_done(counts=not row.reused and row.status != "skipped")
            record()
        job.warn(*calibration_texts.warnings(recipe.steps, report.stages, len(texts.asked(job.spec.task))))
        job.race_the_fastest()
        job.sweep()
        job.deliver(build_only)
        record(ended=True)
        if not job.stopped:
            store.prune(job.unreached)
        on_progress(None)
    return report


@contextlib.contextmanager
def disk_errors() -> Iterator[None]:
    """A full disk is a resource error, wherever it shows."""
    try:
        yield
    except OSError as error:
        if not disk_full.is_full(error):
            raise
        raise disk_full.resource_error(error) from error
