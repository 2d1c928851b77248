"""`debug(recipe, out, stage)`: build what is missing of a stage's line, look into it in a worker, search what to keep."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bertopt import stages
from bertopt.checks import gates
from bertopt.commands.export import with_fitting_shapes
from bertopt.commands.minimal_set import Search
from bertopt.core import Compiled, Device, Eager, Onnx
from bertopt.debug import OPERATIONS
from bertopt.debug.findings import DebugFindings, Keep
from bertopt.errors import Unsupported, UsageError
from bertopt.modeling.source import examine, resolve
from bertopt.pipeline import disk_errors
from bertopt.pipeline.own_texts import fitting
from bertopt.pipeline.progress import ProgressCallback
from bertopt.pipeline.store import Store
from bertopt.recipe.parser import Recipe, Step
from bertopt.recipe.suggest import nearest
from bertopt.recipe.texts import Texts, read_or_built_in
from bertopt.results import Limits
from bertopt.system import temporary_directory
from bertopt.workers.client import Worker, Workers

#: Attempts at casting less; one takes about as long as the pass and its parity check.
RUNS = 80
#: Forms whose tensors can be compared with the reference's, layer by layer.
_INSPECTED = (Eager, Compiled, Onnx)


def debug(recipe: Recipe, out: Path, name: str, on_progress: ProgressCallback = lambda _: None) -> DebugFindings:
    """Look into the stage `name` of a run of `recipe` in `out`. Stages that are missing there are built.

    Raises UsageError for a name that is no step's, Unsupported for a form that cannot be looked into.
    """
    recipe = with_fitting_shapes(recipe, examine(resolve(recipe.model, recipe.revision)))
    row = _row(out, name)
    # Reverted ones are left out, as in the run.
    steps = [step for step in _line(recipe, name) if step.name == name or step.name not in row["reverted"]]
    _check_form(steps)
    texts = read_or_built_in(recipe.inputs.texts)
    with disk_errors(), Store(out, False, on_progress) as store, Workers() as workers:
        device, paths = _build(recipe, store, workers, steps, texts, on_progress)
        timeout = steps[-1].timeout
        # Ours, not the worker's: a worker is killed, and would leave it behind.
        with temporary_directory.make() as scratch, workers.start(OPERATIONS) as worker:
            on_progress(f"{name}: comparing with the reference")
            opened = {
                "line": [str(path) for path in paths], "device": device, "shapes": recipe.inputs.shapes,
                "texts": list(texts.asked(stages.read_manifest(paths[0]).spec.task)), "worst": (row.get("parity") or {}).get("worst", {}).get("where"),
                "scratch": scratch,
            }  # fmt: skip
            worker.call("debug", timeout=timeout, do="open", ask=opened)
            found = DebugFindings.model_validate(worker.call("debug", timeout=timeout, do="compare", ask={}))
            cast = next((i for i, step in enumerate(steps) if "keep_fp32" in type(step.pass_).model_fields), None)
            if cast is not None:
                limits = _limits(recipe, steps[-1], paths[-1], found.layers[-1].peak)
                try:
                    _search(found, worker, steps, cast, paths, limits, on_progress)
                except Unsupported as error:
                    found.notes.append(f"no search for what to keep in float32: {error}")
    return found


def _line(recipe: Recipe, name: str) -> list[Step]:
    """Return the steps from the checkpoint to the one called `name`. Raises UsageError where there is none."""
    by_name = {step.name: step for step in recipe.steps}
    if name not in by_name:
        raise UsageError(f"--stage must name a step of the recipe; got '{name}'{nearest(name, by_name)}")
    line = [by_name[name]]
    while line[0].after:
        line.insert(0, by_name[line[0].after])
    return line


def _check_form(steps: Sequence[Step]) -> None:
    """Raise Unsupported where the last step's form cannot be looked into, naming what can: building takes minutes."""
    *before, last = steps
    if any(step.pass_.name() == "pack_sequences" for step in steps):
        raise Unsupported(
            f"debug compares tensors of padded batches; the rows of '{last.name}' hold several texts: "
            "debug the same steps without pack_sequences"
        )
    if issubclass(form := last.pass_.forms()[1], _INSPECTED):
        return
    parent = next((step.name for step in reversed(before) if issubclass(step.pass_.forms()[1], _INSPECTED)), None)
    way = "it is built from the checkpoint itself; for its precision debug a stage of quantize_int8 or cast_half"
    if parent:
        way = f"--stage {parent}, which it is built from, can be debugged"
    raise Unsupported(f"debug looks inside torch and ONNX forms; '{last.name}' is {form.form}: {way}")


def _row(out: Path, name: str) -> dict[str, Any]:
    """The stage's row in the last report, and which stages were reverted there."""
    path = out / "report.json"
    try:
        rows = json.loads(path.read_text("utf-8"))["stages"] if path.is_file() else []
        mine: dict[str, Any] = next((dict(row) for row in rows if row["name"] == name), {})
        return {**mine, "reverted": [row["name"] for row in rows if row["status"] == "reverted"]}
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"'{path}' is not a report of bertopt; remove it, or give the --out of an export") from error


def _build(
    recipe: Recipe, store: Store, workers: Workers, steps: Sequence[Step], texts: Texts, on_progress: ProgressCallback
) -> tuple[Device, list[Path]]:
    """The committed stages from the reference to the last step."""
    with workers.start() as worker:
        on_progress(f"reference: loading {recipe.model}")
        device, _ = store.choose_device(worker, recipe.device)
        paths = [store.reference(worker, recipe.model, recipe.task, recipe.revision, device).path]
        texts = fitting(worker, paths[0], texts)
    for step in steps:
        on_progress(f"{step.name}: building")
        with workers.start() as worker:
            paths.append(store.build(worker, step, paths[-1], device, recipe.inputs.shapes, texts).path)
    return device, paths


def _limits(recipe: Recipe, step: Step, path: Path, peak: float) -> Limits:
    manifest = stages.read_manifest(path)
    stated = step.limits, recipe.limits.get(manifest.precision, Limits())
    return gates.effective_limits(manifest.precision, *stated, peak=peak, sparse=manifest.spec.sparse)


def _search(
    found: DebugFindings, worker: Worker, steps: Sequence[Step], cast: int, paths: Sequence[Path], limits: Limits, on_progress: ProgressCallback
) -> None:
    """Fill in `found.keep` for the step number `cast`, where the stage misses its limits and keeping some helps."""
    name, timeout = steps[-1].name, steps[-1].timeout
    records = [step.pass_.record().model_dump() for step in steps[cast:]]

    def call(do: str, **options: Any) -> Any:
        return worker.call("debug", timeout=timeout, do=do, ask=options)

    on_progress(f"{name}: measuring what is sensitive")
    call("search", parent=str(paths[cast]), records=records, limits=limits.model_dump())
    if not (failures := call("attempt", keep=[], every=True)):
        found.notes.append("the stage passes its parity limits: nothing to keep in float32")
        return
    units = call("units")
    count = 0

    def passes(keep: list[str]) -> bool:
        nonlocal count
        count += 1
        on_progress(f"{name}: attempt {count} of at most {RUNS}, {len(keep)} in float32")
        try:
            return not call("attempt", keep=keep, every=False)
        except Unsupported:
            return False

    search = Search(passes, RUNS)
    while True:
        minimal = search.flat(units) if isinstance(units, list) else search.tree(units)
        if search.best is None:
            found.notes.append(
                f"keeping everything in float32 does not help: {failures[0]}; the error is not the precision's"
            )
            return
        # The search looks at few probes; what it found must hold on all of them. A probe that fails joins the few.
        passed = not call("attempt", keep=search.best, every=True)
        if passed or count >= RUNS:
            break
        search = Search(passes, RUNS - count)
    if not passed:
        found.notes.append(f"no passing set was found in {count} attempts")
        return
    if call("on_cpu_half"):
        found.notes.append(
            "ONNX Runtime's CPU kernels compute much of float16 in float32: on a GPU more may be needed, search there too"
        )
    found.keep = Keep(names=search.best, runs=count, minimal=minimal, recipe=_lines(steps[cast], search.best))


def _lines(step: Step, keep: Sequence[str]) -> str:
    """The step as it should stand in the recipe."""
    import yaml

    entry: dict[str, Any] = {"pass": step.pass_.name()}
    entry |= {"name": step.name} if step.name != step.pass_.name() else {}
    entry |= {"after": step.after} if step.after else {}
    entry |= step.pass_.model_dump(mode="json", exclude_defaults=True)
    entry["keep_fp32"] = [*entry.get("keep_fp32", ()), *keep]
    written: str = yaml.safe_dump([entry], sort_keys=False, allow_unicode=True, default_flow_style=None, width=10_000)
    return written
