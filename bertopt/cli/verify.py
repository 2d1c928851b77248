"""`bertopt verify`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from bertopt.cli import compare
from bertopt.cli.app import (
    Directory,
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
    table,
    verdict_in_ci_files,
)
from bertopt.cli.compare import Bigger, LimitValues, Memory, QualityDrop, Slower
from bertopt.cli.export import print_warnings
from bertopt.errors import UsageError


@app.command()
def verify(
    directory: Directory,
    against: Annotated[
        str | None,
        typer.Option(help="The checkpoint to compare with: hub id, directory or pkg://.", metavar="CHECKPOINT"),
    ] = None,
    texts: Annotated[Path | None, typer.Option(help=".txt or .jsonl texts to compare on, beside the recipe's shapes.")] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(help="An earlier report: compare the figures with its delivered stage.", metavar="REPORT"),
    ] = None,
    key: Key = None,
    url: Annotated[
        str | None, typer.Option(help="A running server: compare its answers with those of the artefact here.", metavar="URL")
    ] = None,
    latency_ms: Annotated[float | None, typer.Option(help="With --url: limit of the 95th percentile of single requests [ms].")] = None,
    api_key: Annotated[str | None, typer.Option(help="With --url: the server's key.", envvar="BERTOPT_API_KEY", show_default=False)] = None,
    limits: LimitValues = None,
    slower: Slower = 0.05,
    bigger: Bigger = 0.10,
    memory: Memory = 0.25,
    quality_drop: QualityDrop = 0.005,
    json_: Json = False,
    junit: Junit = None,
    summary: Summary = None,
    verbose: Verbose = False,
) -> None:
    """Check an artefact again on this machine.

    Checks files, environment and the recorded outputs. --against also checks parity and times the model; --baseline compares
    all of it with an earlier report, by --limits, --slower, --bigger, --memory and --quality-drop.
    """
    with exit_codes(verbose):
        from bertopt.commands.verify import verify as check

        if url is not None:
            if against is not None or baseline is not None or key is not None:
                raise UsageError("--url compares a server with the artefact here; give --against, --baseline or --key in a separate call")
            _verify_url(directory, url, texts, latency_ms, api_key, json_, junit, summary)
        if latency_ms is not None:
            raise UsageError("--latency-ms limits a running server; give it with --url URL")
        tolerated = compare.tolerances(limits, slower, bigger, memory, quality_drop)
        if baseline is not None:
            from bertopt.commands.compare import with_baseline

            against = _checkpoint(baseline, against)
        if texts is not None and against is None:
            raise UsageError("--texts needs a checkpoint to compare with; give --against CHECKPOINT too, or a --baseline that names one")
        check_ci_files(junit, summary)
        with ci_files_of_errors(junit, summary, directory):
            report = check(directory, against, texts, key, say)
            diff = with_baseline(report, baseline, tolerated) if baseline is not None and report.stages else None
        if diff is not None:
            report.model["comparison"] = diff.model_dump(mode="json")
            if diff.exit_code and not report.exit_code:
                report.exit_code, report.reason = diff.exit_code, diff.reason
        ci_files(junit, summary, report, diff)
        if json_:
            print(report.model_dump_json(by_alias=True))
        elif report.stages:
            table(report)
        if diff is not None and not json_:
            compare.show(diff)
        print_warnings(report, "after noise, repeat on a calmer machine")
        print(report.reason, file=sys.stderr if report.exit_code or json_ else sys.stdout)
        raise typer.Exit(report.exit_code)


def _verify_url(
    directory: Path, url: str, texts: Path | None, latency_ms: float | None, api_key: str | None, json_: bool,
    junit: Path | None, summary: Path | None,
) -> NoReturn:  # fmt: skip
    """Print what a running server answers beside the artefact. Always raises typer.Exit."""
    from bertopt.commands.verify_url import verify_url

    check_ci_files(junit, summary)
    with ci_files_of_errors(junit, summary, url):
        done = verify_url(directory, url, texts, latency_ms, api_key)
    verdict_in_ci_files(junit, summary, url, done.exit_code, done.reason)
    if json_:
        print(done.model_dump_json())
    print(done.reason, file=sys.stderr if done.exit_code or json_ else sys.stdout)
    raise typer.Exit(done.exit_code)


def _checkpoint(baseline: Path, against: str | None) -> str:
    """Return `against`, or the checkpoint that a report names. Raises UsageError where it delivered nothing, or names none."""
    from bertopt.commands.compare import delivered, read_report

    before = read_report(baseline)
    delivered(before, baseline)
    if not (source := against or before.model.get("source")):
        raise UsageError(f"'{baseline}' names no checkpoint; give it with --against CHECKPOINT")
    return str(source)
