"""A baseline and a candidate as a table: on the terminal and in markdown."""

from __future__ import annotations

from rich import box
from rich.table import Table
from rich.text import Text

from bertopt.report.diff import Change, Diff

HEADS = ("stage", "gate", "figure", "baseline", "candidate", "note")


def render(diff: Diff) -> Table:
    """One row a figure, regressions in red."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for head in HEADS:
        table.add_column(head, justify="right" if head in ("baseline", "candidate") else "left", overflow="fold")
    for change in diff.changes:
        table.add_row(*(Text(cell, "bold red" if change.regression else "") for cell in cells(change)))
    return table


def markdown(diff: Diff, only_regressions: bool = False) -> str:
    """The same cells as a GitHub table."""
    lines = [list(HEADS), [":--", ":--", ":--", "--:", "--:", ":--"]]
    for change in diff.regressions() if only_regressions else diff.changes:
        row = [escaped(cell) for cell in cells(change)]
        lines.append([f"**{row[0]}**", *row[1:]] if change.regression else row)
    return "".join(f"| {' | '.join(row)} |\n" for row in lines)


def cells(change: Change) -> list[str]:
    """The words of one row, in the order of HEADS."""
    note = f"REGRESSION: {change.regression}" if change.regression else change.note or ""
    return [change.stage, change.gate, change.what, _shown(change, change.before), _shown(change, change.after), note]


def escaped(text: str) -> str:
    """Plain text as markdown that shows it and nothing else, on one line."""
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in " ".join(text.split()))
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("\\", "\\\\")
    for mark in "|*`_[]#@":
        text = text.replace(mark, f"\\{mark}")
    return text


def _shown(change: Change, value: float | None) -> str:
    if value is None:
        return "–"
    if change.unit == "x":
        return f"{value:.2f}x"
    if change.unit == "ms":
        return f"{value:.2f} ms"
    return f"{value / 2**20:.1f} MiB" if change.unit == "bytes" else f"{value:.6g}"
