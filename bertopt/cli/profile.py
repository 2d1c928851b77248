"""`bertopt profile`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bertopt.cli.app import Directory, Json, Key, Verbose, app, exit_codes, read_shapes
from bertopt.errors import UsageError

if TYPE_CHECKING:
    from bertopt.report.profile import Profile


@app.command()
def profile(
    directory: Directory,
    texts: Annotated[Path | None, typer.Option(help=".txt or .jsonl; the first 8 texts are one batch.")] = None,
    shape: Annotated[str | None, typer.Option(metavar="BxS", help="Batch and tokens of random input; without texts 8x128 by default.")] = None,
    attention: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Add the fp32 checkpoint's attention for this text to the page.")
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="CHECKPOINT", help="Checkpoint of --attention; default: the recipe's model.")
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with a picture of the times.")] = None,
    key: Key = None,
    json_: Json = False,
    verbose: Verbose = False,
) -> None:
    """Show where the time of one call goes. By encoder layer and by class of operator."""
    with exit_codes(verbose):
        if shape is not None and texts is not None:
            raise UsageError("give --shape or --texts, not both")
        sizes = read_shapes([] if shape is None else [shape])
        if attention is not None and html is None and not json_:
            raise UsageError("--attention is shown on the page; give --html FILE, or --json")
        from bertopt.commands.profile import profile as measure
        from bertopt.report import profile_page
        from bertopt.system import atomic_write

        if html is not None:
            atomic_write.check(html)

        found = measure(directory, texts, sizes[0] if sizes else None, attention, against, key)
        if html is not None:
            profile_page.write(found, html)
            print(f"page: {html}", file=sys.stderr)
        if json_:
            print(found.model_dump_json())
        elif html is None or not attention:
            _print(found)


def _print(found: Profile) -> None:
    from rich import box
    from rich.table import Table

    from bertopt.report.profile import BETWEEN
    from bertopt.report.terminal import console

    def table(head: str, sums: dict[str, float]) -> Table:
        table = Table(box=box.SIMPLE_HEAD)
        table.add_column(head)
        table.add_column("ms", justify="right")
        table.add_column("share", justify="right")
        for name, ms in [*sums.items(), (BETWEEN, found.between_ms), ("one call", found.wall_ms)]:
            table.add_row(name, f"{ms:.3f}", f"{ms / found.wall_ms:.1%}", style="bold" if name == "one call" else None)
        return table

    out = console()
    out.print(table("layer", found.by_layer()), table("operators", found.by_class()))
    for line in found.words():
        out.print(line, markup=False)
