"""`bertopt export`, and what it shares with `bertopt optimize`: running a recipe and reporting how it went."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bertopt.cli.app import (
    SIGNALLED,
    Json,
    Junit,
    Override,
    Quick,
    RecipeName,
    Summary,
    Verbose,
    app,
    check_ci_files,
    ci_files,
    ci_files_of_errors,
    exit_codes,
    table,
    verdict,
)
from bertopt.errors import UsageError

if TYPE_CHECKING:
    from bertopt.results import Report

    Run = Callable[[Callable[[Report], None]], Report]


@app.command()
def export(
    recipe: RecipeName,
    out: Annotated[Path | None, typer.Option(help="Output directory; default out/<recipe's name>.")] = None,
    set_: Override = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the recipe and print its steps; load nothing.")
    ] = False,
    build_only: Annotated[
        bool, typer.Option("--build-only", help="Accept a stage that this machine can build but not run.")
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Build everything again; ignore the stages of earlier runs.")] = False,
    quick: Quick = False,
    json_: Json = False,
    junit: Junit = None,
    summary: Summary = None,
    verbose: Verbose = False,
) -> None:
    """Run a recipe: build, check and deliver."""
    with exit_codes(verbose, resumes=not dry_run):
        from bertopt.commands import recipes

        overrides = [*(set_ or ()), *(["timing.quick=true"] if quick else [])]
        if recipe.suffix and recipes.find(recipe) != recipe:
            print(f"note: there is no file '{recipe}' here; this is the shipped recipe {recipe.stem}", file=sys.stderr)
        if dry_run:
            if junit or summary:
                raise UsageError("--dry-run measures nothing to write with --junit or --summary; leave them out, its exit code says whether the recipe is right")
            _dry_run(recipe, overrides, json_)
            return
        from bertopt.commands.export import run

        where = out or Path("out") / recipe.stem
        report = watched(
            lambda listen: run(recipe, where, overrides, build_only, fresh, progress=True, listen=listen),
            where, junit, summary,
        )  # fmt: skip
        show(report, where, json_, verbose)
        raise typer.Exit(report.exit_code)


def watched(run: Run, where: Path, junit: Path | None = None, summary: Path | None = None) -> Report:
    """Run a recipe, and write the files for continuous integration, also of a run that an error or a signal ended."""
    check_ci_files(junit, summary)
    report: Report | None = None

    def keep(so_far: Report) -> None:
        nonlocal report
        report = so_far

    try:
        report = run(keep)
    except (Exception, *SIGNALLED) as error:
        if log := getattr(error, "log", ""):
            with contextlib.suppress(OSError):
                (where / "error.log").write_text(log, "utf-8")
        if report is None:
            with ci_files_of_errors(junit, summary, where):
                raise
        report.exit_code, report.reason = verdict(error)
        ci_files(junit, summary, report)
        raise
    ci_files(junit, summary, report)
    return report


def show(report: Report, where: Path, as_json: bool, verbose: bool) -> None:
    """Print the table or the JSON document; to stderr what was delivered, the warnings, and why the run failed."""
    if as_json:
        print(report.model_dump_json(by_alias=True))
    else:
        table(report)
    advice = "after noise, repeat on a calmer machine, or with larger timing.shape_s and timing.mix_s"
    print_warnings(report, f"{where / 'report.html'} lists all; {advice}")
    if report.delivered:
        print(
            f"{where / report.delivered.path} holds '{report.delivered.stage}'; report: {where / 'report.html'}",
            file=sys.stderr,
        )
    else:
        print(f"report: {where / 'report.html'}", file=sys.stderr)
    if report.exit_code == 1 or (verbose and report.exit_code):
        print(*(row.facts["log"] for row in report.stages if "log" in row.facts), sep="\n", file=sys.stderr)
    if report.exit_code:
        print(report.reason, file=sys.stderr)


def print_warnings(report: Report, advice: str) -> None:
    """Print the warnings of a report to stderr, and which timings are doubtful, with advice on them."""
    from bertopt.report.stage_details import doubtful_timings

    for warning in report.model.get("warnings", ()):
        print(f"warning: {warning}", file=sys.stderr)
    if found := doubtful_timings(report):
        print(f"warning: {found}; {advice}", file=sys.stderr)


def _dry_run(recipe: Path, overrides: Sequence[str], as_json: bool) -> None:
    import json

    from bertopt.commands import recipes
    from bertopt.commands.export import check_inputs, with_fitting_shapes
    from bertopt.modeling.source import examine_here
    from bertopt.recipe.parser import load
    from bertopt.system import machine

    checked = load(recipes.find(recipe), overrides)
    fields = examine_here(checked.model, checked.revision)
    checked = with_fitting_shapes(checked, fields)
    check_inputs(checked, fields)
    if fields is None:
        print(f"note: the model's config.json is not on this machine, so inputs is not checked against it ({checked.model})", file=sys.stderr)
    if checked.device == "cuda" and not machine.gpu_count():
        print(
            "warning: the recipe says device: cuda, and no NVIDIA device (/dev/nvidia0) is here: a run would end with exit code 4; "
            "run it where one is, or --set device=cpu",
            file=sys.stderr,
        )
    if as_json:
        print(json.dumps(checked.resolved()))
        return
    print(f"{recipe}: {checked.model} ({checked.task}) on {checked.device}")
    for step in checked.steps:
        takes, gives = (form.__name__ for form in step.pass_.forms())
        options = ", ".join(
            f"{key}={value}" for key, value in step.pass_.model_dump(mode="json", exclude_defaults=True).items()
        )
        print(f"  {step.name}: {step.pass_.name()}({options}) after {step.after or 'reference'}, {takes} → {gives}")
    print(f"  deliver: {checked.deliver}")
