"""The chart of parity: each figure against its limit, on one logarithmic scale."""

from __future__ import annotations

from bertopt.report import formatting
from bertopt.report.limit_margins import Mark, marks
from bertopt.report.svg import WIDTH, Axis, Svg, log_axis
from bertopt.results import Report

_ROW, _GAP, _TOP = 22, 12, 46


def parity(report: Report, alone: bool = False) -> str | None:
    """Draw a dot for each figure that was measured and a tick for its limit."""
    groups = [(stage, each) for stage in report.stages if (each := marks(stage))]
    if not groups:
        return None
    svg = Svg(WIDTH, "Each stage's difference from the reference, against its limits")
    axis = log_axis([x for _, each in groups for mark in each for x in (mark.value, mark.limit) if x is not None], 375, 880)
    bottom = _TOP + _ROW * sum(len(each) for _, each in groups) + _GAP * (len(groups) - 1)
    svg.heads((0, "stage"), (250, "metric"), (375, "difference from the reference, log scale"), (980, "limit"))
    svg.text(965, 14, "measured", "head", end=True)
    svg.text(svg.width, 14, "to the limit", "head", end=True)
    axis.draw(svg, 40, bottom)
    y = float(_TOP)
    for number, (stage, each) in enumerate(groups):
        if number:
            svg.line(0, y - _GAP / 2, svg.width, y - _GAP / 2, "rule")
        svg.branch("", stage.name, y + 15, 235, stage.status == "failed")
        if stage.precision and len(each) > 1:
            svg.text(0, y + 15 + _ROW, stage.precision, "soft")
        for mark in each:
            _mark(svg, axis, mark, y, stage.status != "skipped")
            y += _ROW
        y += _GAP
    return svg.finish(bottom + 6, alone)


def _mark(svg: Svg, axis: Axis, mark: Mark, y: float, alarm: bool) -> None:
    middle = y + 11
    missed = ("bad", "bad strong", "over") if alarm else ("soft", "soft strong", "link")
    tone, kind, line = ("good", "", "room") if mark.held else missed
    if mark.limit is not None:
        svg.line(axis.at(mark.value), middle, axis.at(mark.limit), middle, line)
        svg.line(axis.at(mark.limit), middle - 7, axis.at(mark.limit), middle + 7, "limit")
        svg.text(980, y + 15, f"≤ {formatting.figure(mark.limit, 2)}", "soft")
    svg.dot(axis.at(mark.value), middle, tone if mark.limit is not None else "plain")
    svg.text(250, y + 15, mark.metric, "soft")
    svg.text(965, y + 15, formatting.figure(mark.value, 2), kind, end=True)
    svg.text(svg.width, y + 15, mark.room, kind or "soft", end=True)
