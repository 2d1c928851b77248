"""One run over the steps of a recipe: build, verify, measure, judge and record each, then deliver."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

from bertopt import stages
from bertopt.checks import gates
from bertopt.checks.gates import GateOutcome
from bertopt.checks.measurements import StageMeasurements
from bertopt.core import Precision
from bertopt.errors import (
    BertoptError,
    IntegrityError,
    StepTimeout,
    Unsupported,
    UsageError,
    WorkerCrashed,
    WrongAnswer,
)
from bertopt.pipeline import baselines, clean_run, head_to_head, labelled, pass_errors, rows
from bertopt.pipeline.examiner import Examiner
from bertopt.pipeline.measurement_plan import MeasurementPlan
from bertopt.pipeline.own_texts import OWN_WORDS, fitting
from bertopt.pipeline.progress import ProgressCallback
from bertopt.pipeline.race import Budget
from bertopt.pipeline.rows import Done, StageBuild
from bertopt.pipeline.store import Store
from bertopt.recipe.parser import Recipe, Step
from bertopt.recipe.steps import REFERENCE
from bertopt.recipe.texts import Texts
from bertopt.results import Delivered, Limits, Report, Stage
from bertopt.runtime import replay
from bertopt.runtime.replay import Answers
from bertopt.stages import artifact
from bertopt.stages.signature import SIGNATURE
from bertopt.system import environment
from bertopt.workers.client import Workers


def gpu_conflict(recipe: Recipe, packages: Mapping[str, str]) -> str | None:
    """Return why the stage to deliver cannot run on a GPU with these packages, or None. `deliver: fastest` has a choice."""
    if (step := recipe.step(recipe.deliver)) is None:
        return None
    form = step.pass_.forms()[1].form
    if form == "onnx" and "onnxruntime-gpu" not in packages:
        return f"'{step.name}' needs onnxruntime-gpu; pip uninstall -y onnxruntime && pip install 'bertopt[gpu]'"
    return f"'{step.name}' is for a CPU" if form == "openvino" else None


class Job:
    """The state of one run: the outcome of each step so far, and the step that stopped the run, if any."""

    def __init__(
        self, recipe: Recipe, report: Report, store: Store, workers: Workers, texts: Texts, budget: Budget,
        on_progress: ProgressCallback,
    ) -> None:  # fmt: skip
        self.recipe, self.report, self.store, self.workers = recipe, report, store, workers
        self.texts, self.budget, self.on_progress = texts, budget, on_progress
        self.done: dict[str, Done] = {}
        self.stopped: str | None = None
        #: Steps that were not reached: their stages from earlier runs are kept.
        self.unreached: set[str] = set()

    def open_reference(self) -> None:
        """Choose the device, load the checkpoint, commit stage 00 and measure it."""
        recipe = self.recipe
        with self.workers.start() as worker:
            self.on_progress(f"{REFERENCE}: loading {recipe.model}")
            self.device, cuda = self.store.choose_device(worker, recipe.device)
            self.report.environment["cuda"] = cuda
            seen = f"torch sees {cuda['gpu']['name']}" if cuda["cuda"] else "torch sees no CUDA GPU"
            why = "the recipe says so" if recipe.device != "auto" else seen
            self.report.environment["device"] = f"{self.device}: {why}"
            if self.device == "cuda" and (missing := gpu_conflict(recipe, environment.versions())):
                raise Unsupported(f"'{recipe.device}' chose cuda, since {seen}, but {missing}; or --set device=cpu")
            stage = self.store.reference(worker, recipe.model, recipe.task, recipe.revision, self.device)
            self.texts = fitting(worker, stage.path, self.texts)
        path, manifest, self.spec = stage.path, stage.manifest, stage.manifest.spec
        self._check_inputs()
        self.report.model = {
            "source": recipe.model, "revision": recipe.revision, "commit": manifest.checkpoint_commit, "sha256": manifest.checkpoint_sha256,
            "family": self.spec.family, "task": self.spec.task, "parameters": self.spec.parameters, "warnings": [*manifest.warnings, *([OWN_WORDS] if self.texts.built_in else [])],
        }  # fmt: skip
        build = StageBuild.of(manifest, self._relative(path), stage.reused)
        machine = {"environment": environment.describe(), "cuda": self.report.environment["cuda"]}
        plan = MeasurementPlan.of(self.spec, recipe.inputs.shapes, self.texts, self.budget)
        self.examiner = Examiner(self.workers, path, self.device, plan, self.store.checks, machine, self.on_progress)
        measurements = self.examiner.measure(REFERENCE, path, None)
        row = rows.make(0, REFERENCE, GateOutcome("ok"), build, measurements)
        self._record(Done(row, REFERENCE, path=path))
        if self.device == "cuda":
            self.report.baselines, warnings = baselines.measure(self.workers, path, self.device, plan, self.examiner.records, self.on_progress)
            self.warn(*warnings)

    def _check_inputs(self) -> None:
        """Raise UsageError that names all labels, limits and shapes that do not fit the model.

        A limit on something that is not measured would always hold.
        """
        self.texts.check_labels(self.spec)
        measured = labelled.measurable(self.spec, self.texts)
        stated = [(f"limits.{precision}", limits) for precision, limits in self.recipe.limits.items()]
        stated += [(f"step '{step.name}': limits", step.limits) for step in self.recipe.steps]
        problems = [
            f"{where}: {problem}"
            for where, limits in stated
            for problem in gates.unmeasurable(limits, measured, self.spec.pooling is not None)
        ]
        problems += [
            f"inputs.shapes: sequence must be at most the model's {self.spec.max_length} usable positions; got {list(shape)}"
            for shape in self.recipe.inputs.shapes
            if shape[1] > self.spec.max_length
        ]
        if problems:
            raise UsageError(*problems)

    def run_step(self, step: Step) -> None:
        """Build, measure and judge one step; whatever happens becomes its row."""
        parent = self.done[step.after or REFERENCE].stage
        start = self.done[parent]
        if self.stopped or start.row.status not in ("ok", "unverified"):
            reason = f"'{parent}', which it starts from, is {start.row.status}"
            self.unreached.add(step.name)
            outcome = GateOutcome("skipped", f"the run stopped at '{self.stopped}'" if self.stopped else reason)
            self._record(Done(self._row(len(self.done), step, outcome), step.name, parent, exit_code=start.exit_code))
        else:
            self._record(self._run_step(step, start))

    def _run_step(self, step: Step, start: Done) -> Done:
        build, measurements, path = None, None, None
        assert start.path is not None
        try:
            build, path = self._build(step, start.path)
            reason = None if step.allow_noop else gates.noop_reason(build.changes)
            if reason:
                outcome = GateOutcome("noop", reason, gates.FAILED)
            else:
                with self.workers.calls_within(step.timeout):
                    measurements = self.examiner.measure(step.name, path, start.path)
                outcome = self._judge(step, start, build, measurements)
        except Unsupported as error:
            outcome = GateOutcome.of_error(error, "unverified" if build else "unsupported")
            if build:
                outcome = replace(outcome, reason=f"built, but not run: {error}")
        except BertoptError as error:
            outcome = GateOutcome.of_error(pass_errors.explained(error, step.pass_, start.path))
        outcome = self._handle_failure(step, outcome)
        stage = start.row.name if step.on_fail == "revert" and outcome.status in ("reverted", "unsupported") else step.name
        row = self._row(len(self.done), step, outcome, build, measurements)
        return Done(row, stage, start.row.name, path, outcome.exit_code, build)

    def _build(self, step: Step, parent: Path) -> tuple[StageBuild, Path]:
        """Build and commit the step, or find it committed; the store verifies either."""
        self.on_progress(f"{step.name}: building")
        with self.examiner.sweeping(), self.workers.start() as worker:
            stage = self.store.build(worker, step, parent, self.device, self.recipe.inputs.shapes, self.texts)
        return StageBuild.of(stage.manifest, self._relative(stage.path), stage.reused), stage.path

    def _judge(self, step: Step, start: Done, build: StageBuild, measurements: StageMeasurements) -> GateOutcome:
        precision = gates.judged_precision(build.precision, measurements.proven)
        limits = gates.effective_limits(precision, step.limits, self._stated(precision), peak=measurements.peak, sparse=self.examiner.spec.sparse)
        outcome = gates.judge(
            step.name, measurements, limits, changes=build.changes, today=datetime.date.today(), waivers=self.recipe.waivers,
            allow_noop=step.allow_noop, ancestors=self._added(start), size_bytes=build.size_bytes,
        )  # fmt: skip
        return replace(outcome, parity=self.examiner.show(outcome.parity)) if outcome.parity else outcome

    def _added(self, done: Done) -> dict[str, float]:
        """rel_l2 that each stage added to its parent's, from the checkpoint's child to this one."""
        before = self._added(self.done[done.parent]) if done.parent else {}
        parity = done.row.parity
        return before | ({done.row.name: parity.vs_parent.rel_l2} if parity and parity.vs_parent else {})

    def _handle_failure(self, step: Step, outcome: GateOutcome) -> GateOutcome:
        """Do what `on_fail` says. Damaged files always stop the run: another branch may start from them."""
        if outcome.status not in ("failed", "noop"):
            return outcome
        if step.on_fail == "revert" and outcome.exit_code != IntegrityError.exit_code:
            return replace(outcome, status="reverted")
        if step.on_fail == "skip" and outcome.exit_code != IntegrityError.exit_code:
            return replace(outcome, status="skipped", reason=f"on_fail: skip ended the branch here: {outcome.reason}")
        self.stopped = step.name
        how = "changed nothing" if outcome.status == "noop" else "failed"
        self.report.exit_code, self.report.reason = outcome.exit_code, f"'{step.name}' {how}: {outcome.reason}"
        return outcome

    def _row(
        self, index: int, step: Step, outcome: GateOutcome, build: StageBuild | None = None, measurements: StageMeasurements | None = None
    ) -> Stage:  # fmt: skip
        return rows.make(index, step.name, outcome, build, measurements, step.pass_.name(), step.after or REFERENCE)

    def _record(self, done: Done) -> None:
        self.done[done.row.name] = done
        self.report.stages.append(done.row)
        self.on_progress(None)

    def warn(self, *texts: str) -> None:
        """Add warnings to the report."""
        self.report.model["warnings"] = [*self.report.model["warnings"], *texts]

    def _relative(self, path: Path) -> str:
        return str(path.relative_to(self.store.out))

    def race_the_fastest(self) -> None:
        """With `deliver: fastest`, race the stages of which the races against the checkpoint leave open which is the fastest."""
        if not self.stopped and self.recipe.deliver == "fastest":
            self.report.head_to_head = head_to_head.run(self.examiner, list(self.done.values()), self.warn)

    def sweep(self) -> None:
        """Run all coverage sweeps over the stage to deliver. If it fails, do what its step says, and go on with the next choice."""
        swept = set[str]()
        while not self.stopped and (done := self._chosen()).row.coverage is not None and done.row.name not in swept:
            swept.add(done.row.name)
            if done.row.status == "ok":
                self._sweep(done)

    def _sweep(self, done: Done) -> None:
        step = self.recipe.step(done.row.name)
        assert step is not None and done.path is not None and done.parent is not None and done.build is not None
        start, measurements = self.done[done.parent], None
        assert start.path is not None
        try:
            with self.workers.calls_within(step.timeout):
                measurements = self.examiner.sweep(step.name, done.path, start.path)
            outcome = self._judge(step, start, done.build, measurements)
        except BertoptError as error:
            outcome = GateOutcome.of_error(pass_errors.explained(error, step.pass_, start.path))
        outcome = self._handle_failure(step, outcome)
        row = self._row(done.row.index, step, outcome, done.build, measurements)
        stage = start.row.name if outcome.status == "reverted" else step.name
        self.done[step.name] = replace(done, row=row, stage=stage, exit_code=outcome.exit_code)
        self.report.stages[row.index] = row
        if outcome.status != "ok":
            self.warn(f"'{step.name}' passed its own checks, but not every coverage sweep, which the stage to deliver runs: {outcome.reason}")
        self.on_progress(None)

    def deliver(self, build_only: bool) -> None:
        """Ship the stage the recipe asks for, or say why not."""
        self.examiner.close()
        self.warn(*gates.unused_waivers(self.recipe.waivers, self.report.stages))
        if self.stopped:
            return
        chosen = self._chosen()
        row, path = chosen.row, chosen.path
        if path is None or (row.status != "ok" and not (row.status == "unverified" and build_only)):
            remedy = "; --build-only accepts it" if row.status == "unverified" else ""
            self.report.exit_code = chosen.exit_code
            self.report.reason = f"'{row.name}' is to be delivered, but is {row.status}: {row.reason}{remedy}"
            return
        self._warn_of_speed(row)
        self.on_progress(f"{row.name}: delivering")
        signed = (self.store.out / "artifact" / SIGNATURE).exists()
        try:
            delivered = artifact.deliver(row, path, self.report.recipe, self.store.out, partial(self._run_copy, row, path))
        except (WrongAnswer, WorkerCrashed, StepTimeout) as error:
            self.report.exit_code, self.report.reason = error.exit_code, f"'{row.name}' is not delivered: {error}"
            if error.log:
                row.facts["log"] = error.log
            return
        self.report.delivered = Delivered(stage=row.name, path=self._relative(delivered))
        if signed:
            self.warn(f"the artefact before this one was signed, and this one is not yet: bertopt sign '{delivered}' --key FILE")

    def _warn_of_speed(self, row: Stage) -> None:
        """Add a warning where the delivered stage is the checkpoint itself, is slower than it, or was not timed validly."""
        step, slow = self.recipe.step(row.name), row.slow()
        limits = step.limits.over(self._stated(row.precision)) if step else Limits()
        if slow and limits.speedup_min is None:
            slow += "; `limits: {speedup_min: 1}` refuses such a stage, `deliver: fastest` chooses another"
        elif row.name == REFERENCE and self.recipe.deliver == "fastest":
            slow = "nothing faster passed: the reasons are beside the steps"
        if slow:
            self.warn(f"'{row.name}' is delivered, but {slow}")

    def _stated(self, precision: str | None) -> Limits:
        return self.recipe.limits.get(cast(Precision, precision), Limits())

    def _run_copy(self, row: Stage, stage: Path, part: Path) -> Answers | None:
        """Return the outputs of the artefact in `part` in a new interpreter, and check that they are its stage's when that was measured."""
        if row.status != "ok" or row.precision is None:
            return None
        expected = self.examiner.replayed[stage]
        assert expected is not None, "every stage answers when it is measured"
        found, warnings = clean_run.answers(part, self.device, row.form == "compiled", self.examiner.weights[stage])
        self.warn(*(f"'{row.name}' {warning}" for warning in warnings))
        for how, answers in found.items():
            replay.check(answers, expected, stages.read_manifest(part).precision, how)
        return next(iter(found.values()))

    def _chosen(self) -> Done:
        """The step that the recipe's `deliver` means."""
        if (step := self.recipe.step(self.recipe.deliver)) is not None:
            return self.done[self.done[step.name].stage]
        return head_to_head.fastest(self.done.values(), self.report.head_to_head)
