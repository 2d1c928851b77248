"""`bertopt report`: a finished run's report drawn again."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from bertopt.cli.app import Verbose, app, exit_codes, table


@app.command()
def report(
    source: Annotated[
        Path, typer.Argument(help="A report.json, or the directory that holds it.", metavar="REPORT")
    ] = Path(),
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write the report as one HTML page.")] = None,
    pictures: Annotated[
        Path | None, typer.Option("--pictures", metavar="DIR", help="Write charts of latency, parity and size.")
    ] = None,
    format_: Annotated[
        list[str] | None, typer.Option("--format", metavar="svg|png", help="Format of the charts; default svg. Repeatable.")
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Show a report again, as a table, a page or pictures. Runs nothing."""
    with exit_codes(verbose):
        from bertopt.commands.compare import read_report
        from bertopt.errors import UsageError

        if format_ and pictures is None:
            raise UsageError("--format applies to pictures; give --pictures DIR too")
        found = read_report(source)
        written: list[Path] = []
        try:
            if html is not None:
                from bertopt.report import html as pages

                html.parent.mkdir(parents=True, exist_ok=True)
                pages.write(found, html)
                written.append(html)
            if pictures is not None:
                from bertopt.report import charts

                written += charts.save(found, pictures, format_ or ("svg",))
        except FileExistsError:
            raise  # `exit_codes` says that it is no directory
        except OSError as error:
            raise UsageError(
                f"'{error.filename or html or pictures}' cannot be written ({error.strerror}); name another place"
            ) from error
        for path in written:
            print(path, file=sys.stderr)
        if not written:
            table(found)
            if found.exit_code and found.reason:
                print(found.reason, file=sys.stderr)
