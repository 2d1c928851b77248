"""`bertopt debug`: where a stage goes wrong, and what to keep in float32."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bertopt.cli.app import Json, Override, RecipeName, Verbose, app, exit_codes

if TYPE_CHECKING:
    from bertopt.debug.findings import DebugFindings, Row


@app.command()
def debug(
    recipe: RecipeName,
    stage: Annotated[str, typer.Option(help="The step to examine.", metavar="NAME")],
    out: Annotated[Path | None, typer.Option(help="The export's directory; default out/<recipe's name>.")] = None,
    set_: Override = None,
    json_: Json = False,
    verbose: Verbose = False,
) -> None:
    """Find the layer where an error appears. In reduced precision, also find which layers to keep in float32."""
    with exit_codes(verbose):
        from bertopt.commands import recipes
        from bertopt.commands.debug import debug as look
        from bertopt.recipe.parser import load

        checked = load(recipes.find(recipe), set_ or ())
        where = out or Path("out") / recipe.stem
        found = look(checked, where, stage, lambda doing: print(doing, file=sys.stderr, flush=True))
        if json_:
            print(found.model_dump_json())
            return
        _table(f"{found.stage} ({found.form}) beside the reference", found.layers, found.first_layer)
        if found.tensors:
            assert found.first_layer is not None
            _table(f"inside {found.first_layer.label}", found.tensors, found.first_tensor)
        for line in _words(found):
            print(line)


def _table(title: str, rows: list[Row], marked: Row | None) -> None:
    from rich import box
    from rich.table import Table

    from bertopt.report.terminal import console
    from bertopt.results import factor

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("where", "adds rel_l2", "max abs", "total rel_l2", "growth", "peak", "worst at"):
        table.add_column(column, justify="left" if column in ("where", "worst at") else "right", overflow="fold")
    for row in rows:
        growth = "" if row.growth is None else f"{factor(row.growth)}x"
        table.add_row(
            row.label, f"{row.own:.2e}", f"{row.max_abs:.2e}", f"{row.total:.2e}", growth, f"{row.peak:.3g}", _place(row),
            style="bold red" if row == marked else None,
        )  # fmt: skip
    console().print(table)


def _place(row: Row) -> str:
    token = "" if row.token is None else f", token {row.token}" + (f" {row.token_text!r}" if row.token_text else "")
    return f"row {row.row}{token}, element {row.element} ({row.probe})"


def _words(found: DebugFindings) -> list[str]:
    lines = [f"note: {note}" for note in found.notes]
    if found.first_layer is None:
        lines.append("no layer stands out: none adds far more error than the others")
    else:
        lines.append(f"the error jumps in: {found.first_layer.label}")
    if found.first_tensor is not None:
        row = found.first_tensor
        lines.append(f"first tensor: {row.label} ('{row.tensor}'), rel_l2 {row.own:.3g}, at {_place(row)}")
    if found.keep is not None:
        known = (
            "leave out any of them and it fails" if found.keep.minimal else "perhaps not the fewest: attempts ran out"
        )
        lines.append(
            f"in float32, {len(found.keep.names)} of its parts let the stage pass its limits "
            f"({found.keep.runs} attempts; {known}); the step to write:"
        )
        lines.append(found.keep.recipe.rstrip())
    return lines
