"""A baseline and a candidate as a table: on the terminal and in markdown."""

from __future__ import annotations

from rich import box
from rich.table import Table
from rich.text import Text

from bertopt.report.diff import Change, Diff

HEADS = ("stage", "gate", "figure", "baseline", "candidate", "note")


def render(diff: Diff) -> Table:
    """Return one row for each stage with its status, one for each of its figures below, regressions in red."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for head in ("stage, figure", "baseline", "candidate", "note"):
        number = head in ("baseline", "candidate")
        table.add_column(head, justify="right" if number else "left", overflow="fold", no_wrap=number)
    stage = None
    for change in diff.changes:
        words, style = cells(change), "bold red" if change.regression else ""
        if change.gate == "status":
            words[2] = change.stage
        else:
            words[2] = f"  {change.what}{', speed-up' if change.unit == 'x' else ''}"
            if change.stage != stage:
                table.add_row(Text(change.stage, "bold"))
        stage = change.stage
        table.add_row(Text(words[2], style or ("bold" if change.gate == "status" else "")), *(Text(cell, style) for cell in words[3:]))
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
    return f"{value / 1e6:.1f} MB" if change.unit == "bytes" else f"{value:.6g}"
