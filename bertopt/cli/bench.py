"""`bertopt bench`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bertopt.cli.app import Json, Key, Verbose, app, exit_codes, read_shapes

if TYPE_CHECKING:
    from rich.table import Table

    from bertopt.commands.bench import Bench

Seconds = Annotated[float, typer.Option(min=0.1, help="Time limit of each comparison; longer runs resolve smaller differences.")]


@app.command()
def bench(
    directories: Annotated[list[Path], typer.Argument(help="Artefact or stage directories.", metavar="DIR")],
    shape: Annotated[
        list[str] | None, typer.Option(metavar="BxS", help="Batch and tokens, as 8x128; by default those of the first artefact's checks. Repeatable.")
    ] = None,
    texts: Annotated[Path | None, typer.Option(help=".txt or .jsonl texts for the end-to-end timing; by default built-in ones.")] = None,
    seconds: Seconds = 2.5,
    key: Key = None,
    processes: Annotated[int | None, typer.Option(min=1, hidden=True)] = None,
    json_: Json = False,
    verbose: Verbose = False,
) -> None:
    """Time artefacts beside each other. Calls are interleaved with those of the first one; nothing is checked."""
    with exit_codes(verbose):
        if processes is not None:
            print("--processes has no effect any more and will be an error; leave it out", file=sys.stderr)
        shapes = read_shapes(shape or ())
        from bertopt.commands.bench import bench as measure

        timed = measure(directories, texts, shapes, seconds, lambda doing: print(doing, file=sys.stderr), key)
        if json_:
            print(timed.model_dump_json())
            return
        from bertopt.report.terminal import console

        console().print(_table(timed))
        for row in timed.artefacts:
            for case in row.latency:
                if case.warning:
                    print(f"{row.directory}, {case.what}: {case.warning}", file=sys.stderr)


def _table(timings: Bench) -> Table:
    from rich import box
    from rich.table import Table

    from bertopt.report import formatting

    table = Table(box=box.SIMPLE_HEAD)
    for name in ("artefact", "form", "case"):
        table.add_column(name, overflow="fold")
    for name in ("p50 ms", "p90 ms", "texts/s"):
        table.add_column(name, justify="right")
    table.add_column("against the first")
    for row in timings.artefacts:
        for number, case in enumerate(row.latency):
            named = (row.directory, f"{row.form}, {row.precision}") if number == 0 else ("", "")
            versus = str(case.vs_reference) if case.vs_reference else formatting.NONE
            table.add_row(
                *named, case.what, formatting.figure(case.p50_ms), formatting.figure(case.p90_ms),
                formatting.count(case.texts_per_s), versus,
            )  # fmt: skip
    return table
