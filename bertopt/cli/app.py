"""What every command shares: the app, its options, exit codes, the table."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bertopt._version import __version__
from bertopt.errors import BertoptError

if TYPE_CHECKING:
    from bertopt.report.diff import Diff
    from bertopt.results import Report

app = typer.Typer(
    name="bertopt", no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False,
    help="Take a BERT-family checkpoint to the fastest artefact that is provably still the same model.",
)  # fmt: skip

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Show tracebacks.")]
Junit = Annotated[
    Path | None, typer.Option("--junit", metavar="FILE", help="Write JUnit XML, one case a stage and gate.")
]
Summary = Annotated[Path | None, typer.Option("--summary", metavar="FILE", help="Write a Markdown summary.")]
Directory = Annotated[Path, typer.Argument(help="An artefact or stage directory.", metavar="DIR")]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"bertopt {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@contextlib.contextmanager
def exit_codes(verbose: bool) -> Iterator[None]:
    """Errors become one clear last line and the right exit code; a traceback only for exit 1 or with -v."""
    try:
        yield
    except KeyboardInterrupt:
        print("interrupted; finished stages are kept, run again to go on", file=sys.stderr)
        raise typer.Exit(130) from None
    except BertoptError as error:
        if verbose:
            import traceback

            traceback.print_exc()
        if error.log:
            print(error.log, file=sys.stderr)
        print(error, file=sys.stderr)
        raise typer.Exit(error.exit_code) from None


def ci_files(junit: Path | None, summary: Path | None, report: Report | None, diff: Diff | None = None) -> None:
    """Write the files that `--junit` and `--summary` ask for."""
    if junit is not None:
        from bertopt.report import junit as xml

        xml.write(junit, report, diff)
    if summary is not None:
        from bertopt.report import markdown_summary as text

        text.write(summary, report, diff)


def table(report: Any) -> None:
    from bertopt.report.terminal import console, render

    console().print(render(report))
