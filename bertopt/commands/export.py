"""`bertopt.run`: run a recipe and leave artefact and reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertopt.commands import recipes
from bertopt.errors import UsageError
from bertopt.modeling.config_checks import check_shapes, cut_shapes, labelling
from bertopt.modeling.source import examine, resolve
from bertopt.recipe.parser import Recipe, from_dict, load
from bertopt.recipe.texts import read

if TYPE_CHECKING:
    from bertopt.results import Report


def run(
    recipe: str | Path | Mapping[str, Any] | Recipe,
    out: str | Path | None = None,
    overrides: Sequence[str] = (),
    build_only: bool = False,
    fresh: bool = False,
    progress: bool = False,
    listen: Callable[[Report], None] | None = None,
) -> Report:
    """Run a recipe (a YAML file, the name of a shipped recipe, a dict of the same layout, or a Recipe) in `out`, by
    default `out/<its name>`.

    Leaves `report.json`, `report.html` and, where every gate holds, `artifact/`. A stage that fails is a row of the
    report and sets its `exit_code`; a mistake in the recipe raises UsageError with all mistakes. `overrides` are
    `steps.1.dtype=float16` and the like; `build_only` accepts a stage this machine cannot run; `fresh` forgets earlier
    stages; `progress` shows the live table on stderr. `listen` is called with the report whenever it changes, also
    with one that a raised error leaves unfinished.
    """
    from bertopt import pipeline
    from bertopt.report import html
    from bertopt.report.terminal import Live

    if isinstance(recipe, str | Path):
        name, checked = Path(recipe).stem, load(recipes.find(recipe), overrides)
    elif isinstance(recipe, Mapping):
        name, checked = "run", from_dict(dict(recipe), overrides=overrides)
    else:
        if not isinstance(recipe, Recipe):
            raise UsageError(f"a recipe must be a path, the name of a shipped one, a dict or a Recipe; got {type(recipe).__name__}")
        if overrides:
            raise UsageError("overrides go with a file or a dict; a Recipe is complete: build it as wanted")
        name, checked = "run", recipe
    target = Path(out) if out is not None else Path("out") / name
    # Before torch is imported: the small files show most unfit checkpoints.
    fields = examine(resolve(checked.model, checked.revision))
    checked = with_fitting_shapes(checked, fields)
    check_inputs(checked, fields)
    with Live(enabled=progress) as live:

        def on_report(report: Report, doing: str | None, left_s: float | None) -> None:
            live.update(report, doing, left_s)
            if listen:
                listen(report)

        report = pipeline.run(checked, target, build_only, fresh, on_report)
    with pipeline.disk_errors():
        html.write(report, target / "report.html")
    return report


def with_fitting_shapes(recipe: Recipe, fields: Mapping[str, Any] | None) -> Recipe:
    """Return the recipe with default shapes cut to the model's positions; stated shapes stay. `fields` as in `check_inputs`."""
    if fields is None or "shapes" in recipe.inputs.model_fields_set:
        return recipe
    inputs = recipe.inputs.model_copy(update={"shapes": cut_shapes(fields, recipe.inputs.shapes)})
    return recipe.model_copy(update={"inputs": inputs})


def check_inputs(recipe: Recipe, fields: Mapping[str, Any] | None) -> None:
    """Raise UsageError for shapes and texts that do not fit the model, as far as its config.json tells.

    `fields` are config.json's, None where it is not on this machine.
    """
    texts = read(recipe.inputs.texts) if recipe.inputs.texts else None
    if fields is None:
        return
    check_shapes(fields, recipe.inputs.shapes)
    if texts and (spec := labelling(fields, recipe.task)):
        texts.check_labels(spec)
