"""`run(recipe, out)`: the loop. Build each step in a worker, commit it, examine it, hold it to its limits."""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bertopt import stages
from bertopt._version import __version__
from bertopt.checks import gates, probes
from bertopt.checks.parity import DEFAULT_LIMITS
from bertopt.core import Device, Spec
from bertopt.errors import BertoptError, ResourceError, Unsupported, UsageError
from bertopt.pipeline.examiner import Examiner
from bertopt.pipeline.race import Budget
from bertopt.pipeline.store import Store
from bertopt.recipe.parser import Recipe, Step
from bertopt.recipe.steps import REFERENCE
from bertopt.recipe.texts import Texts, read
from bertopt.results import Delivered, Limits, Report, Stage
from bertopt.stages import artifact
from bertopt.system import environment
from bertopt.workers.client import Workers

#: Called with the report so far and what is being done: 'quantize_int8: parity'.
Listener = Callable[[Report, str | None], None]


def run(
    recipe: Recipe, out: Path, build_only: bool = False, fresh: bool = False, listen: Listener | None = None
) -> Report:
    """Carry out `recipe` in the directory `out` and return the report, which is also written to `out/report.json`.

    Failures of a stage are rows of the report; UsageError, IntegrityError and the like end the run and are raised.
    """
    started = time.monotonic()
    texts = read(recipe.inputs.texts) if recipe.inputs.texts else Texts(tuple(probes.built_in_texts()))
    report = Report(bertopt_version=__version__, recipe=recipe.resolved(), environment=environment.describe(), model={})
    tell = _teller(report, listen)
    with disk_errors(), Store(out, fresh, tell) as store, Workers() as workers:
        tell("starting")
        job = _Job(recipe, report, store, workers, texts, tell)
        job.open_reference()
        for step in recipe.steps:
            job.take(step)
            report.wall_s = time.monotonic() - started
            store.write_report(report)
        job.deliver(build_only)
        report.wall_s = time.monotonic() - started
        store.write_report(report)
        store.prune()
        tell(None)
    return report


class _Job:
    """One run's state: which stage each step's name stands for, and whether the run has been stopped."""

    def __init__(self, recipe: Recipe, report: Report, store: Store, workers: Workers, texts: Texts, tell: Any) -> None:
        self.recipe, self.report, self.store, self.workers, self.texts, self.tell = (
            recipe,
            report,
            store,
            workers,
            texts,
            tell,
        )
        self.rows: dict[str, Stage] = {}
        self.paths: dict[str, Path] = {}
        #: A reverted stage's name stands for its parent from then on.
        self.stands_for: dict[str, str] = {REFERENCE: REFERENCE}
        #: The stage that each step's was built from.
        self.parents: dict[str, str] = {}
        self.stopped: str | None = None
        self.examiner: Examiner | None = None

    def open_reference(self) -> None:
        """Load the checkpoint, commit stage 00 and measure it. The device is settled here."""
        recipe, row = self.recipe, Stage(index=0, name=REFERENCE, status="ok", precision="float32", form="eager")
        with self.workers.start() as worker:
            self.tell(f"{REFERENCE}: loading {recipe.model}")
            cuda = worker.call("device")
            self.report.environment["cuda"] = cuda
            if recipe.device == "cuda" and not cuda["cuda"]:
                raise Unsupported(
                    "the recipe says device: cuda, but torch sees no CUDA GPU here; run it where one is, or --set device=cpu"
                )
            self.device: Device = "cuda" if cuda["cuda"] and recipe.device != "cpu" else "cpu"
            path, manifest, row.reused = self.store.reference(
                worker, recipe.model, recipe.task, recipe.revision, self.device
            )
        self.spec = Spec.model_validate(manifest["spec"])
        self.texts.check_labels(self.spec)
        self._check_limits()
        too_long = [shape for shape in recipe.inputs.shapes if shape[1] > self.spec.max_length]
        if too_long:
            raise UsageError(
                f"inputs.shapes: sequence must be at most the model's {self.spec.max_length} usable positions; got {list(too_long[0])}"
            )
        self.report.model = {
            "source": recipe.model, "revision": recipe.revision, "sha256": manifest["checkpoint_sha256"],
            "family": self.spec.family, "task": self.spec.task, "parameters": self.spec.parameters, "warnings": manifest["warnings"],
        }  # fmt: skip
        self._describe(row, path, manifest)
        machine = {"environment": environment.describe(), "cuda": self.report.environment["cuda"]}
        self.examiner = Examiner(
            self.workers,
            path,
            self.spec,
            self.device,
            recipe.inputs.shapes,
            self.texts,
            self.store.checks,
            machine,
            Budget.of(recipe.timing),
            self.tell,
        )
        self.examiner.examine(row, path, None, Limits(), None)
        self._add(row, path)

    def _check_limits(self) -> None:
        """A limit that nothing measures would hold by itself. Raises UsageError naming every one."""
        measured = self.texts.labels is not None and self.spec.task == "text-classification"
        stated = [(f"limits.{precision}", limits) for precision, limits in self.recipe.limits.items()]
        stated += [(f"step '{step.name}': limits", step.limits) for step in self.recipe.steps]
        wrong = [
            f"{where}: {problem}"
            for where, limits in stated
            for problem in gates.unmeasurable(limits, measured, self.spec.pooling is not None)
        ]
        if wrong:
            raise UsageError(*wrong)

    def take(self, step: Step) -> None:
        """Build, examine and judge one step; whatever happens becomes its row."""
        row = Stage(
            index=len(self.rows),
            name=step.name,
            pass_=step.pass_.name(),
            after=step.after or REFERENCE,
            status="skipped",
        )
        parent = self.stands_for[step.after or REFERENCE]
        if self.stopped:
            row.reason = f"the run stopped at '{self.stopped}'"
        elif self.rows[parent].status not in ("ok", "unverified"):
            row.reason = f"'{parent}', which it starts from, is {self.rows[parent].status}"
        else:
            self._try(step, row, parent)
        self.stands_for[step.name] = parent if row.status == "reverted" else step.name
        self._add(row, self.paths.get(step.name, Path()))

    def _try(self, step: Step, row: Stage, parent: str) -> None:
        self.parents[row.name] = parent
        try:
            self._build(step, row, parent)
        except Unsupported as error:
            row.status, row.reason = "unsupported", str(error)
            return
        except BertoptError as error:
            self._broke(step, row, error)
            return
        if not any(row.changes.values()) and not step.allow_noop:
            self._fail(step, row, "the pass changed nothing; remove the step, or say allow_noop: true", 3, "noop")
            return
        try:
            assert self.examiner is not None
            limits = self._limits(step, row)
            self.examiner.examine(row, self.paths[step.name], self.paths[parent], limits, step.timeout)
            if row.parity:
                row.parity.blame = gates.blame(self._line(row))
        except Unsupported as error:
            row.status, row.reason = "unverified", f"built, but not run: {error}"
            return
        except BertoptError as error:
            self._broke(step, row, error)
            return
        row.status = "ok"
        if reason := gates.settle(row, limits, self.recipe.waivers, datetime.date.today()):
            self._fail(step, row, reason, 3)
        elif not step.allow_noop and (reason := gates.noop(row)):
            self._fail(step, row, reason, 3, "noop")

    def _line(self, row: Stage) -> list[Stage]:
        """The rows from the checkpoint's child to this one."""
        parent = self.parents[row.name]
        return [*(self._line(self.rows[parent]) if parent != REFERENCE else ()), row]

    def _build(self, step: Step, row: Stage, parent: str) -> None:
        self.tell(f"{step.name}: building")
        with self.workers.start() as worker:
            path, manifest, row.reused = self.store.build(
                worker, step, self.paths[parent], self.device, self.recipe.inputs.shapes, self.texts
            )
        self.paths[step.name] = path
        self._describe(row, path, manifest)

    def _limits(self, step: Step, row: Stage) -> Limits:
        """The step's limits, over the recipe's for the precision, over the defaults."""
        assert row.precision is not None
        base = DEFAULT_LIMITS[row.precision]  # type: ignore[index]
        recipe = self.recipe.limits.get(row.precision, Limits())  # type: ignore[call-overload]
        return step.limits.over(recipe.over(base))

    def _broke(self, step: Step, row: Stage, error: BertoptError) -> None:
        if error.log:
            row.facts = {**row.facts, "log": error.log}
        self._fail(step, row, str(error), error.exit_code)

    def _fail(self, step: Step, row: Stage, reason: str, code: int, status: str = "failed") -> None:
        row.reason = reason
        if step.on_fail == "revert":
            row.status = "reverted"
            return
        row.status = status  # type: ignore[assignment]
        self.stopped = step.name
        self.report.exit_code, self.report.reason = (
            code,
            f"'{step.name}' {'changed nothing' if status == 'noop' else 'failed'}: {reason}",
        )

    def _describe(self, row: Stage, path: Path, manifest: dict[str, Any]) -> None:
        row.form, row.precision = manifest["form"], manifest["precision"]
        row.changes, row.build_s = manifest["changes"], manifest["build_s"]
        row.size_bytes, row.path = stages.size_bytes(manifest), str(path.relative_to(self.store.out))

    def _add(self, row: Stage, path: Path) -> None:
        self.rows[row.name], self.paths[row.name] = row, path
        self.report.stages.append(row)
        self.tell(None)

    def deliver(self, build_only: bool) -> None:
        """Ship the stage the recipe asks for, or say why not."""
        if self.examiner is not None:
            self.examiner.close()
        idle = gates.idle(self.recipe.waivers, self.report.stages)
        self.report.model["warnings"] = [*self.report.model["warnings"], *idle]
        if self.stopped:
            return
        name = self._chosen()
        row = self.rows[name]
        if row.status != "ok" and not (row.status == "unverified" and build_only):
            self.report.exit_code = 4
            remedy = "; --build-only accepts it" if row.status == "unverified" else ""
            self.report.reason = f"'{name}' is {row.status}: {row.reason}{remedy}"
            return
        self.tell(f"{name}: delivering")
        path = artifact.deliver(row, self.paths[name], self.report.recipe, self.store.out)
        self.report.delivered = Delivered(stage=name, path=str(path.relative_to(self.store.out)))

    def _chosen(self) -> str:
        if self.recipe.deliver == "last":
            return self.stands_for[self.recipe.steps[-1].name]
        if self.recipe.deliver != "fastest":
            return self.stands_for[self.recipe.deliver]

        def speed(row: Stage) -> float:
            mix = row.mix()
            return mix.vs_reference.ratio if mix and mix.vs_reference else 1.0

        return max((row for row in self.rows.values() if row.status == "ok"), key=speed).name


def _teller(report: Report, listen: Listener | None) -> Callable[[str | None], None]:
    return lambda doing: listen(report, doing) if listen else None


@contextlib.contextmanager
def disk_errors() -> Iterator[None]:
    """A full disk is a resource error, wherever it shows."""
    try:
        yield
    except OSError as error:
        if error.errno not in (28, 122):
            raise
        raise ResourceError(
            f"no space left on the disk ({error.filename or 'while writing'}); free some and run again"
        ) from error
