"""The report as one HTML file: no network, no script, light and dark, on paper too."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertopt.report import cells
from bertopt.results import Case, Limits, Parity, Ratio, Report, Stage

if TYPE_CHECKING:
    from jinja2 import Environment

_EXITS = {
    0: "every gate passed", 1: "bertopt itself failed", 2: "the recipe is wrong", 3: "a gate failed",
    4: "the environment lacks something", 5: "out of memory or disk", 6: "integrity refused", 7: "timed out",
    130: "interrupted", 143: "terminated",
}  # fmt: skip
#: The table's columns: what decides first, since a narrow page shows the left ones.
_ORDER = ("stage", "status", "verdict", "parity", "rate", "ms", "size", "quality", "changed")
_CASE_METRICS = ("max_abs", "rel_l2", "cosine_min", "cosine_mean")


def write(report: Report, path: Path) -> None:
    """Write the page to `path`, whole or not at all."""
    text = page(report)
    new = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        new.write_text(text, encoding="utf-8", errors="backslashreplace")
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def page(report: Report) -> str:
    words = cells.grid(report)
    return _environment().get_template("report.html.jinja").render(
        report=report,
        grid=words,
        keys=[key for key in _ORDER if key in words.heads],
        facts=facts,
        delivered=report.delivered.stage if report.delivered else None,
        tiles=tiles(report),
        chart=chart(report),
        meaning=_EXITS.get(report.exit_code, "failed"),
        recipe=json.dumps(report.recipe, indent=2, ensure_ascii=False, default=str),
    )  # fmt: skip


def _environment() -> Environment:
    import jinja2

    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {
        "figure": cells.figure, "count": cells.count, "flat": cells.flat, "parity": cells.parity,
        "megabytes": cells.megabytes, "quality": cells.quality, "ratio": _ratio, "case_cells": case_cells,
        "worst_first": worst_first, "clean": cells.clean,
    }  # fmt: skip
    return found


def _ratio(found: Ratio | None) -> str:
    return cells.verdict(found) if found else cells.NONE


@dataclass(frozen=True)
class Tile:
    """One of the figures at the top."""

    label: str
    value: str
    note: str
    tone: str = ""


def tiles(report: Report) -> list[Tile]:
    """What was delivered, how much faster it is, how near to its limits, how big."""
    name = report.delivered.stage if report.delivered else None
    stage = next((stage for stage in report.stages if stage.name == name), None)
    if report.delivered is None or stage is None:
        return [Tile("delivered", "nothing", "no stage passed its gates", "bad"), *_nearest(report.stages)]
    kind = " · ".join(word for word in (stage.form, stage.precision) if word)
    found = [Tile("delivered", stage.name, kind), *_faster(report, stage), *_nearest([stage])]
    if stage.size_bytes is not None:
        base = report.stages[0].size_bytes
        note = f"the reference has {cells.megabytes(base)} MB" if base and stage is not report.stages[0] else ""
        found.append(Tile("size", f"{cells.megabytes(stage.size_bytes)} MB", note))
    return found


def _faster(report: Report, stage: Stage) -> list[Tile]:
    shape = cells.largest_shape(report)
    timed = stage.mix() or cells.shape_case(stage, shape)
    if timed is None or timed.vs_reference is None:
        return []
    ratio = timed.vs_reference
    tone = {"FASTER": "good", "SLOWER": "bad"}.get(ratio.verdict, "")
    what = "whole texts" if timed.kind == "mix" else f"batch {timed.batch} × {timed.sequence}"
    note = f"95 % interval {ratio.low:.2f} to {ratio.high:.2f}, {what}"
    return [Tile(f"speed: {ratio.verdict.lower()}", f"{ratio.ratio:.2f}×", note, tone)]


def _nearest(stages: list[Stage]) -> list[Tile]:
    """The worst parity: of the first stage that failed it, else of the last that has any."""
    having = [stage for stage in stages if stage.parity]
    failed = [stage for stage in having if stage.parity and not stage.parity.passed]
    stage = next(iter([*failed, *having[-1:]]), None)
    if stage is None or stage.parity is None:
        return []
    worst = stage.parity.worst
    value = cells.parity(stage.parity).removeprefix(f"{worst.metric} ")
    return [Tile(f"worst parity: {worst.metric}", value, worst.where, "good" if stage.parity.passed else "bad")]


@dataclass(frozen=True)
class Bar:
    """One stage in the chart. Lengths are percent of the widest."""

    name: str
    label: str
    verdict: str
    length: float
    low: float | None
    high: float | None
    tone: str


@dataclass(frozen=True)
class Chart:
    title: str
    note: str
    mark: float | None
    bars: list[Bar]


def chart(report: Report) -> Chart | None:
    """Texts per second of the mix, else the p50 of the largest shape; whiskers are the interval of the ratio."""
    mixed = any(stage.mix() for stage in report.stages)
    shape = cells.largest_shape(report)
    rows = []
    for _, stage in cells.tree_order(report.stages):
        timed = stage.mix() if mixed else cells.shape_case(stage, shape)
        if timed is None:
            continue
        value, ratio = timed.texts_per_s if mixed else timed.p50_ms, timed.vs_reference
        ends = None
        if ratio and min(ratio.low, ratio.ratio) > 0:
            scale = (ratio.low / ratio.ratio, ratio.high / ratio.ratio)
            ends = (value * scale[0], value * scale[1]) if mixed else (value / scale[1], value / scale[0])
        rows.append((stage, value, ends, ratio))
    widest = max((max(value, *(ends or ())) if ends else value for _, value, ends, _ in rows), default=0.0)
    if not rows or not 0 < widest < math.inf:
        return None
    bars = []
    for stage, value, ends, ratio in rows:
        low, high = (round(100 * end / widest, 2) for end in ends) if ends else (None, None)
        words = cells.verdict(ratio) if ratio else "reference" if stage.pass_ is None else ""
        label = cells.count(value) if mixed else f"{value:.2f} ms"
        bars.append(Bar(stage.name, label, words, round(100 * value / widest, 2), low, high, _tone(report, stage)))
    title = "Texts per second" if mixed else f"Milliseconds a batch of {shape[0]} × {shape[1]}" if shape else ""
    note = "Whole texts, tokenisation included; longer is faster." if mixed else "Median of a step; shorter is faster."
    mark = next((bar.length for bar, row in zip(bars, rows, strict=True) if row[0].pass_ is None), None)
    return Chart(title, note, mark, bars)


def _tone(report: Report, stage: Stage) -> str:
    if report.delivered is not None and report.delivered.stage == stage.name:
        return "best"
    if stage.pass_ is None:
        return "base"
    return "plain" if stage.status == "ok" else "bad"


def worst_first(found: Parity) -> list[Case]:
    return sorted(found.cases, key=lambda case: case.where != found.worst.where)


def case_cells(case: Case, limits: Limits) -> list[tuple[str, bool]]:
    """Each metric's words, and whether it is beyond its limit."""
    found = []
    for metric in _CASE_METRICS:
        value, limit = getattr(case, metric), getattr(limits, metric)
        held = limit is None or (value >= limit if metric.startswith("cosine") else value <= limit)
        # Seven digits: a cosine of 0.9999998 is not 1.
        found.append((cells.figure(value, 7 if metric.startswith("cosine") else 3), not held))
    return found


def facts(stage: Stage) -> dict[str, Any]:
    """Everything about how a stage was built, for its details."""
    found: dict[str, Any] = {
        "pass": stage.pass_, "after": stage.after, "form": stage.form, "precision": stage.precision, "path": stage.path,
    }  # fmt: skip
    if stage.build_s is not None:
        found["built in"] = f"{stage.build_s:.1f} s" + (" by an earlier run" if stage.reused else "")
    sizes = {"size": stage.size_bytes, "peak memory": stage.peak_rss_bytes, "peak GPU memory": stage.peak_gpu_bytes}
    found |= {key: f"{cells.megabytes(size)} MB" for key, size in sizes.items() if size is not None}
    return {key: value for key, value in found.items() if value is not None}
