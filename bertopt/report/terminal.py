"""The report as a table: on the terminal, in markdown, and live while a run goes on."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from types import TracebackType
from typing import IO

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live as RichLive
from rich.measure import Measurement
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from bertopt.report.formatting import (
    NONE,
    NUMBERS,
    QUICK,
    Grid,
    Row,
    baselines,
    certificate,
    coverage,
    grid,
    head_to_head,
    is_quick,
    line,
    one_line,
    rounding,
)
from bertopt.report.formatting import notes as cell_notes
from bertopt.results import Report
from bertopt.results.coverage import SWEEPING

#: Columns that are left out, and whether cells are brief. The first layout that fits is taken; the last one wraps.
_LAYOUTS: tuple[tuple[tuple[str, ...], bool], ...] = (
    ((), False),
    (("changed",), False),
    (("changed",), True),
    (("changed", "size", "ms"), True),
    (("changed", "size", "ms", "quality", "rate"), True),
    (("changed", "size", "ms", "quality", "rate", "parity"), True),
)
_STATUS = {"ok": "green", "noop": "yellow", "failed": "bold red", "reverted": "yellow", "unsupported": "magenta",
           "unverified": "yellow", "skipped": "dim"}  # fmt: skip
_VERDICT = {"FASTER": "green", "SLOWER": "red", "INCONCLUSIVE": "yellow"}
_ASCII = str.maketrans(
    {"├": "|", "└": "`", "│": "|", "≤": "<=", "≥": ">=", "−": "-", "–": "-", "×": "x", "±": "", "→": "->"}
)
#: Columns where the output is no terminal: wide enough for every usual cell.
_PIPE_WIDTH = 160
#: A width below this is none: a terminal that nobody has sized has COLUMNS=0, for which rich prints nothing.
_LEAST_WIDTH = 10
#: Seconds without a line after which, where the output is no terminal, one says what is being done.
_SILENCE_S = 60.0


def render(report: Report) -> RenderableType:
    """Return the table: one row a stage, reasons and the delivered stage below; lesser columns go where it is narrow."""
    return _Fitted(report, _notes(report))


def console(stderr: bool = False, file: IO[str] | None = None) -> Console:
    """A console that does not squeeze tables into 80 columns when its output is a pipe or a file."""
    found = Console(stderr=stderr, file=file, highlight=False)
    if (not found.is_terminal and "COLUMNS" not in os.environ) or found.width < _LEAST_WIDTH:
        found.width = _PIPE_WIDTH
    return found


class _Fitted:
    """The table for the width of the console that prints it."""

    def __init__(self, report: Report, notes: Text | None) -> None:
        self._report, self._notes = report, notes

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        words, room = grid(self._report), options.max_width
        endless = options.update(max_width=10_000)
        for dropped, brief in _LAYOUTS:
            table = self._table(words, dropped, brief, options.ascii_only)
            if Measurement.get(console, endless, table).maximum <= room:
                break
        yield table
        if self._notes and self._notes.plain:
            notes = self._notes.copy()
            notes.plain = _plain(notes.plain, options.ascii_only)
            yield notes

    def _table(self, words: Grid, dropped: tuple[str, ...], brief: bool, ascii_only: bool) -> Table:
        keys = [key for key in words.heads if key not in dropped]
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for key in keys:
            number = key in NUMBERS
            table.add_column(
                _plain(words.heads[key], ascii_only), justify="right" if number else "left", overflow="fold",
                no_wrap=number or key == "status", min_width=12 if key in ("stage", "verdict") else None,
            )  # fmt: skip
        for row in words.rows:
            table.add_row(*(_cell(row, key, self._report, brief, ascii_only) for key in keys))
        return table


def _cell(row: Row, key: str, report: Report, brief: bool, ascii_only: bool) -> Text:
    text = _plain(row.brief.get(key, row.cells[key]) if brief else row.cells[key], ascii_only)
    if key == "stage":
        return Text(_plain(row.tree, ascii_only), "dim").append(text, "bold not dim" if report.delivers(row.stage) else "not dim")
    if key == "status":
        return Text(text, _STATUS[row.stage.status])
    if key == "parity" and row.missed:
        return Text(text, "bold red")
    if key == "verdict":
        return Text(text, next((style for word, style in _VERDICT.items() if text.startswith(word)), "dim"))
    return Text(text, "dim" if row.cells[key] == NONE else "")


def _notes(report: Report) -> Text:
    """Why stages are not ok, and what was delivered."""
    notes = Text()
    for stage in report.stages:
        for kind, words in cell_notes(stage):
            lead = stage.name if kind == "reason" else f"{stage.name}, {kind}"
            notes.append(f"{lead}: ", _STATUS[stage.status]).append(f"{one_line(words)}\n")
    if is_quick(report.recipe):
        notes.append("timing: ", "yellow").append(f"{QUICK}\n")
    if compared := baselines(report):
        notes.append("baselines: ", "bold").append(f"{compared}\n")
    if raced := head_to_head(report):
        notes.append("head to head: ", "bold").append(f"{raced}\n")
    if report.delivered:
        notes.append("delivered: ", "bold").append(f"{report.delivered.stage} → {report.delivered.path}\n")
        row = report.stage(report.delivered.stage)
        checked = [coverage(row.coverage)] if row.coverage else []
        checked += [rounding(row.rounding)] if row.rounding else []
        checked += [certificate(row.certificate)] if row.certificate and row.certificate.status == "certified" else []
        if checked:
            notes.append("checked: ", "bold").append(f"{'; '.join(checked)}\n")
    notes.rstrip()
    return notes


def _plain(text: str, ascii_only: bool) -> str:
    return text.translate(_ASCII).encode("ascii", "replace").decode() if ascii_only else text


def markdown(report: Report) -> str:
    """The same cells as a GitHub table."""
    words = grid(report)
    rules = ["--:" if key in NUMBERS else ":--" for key in words.heads]
    lines = [list(words.heads.values()), rules]
    for row in words.rows:
        cells = [_escaped(row.cells[key]) for key in words.heads]
        name = f"`{row.stage.name}`"
        if report.delivers(row.stage):
            name = f"**{name}**"
        cells[0] = row.tree.replace(" ", "\N{NO-BREAK SPACE}") + name
        lines.append(cells)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _escaped(text: str) -> str:
    text = one_line(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return text.replace("|", "\\|").replace("*", "\\*").replace("`", "\\`")


class Live:
    """Shows the table and the current activity on stderr during a run; without a terminal, one line for each stage and for long activities.

    On leaving, the live table is removed; the caller prints the final one.
    """

    def __init__(self, enabled: bool, on: Console | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self._console, self._now = on or console(stderr=True), now
        self._enabled = enabled
        self._told: dict[str, str] = {}
        self._table: RenderableType = ""
        self._doing: str | None = None
        self._left_s: float | None = None
        self._spinner = Spinner("dots")
        self._since = self._printed = now()
        self._live: RichLive | None = None
        if enabled and self._console.is_interactive:
            # Seldom, since drawing disturbs the timing.
            self._live = RichLive(
                console=self._console, get_renderable=self._draw, refresh_per_second=2, transient=True,
                redirect_stdout=False, redirect_stderr=False,
            )  # fmt: skip

    def __enter__(self) -> Live:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def update(self, report: Report, doing: str | None, left_s: float | None = None) -> None:
        """Show `report` as it stands, the current activity, such as `quantize_int8: parity`, and the estimated seconds until the run ends."""
        if doing != self._doing:
            self._doing, self._left_s, self._since = doing, left_s, self._now()
            if doing and self._enabled and not self._live:
                self._tell_doing(doing)
        if self._live:
            self._table = _Fitted(report, None)
            self._live.refresh()
        elif self._enabled:
            self._tell(report)

    def _draw(self) -> RenderableType:
        if self._doing is None:
            return self._table
        spent_s = self._now() - self._since
        left_s = (self._left_s or 0.0) - spent_s
        left = f", about {left_s:.0f} s left" if left_s >= 0.5 else ""
        self._spinner.update(text=Text(f"{self._doing}  {spent_s:.0f} s{left}"))
        return Group(self._table, self._spinner)

    def _tell_doing(self, doing: str) -> None:
        # Waiting, and the sweeps after the last stage, may take long without any other line.
        if doing.startswith("waiting ") or doing.endswith(SWEEPING):
            self._print(doing)
        elif self._now() - self._printed >= _SILENCE_S:
            # 0 where it takes longer than was estimated.
            self._print(f"{doing}, about {math.ceil(self._left_s / 60)} min left" if self._left_s else doing)

    def _tell(self, report: Report) -> None:
        busy = (self._doing or "").partition(":")[0]
        for row in grid(report).rows:
            name, status = row.stage.name, row.stage.status
            if name != busy and self._told.get(name) != status:
                self._told[name] = status
                self._print(_plain(line(row), self._console.options.ascii_only))

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        self._printed = self._now()
