"""The waterfall of latency: each stage's step from where its parent was, as a share of the reference's time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bertopt.report import formatting
from bertopt.report.svg import WIDTH, Axis, Svg, share_axis
from bertopt.results import Latency, Ratio, Report, Stage

_BARS = {"FASTER": "gain", "SLOWER": "loss", "NO DIFFERENCE": "base", "INCONCLUSIVE": "unsure"}
_WORDS = {"FASTER": "good", "SLOWER": "bad", "INCONCLUSIVE": "warn"}
_ROW, _TOP, _MIDDLE = 32, 46, 13
#: Columns [px]: the bars from `_LEFT` to `_RIGHT`, figures that end at `_FIGURE`, the verdict from `_VERDICT`.
_LEFT, _RIGHT, _FIGURE, _VERDICT = 250, 710, 840, 856


@dataclass(frozen=True)
class _Step:
    """Shares of the reference's time: the parent's, the stage's, and the ends of its interval. The reference has no ratio."""

    begin: float
    end: float
    low: float
    high: float
    ratio: Ratio | None


def latency(report: Report, alone: bool = False) -> str | None:
    """Draw a waterfall: a bar from the parent's time to the stage's, as shares of the reference's.

    Both ends come from one race of the stage, its parent and the reference: the parent's is
    `vs_parent / vs_reference`, the stage's `1 / vs_reference`; the whiskers are the interval of `vs_parent`.
    """
    timed, what, mixed = _timed(report)
    if not timed:
        return None
    steps = {stage.name: _step(stage, case) for _, stage, case in timed}
    known = [step for step in steps.values() if step]
    # The ratios set the scale: one wide interval would press every bar to the left.
    most = max([1.0, *(x for step in known for x in (step.begin, step.end))])
    axis = share_axis(max(most, min(1.15 * most, max((step.high for step in known), default=1.0))), _LEFT, _RIGHT)
    svg = Svg(WIDTH, f"Time of each stage as a share of the reference's, {what}")
    svg.heads((0, "stage"), (_LEFT, f"time, the reference's = 100 %; {what}"), (_VERDICT, "step from its parent, 95 % interval"))
    svg.text(_FIGURE, 14, "texts/s" if mixed else "ms", "head", end=True)
    bottom = _TOP + _ROW * len(timed) - 4
    axis.draw(svg, 40, bottom)
    rows = {stage.name: _TOP + _ROW * i for i, (_, stage, _) in enumerate(timed)}
    _links(svg, axis, steps, rows, [stage for _, stage, _ in timed])
    for tree, stage, case in timed:
        y, failed = rows[stage.name], "" if stage.status == "ok" else f" ({stage.status})"
        svg.branch(tree, f"{stage.name}{failed}", y + 17, 240, stage.status == "failed")
        svg.text(_FIGURE, y + 17, formatting.count(case.texts_per_s) if mixed else f"{case.p50_ms:.2f}", "strong", end=True)
        _bar(svg, axis, y, steps[stage.name], "the reference" if stage.pass_ is None else "not raced")
    delivered = next((case.vs_reference for _, stage, case in timed if report.delivers(stage) and steps[stage.name]), None)
    if delivered is None:
        return svg.finish(bottom + 6, alone)
    y = bottom + 12
    svg.line(0, bottom + 4, svg.width, bottom + 4, "rule")
    svg.text(0, y + 17, "delivered, in all", "strong")
    svg.rect(axis.at(0), axis.at(1 / delivered.ratio), y + _MIDDLE - 7, 14, "best")
    axis.whisker(svg, 1 / delivered.high, 1 / delivered.low, y + _MIDDLE)
    svg.text(_VERDICT, y + 17, str(delivered), f"strong {_WORDS.get(delivered.verdict, 'soft')}")
    return svg.finish(y + _ROW, alone)


def _bar(svg: Svg, axis: Axis, y: float, step: _Step | None, otherwise: str) -> None:
    """Draw bar, whisker and verdict of one step; `otherwise` stands where there is no ratio."""
    if step is None or step.ratio is None:
        if step:
            svg.rect(axis.at(0), axis.at(step.end), y + _MIDDLE - 7, 14, "base")
        svg.text(_VERDICT, y + 17, otherwise, "soft")
        return
    svg.rect(axis.at(step.begin), axis.at(step.end), y + _MIDDLE - 7, 14, _BARS[step.ratio.verdict])
    axis.whisker(svg, step.low, step.high, y + _MIDDLE)
    svg.text(_VERDICT, y + 17, str(step.ratio), _WORDS.get(step.ratio.verdict, "soft"))


def _links(
    svg: Svg, axis: Axis, steps: Mapping[str, _Step | None], rows: Mapping[str, float], stages: Sequence[Stage]
) -> None:
    """Join the end of a parent's bar to its children's: how far off they begin is the noise between two races."""
    for stage in stages:
        if (above := steps.get(stage.after or "")) and (step := steps[stage.name]):
            x, top, bottom = axis.at(above.end), rows[stage.after or ""] + _MIDDLE + 7, rows[stage.name] + _MIDDLE - 7
            svg.line(x, top, x, bottom, "link")
            svg.line(x, bottom, axis.at(step.begin), bottom, "link")


def _step(stage: Stage, case: Latency) -> _Step | None:
    if stage.pass_ is None:
        return _Step(0, 1, 1, 1, None)
    whole, step = case.vs_reference, case.vs_parent
    if whole is None or step is None:
        return None
    if not all(0 < x < math.inf for x in (whole.low, whole.ratio, step.ratio, step.low, step.high)):
        return None
    begin = step.ratio / whole.ratio
    return _Step(begin, 1 / whole.ratio, begin / step.high, begin / step.low, step)


def _timed(report: Report) -> tuple[list[tuple[str, Stage, Latency]], str, bool]:
    """Each timed stage with the branch glyphs before its name and the case that is compared."""
    mixed = any(stage.mix() for stage in report.stages)
    shape = formatting.largest_shape(report)
    timed = [
        (tree, stage, case)
        for tree, stage in formatting.tree_order(report.stages)
        if (case := stage.mix() if mixed else formatting.shape_case(stage, shape))
    ]
    what = "real texts, tokenisation included" if mixed else f"batch {shape[0]} × {shape[1]}" if shape else ""
    return timed, what, mixed
