"""The report's pictures: latency, parity and size of every stage, for the page and as files."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bertopt.errors import Unsupported, UsageError
from bertopt.report import formatting
from bertopt.report.limit_margins import Mark, marks
from bertopt.report.svg import Axis, Svg, log_axis, share_axis
from bertopt.results import Latency, Ratio, Report, Stage

#: Natural widths in pixels: beside each other, and with the name above the bar, as on a phone.
WIDE, NARROW = 1160, 340
FORMATS = ("svg", "png")
_TONES = {"FASTER": "gain", "SLOWER": "loss", "NO DIFFERENCE": "base", "INCONCLUSIVE": "unsure"}
_WORDS = {"FASTER": "good", "SLOWER": "bad", "INCONCLUSIVE": "warn"}


def save(report: Report, directory: Path, formats: Sequence[str] = ("svg",)) -> list[Path]:
    """Write `latency`, `parity` and `size`, each that has figures, in every format; the paths written.

    Raises UsageError for an unknown format or where nothing was measured, Unsupported where PNG lacks its package.
    """
    strange = [name for name in formats if name not in FORMATS]
    if strange or not formats:
        raise UsageError(f"pictures are {' or '.join(FORMATS)}; got {', '.join(strange) or 'no format'}")
    drawn = {name: draw(report, True, True) for name, draw in PICTURES.items()}
    pictures = {name: text for name, text in drawn.items() if text is not None}
    if not pictures:
        raise UsageError("the report has no stage with latency, parity or size; there is nothing to draw")
    files = {f"{name}.{kind}": _as(kind, text) for name, text in pictures.items() for kind in formats}
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name).write_bytes(content)
    return [directory / name for name in files]


def _as(kind: str, text: str) -> bytes:
    if kind == "svg":
        return text.encode("utf-8", "backslashreplace")
    try:
        import resvg_py
    except ImportError as error:
        raise Unsupported("PNG pictures need resvg-py: pip install 'bertopt[pictures]'; SVG needs nothing") from error
    return bytes(resvg_py.svg_to_bytes(svg_string=text, zoom=2))


def latency(report: Report, wide: bool, alone: bool = False) -> str | None:
    """A waterfall: each stage's step from where its parent was, as a share of the reference's time.

    Both ends come from one race of the stage, its parent and the reference: the parent's is
    `vs_parent / vs_reference`, the stage's `1 / vs_reference`; the whiskers are the interval of `vs_parent`.
    """
    timed, what, mixed = _timed(report)
    if not timed:
        return None
    steps = {stage.name: _step(stage, case) for _, stage, case in timed}
    largest = max([1.0, *(x for step in steps.values() if step for x in (step.begin, step.high, step.end))])
    svg = Svg(WIDE if wide else NARROW, f"Time of each stage as a share of the reference's, {what}")
    row, left, right = (32, 250, 770) if wide else (70, 0, NARROW)
    axis = share_axis(largest, left, right)
    delivered = next((each for each in timed if report.delivered and each[1].name == report.delivered.stage), None)
    bottom = 46 + row * len(timed) - (4 if wide else 0)
    if wide:
        _heads(
            svg,
            (0, "stage"),
            (left, f"time, the reference's = 100 %; {what}"),
            (890, "step from its parent, 95 % interval"),
        )
        svg.text(860, 14, "texts/s" if mixed else "ms", "head", end=True)
    else:
        _heads(svg, (0, f"time, the reference's = 100 %; {what.partition(',')[0]}"))
    axis.draw(svg, 40, bottom)
    rows = {stage.name: 46 + row * i for i, (_, stage, _) in enumerate(timed)}
    middle = 13 if wide else 27
    if wide:
        _links(svg, axis, steps, {name: y + middle for name, y in rows.items()}, [stage for _, stage, _ in timed])
    for tree, stage, case in timed:
        y = rows[stage.name]
        figure = formatting.count(case.texts_per_s) if mixed else f"{case.p50_ms:.2f}"
        unit = "" if wide else " texts/s" if mixed else " ms"
        failed = "" if stage.status == "ok" else f" ({stage.status})"
        _name(svg, tree if wide else "", f"{stage.name}{failed}", y + (17 if wide else 13), 240 if wide else 220, stage)
        svg.text(860 if wide else NARROW, y + (17 if wide else 13), figure + unit, "strong" if wide else "", end=True)
        found = steps[stage.name]
        words, kind = ("the reference", "soft") if stage.pass_ is None else ("not raced", "soft")
        if found is None:
            pass
        elif found.ratio is None:
            svg.rect(axis.at(0), axis.at(found.end), y + middle - 7, 14, "base")
        else:
            svg.rect(axis.at(found.begin), axis.at(found.end), y + middle - 7, 14, _TONES[found.ratio.verdict])
            svg.whisker(axis.at(found.low), axis.at(found.high), y + middle)
            words, kind = formatting.verdict(found.ratio), _WORDS.get(found.ratio.verdict, "soft")
        svg.text(890 if wide else 0, y + (17 if wide else 51), words, kind)
    if delivered is None or delivered[2].vs_reference is None or steps[delivered[1].name] is None:
        return svg.finish(bottom + 6, alone)
    ratio = delivered[2].vs_reference
    svg.line(0, bottom + 4, svg.width, bottom + 4, "rule")
    y = bottom + 12
    svg.text(0, y + (17 if wide else 13), "delivered, in all", "strong")
    svg.rect(axis.at(0), axis.at(1 / ratio.ratio), y + middle - 7, 14, "best")
    svg.whisker(axis.at(1 / ratio.high), axis.at(1 / ratio.low), y + middle)
    svg.text(
        890 if wide else 0,
        y + (17 if wide else 51),
        formatting.verdict(ratio),
        f"strong {_WORDS.get(ratio.verdict, 'soft')}",
    )
    return svg.finish(y + row, alone)


def _links(
    svg: Svg, axis: Axis, steps: dict[str, _Step | None], middles: dict[str, float], stages: list[Stage]
) -> None:
    """From where a parent's bar ends down to its children: how far off they begin is the noise between two races."""
    for stage in stages:
        if (above := steps.get(stage.after or "")) and (step := steps[stage.name]):
            x, top, bottom = axis.at(above.end), middles[stage.after or ""] + 7, middles[stage.name] - 7
            svg.line(x, top, x, bottom, "link")
            svg.line(x, bottom, axis.at(step.begin), bottom, "link")


@dataclass(frozen=True)
class _Step:
    """Shares of the reference's time: the parent's, the stage's, and the ends of its interval. The reference has no ratio."""

    begin: float
    end: float
    low: float
    high: float
    ratio: Ratio | None


def _step(stage: Stage, case: Latency) -> _Step | None:
    if stage.pass_ is None:
        return _Step(0, 1, 1, 1, None)
    whole, step = case.vs_reference, case.vs_parent
    if (
        whole is None
        or step is None
        or not all(0 < x < math.inf for x in (whole.low, whole.ratio, step.ratio, step.low, step.high))
    ):
        return None
    begin = step.ratio / whole.ratio
    return _Step(begin, 1 / whole.ratio, begin / step.high, begin / step.low, step)


def _timed(report: Report) -> tuple[list[tuple[str, Stage, Latency]], str, bool]:
    """Each timed stage with the branch glyphs before its name and the case that is compared."""
    mixed = any(stage.mix() for stage in report.stages)
    shape = formatting.largest_shape(report)
    found = [
        (tree, stage, case)
        for tree, stage in formatting.tree_order(report.stages)
        if (case := stage.mix() if mixed else formatting.shape_case(stage, shape))
    ]
    what = "real texts, tokenisation included" if mixed else f"batch {shape[0]} × {shape[1]}" if shape else ""
    return found, what, mixed


def parity(report: Report, wide: bool, alone: bool = False) -> str | None:
    """Each figure against its limit on one logarithmic scale: a dot for what was measured, a tick for the limit."""
    groups = [(stage, found) for stage in report.stages if (found := marks(stage))]
    if not groups:
        return None
    svg = Svg(WIDE if wide else NARROW, "Each stage's difference from the reference, against its limits")
    left, right, row = (360, 880, 22) if wide else (0, NARROW, 38)
    every = [x for _, found in groups for mark in found for x in (mark.value, mark.limit) if x is not None]
    axis = log_axis(every, left, right)
    lines = sum(len(found) for _, found in groups)
    gap = 12 if wide else 30
    bottom = 46 + row * lines + gap * (len(groups) if not wide else len(groups) - 1)
    if wide:
        _heads(svg, (0, "stage"), (250, "metric"), (left, "difference from the reference, log scale"), (980, "limit"))
        svg.text(965, 14, "measured", "head", end=True)
        svg.text(WIDE, 14, "to the limit", "head", end=True)
    else:
        _heads(svg, (0, "difference from the reference, log scale"))
    axis.draw(svg, 40, bottom)
    y = 46.0
    for number, (stage, found) in enumerate(groups):
        if number and wide:
            svg.line(0, y - gap / 2, svg.width, y - gap / 2, "rule")
        if not wide:
            _name(svg, "", f"{stage.name}, {stage.precision or ''}".rstrip(", "), y + 20, NARROW, stage)
            y += gap
        else:
            _name(svg, "", stage.name, y + 15, 235, stage)
            if stage.precision and len(found) > 1:
                svg.text(0, y + 15 + row, stage.precision, "soft")
        for mark in found:
            _mark(svg, axis, mark, y, wide)
            y += row
        y += gap if wide else 0
    return svg.finish(bottom + 6, alone)


def _mark(svg: Svg, axis: Axis, mark: Mark, y: float, wide: bool) -> None:
    middle = y + (11 if wide else 24)
    tone, kind = ("good", "") if mark.held else ("bad", "bad strong")
    value, limit = formatting.figure(mark.value, 2), ""
    if mark.limit is not None:
        limit = f"≤ {formatting.figure(mark.limit, 2)}"
        svg.line(axis.at(mark.value), middle, axis.at(mark.limit), middle, "room" if mark.held else "over")
        svg.line(axis.at(mark.limit), middle - 7, axis.at(mark.limit), middle + 7, "limit")
    svg.dot(axis.at(mark.value), middle, tone if mark.limit is not None else "plain")
    if wide:
        svg.text(250, y + 15, mark.metric, "soft")
        svg.text(965, y + 15, value, kind, end=True)
        svg.text(980, y + 15, limit, "soft")
    else:
        svg.text(0, y + 13, f"{mark.metric} {value} {limit}", kind or "soft")
    svg.text(svg.width, y + (15 if wide else 13), mark.room, kind or "soft", end=True)


def _heads(svg: Svg, *heads: tuple[float, str]) -> None:
    for x, words in heads:
        svg.text(x, 14, words, "head")


def size(report: Report, wide: bool, alone: bool = False) -> str | None:
    """Bytes on disk and the peaks of memory, each on a scale of its own from 0."""
    rows = [(tree, stage) for tree, stage in formatting.tree_order(report.stages) if any(_bytes(stage).values())]
    heads = [
        key for key in _bytes(Stage(index=0, name="", status="ok")) if any(_bytes(stage)[key] for _, stage in rows)
    ]
    if not heads:
        return None
    largest = {key: max(_bytes(stage)[key] or 0 for _, stage in rows) for key in heads}
    svg = Svg(WIDE if wide else NARROW, "Size and memory of each stage")
    row, left = (28, 250) if wide else (28 + 20 * len(heads), 104)
    column = (WIDE - left) / len(heads) if wide else NARROW - left
    if wide:
        _heads(svg, (0, "stage"), *((left + i * column, f"{key}, MB") for i, key in enumerate(heads)))
    y = 24.0 if wide else 0.0
    for tree, stage in rows:
        _name(svg, tree if wide else "", stage.name, y + 17, 240 if wide else NARROW, stage)
        best = report.delivered is not None and report.delivered.stage == stage.name
        for i, key in enumerate(heads):
            x, top = (left + i * column, y + 6) if wide else (left, y + 24 + 20 * i)
            found = _bytes(stage)[key]
            if not wide:
                svg.text(0, top + 11, key, "soft")
            if found is None:
                svg.text(x, top + 11, formatting.NONE, "soft")
                continue
            end = x + (column - 90) * found / largest[key]
            svg.rect(x, end, top, 14, "best" if best else "base" if stage.pass_ is None else "plain")
            svg.text(end + 8, top + 11, formatting.megabytes(found) + ("" if wide else " MB"), "strong" if best else "")
        y += row
    return svg.finish(y + 4, alone)


def _bytes(stage: Stage) -> dict[str, int | None]:
    return {"size": stage.size_bytes, "peak memory": stage.peak_rss_bytes, "GPU memory": stage.peak_gpu_bytes}


def _name(svg: Svg, tree: str, name: str, y: float, width: float, stage: Stage) -> None:
    lead = 7.0 * len(tree)
    if tree:
        svg.text(lead - 13, y, tree.strip()[-1], "soft")
    svg.name(lead, y, name, width - lead, "strong bad" if stage.status == "failed" else "strong")


#: What `save` writes, and the page shows.
PICTURES: dict[str, Callable[[Report, bool, bool], str | None]] = {"latency": latency, "parity": parity, "size": size}
