"""`bertopt compare`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bertopt.cli.app import (
    Json,
    Junit,
    Key,
    Summary,
    Verbose,
    app,
    check_ci_files,
    ci_files,
    ci_files_of_errors,
    exit_codes,
    say,
)

if TYPE_CHECKING:
    from bertopt.report.diff import Diff, Tolerances

LimitValues = Annotated[
    list[str] | None,
    typer.Option(
        "--limits", metavar="LIMIT=NUMBER", help="A parity limit in place of the baseline's: rel_l2=0.01. Repeatable."
    ),
]
Slower = Annotated[
    float, typer.Option(min=0, help="Largest tolerated loss of speed-up, as a share; a loss counts only if the 95 % intervals do not overlap.")
]
Bigger = Annotated[float, typer.Option(min=0, help="Largest tolerated growth of the size on disk, as a share.")]
Memory = Annotated[float, typer.Option(min=0, help="Largest tolerated growth of the peak memory, as a share.")]
QualityDrop = Annotated[float, typer.Option(min=0, help="Largest tolerated drop of the task metric.")]


@app.command()
def compare(
    baseline: Annotated[Path, typer.Argument(help="An artefact, or a report.json or its directory.", metavar="A")],
    candidate: Annotated[Path, typer.Argument(help="The same, compared with A.", metavar="B")],
    texts: Annotated[Path | None, typer.Option(help=".txt or .jsonl texts to compare two artefacts on; by default built-in ones.")] = None,
    limits: LimitValues = None,
    slower: Slower = 0.05,
    bigger: Bigger = 0.10,
    memory: Memory = 0.25,
    quality_drop: QualityDrop = 0.005,
    key: Key = None,
    against: Annotated[
        str | None,
        typer.Option(help="The checkpoint to compare B with too, as `verify` does: hub id, directory or pkg://.", metavar="CHECKPOINT"),
    ] = None,
    json_: Json = False,
    junit: Junit = None,
    summary: Summary = None,
    verbose: Verbose = False,
) -> None:
    """Compare two artefacts or two reports. Exit 3 if B is worse than A by more than is tolerated."""
    with exit_codes(verbose):
        from bertopt.commands.compare import compare as compare_with

        check_ci_files(junit, summary)
        with ci_files_of_errors(junit, summary, candidate):
            diff = compare_with(baseline, candidate, tolerances(limits, slower, bigger, memory, quality_drop), texts, say, key, against)
        ci_files(junit, summary, None, diff)
        if json_:
            print(diff.model_dump_json())
        else:
            show(diff)
        print(diff.reason, file=sys.stderr)
        raise typer.Exit(diff.exit_code)


def tolerances(
    values: list[str] | None, slower: float, bigger: float, memory: float, quality_drop: float
) -> Tolerances:
    from bertopt.commands.compare import limits
    from bertopt.report.diff import Tolerances

    return Tolerances(
        slower=slower, bigger=bigger, memory=memory, quality_drop=quality_drop, limits=limits(values or ())
    )


def show(diff: Diff) -> None:
    """The table, what was not compared, and the differences of environment."""
    from bertopt.report.diff_table import render
    from bertopt.report.terminal import console

    console().print(render(diff))
    for text in diff.not_compared:
        print(f"NOT compared: {text}")
    if diff.advice:
        print(f"to compare these too, {diff.advice}, or run: bertopt verify {diff.candidate} --against CHECKPOINT")
    for text in diff.environment:
        print(f"differs: {text}")
