"""The report as one HTML file: no network, no script, light and dark, on paper too."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bertopt.report import charts, formatting, glossary, limit_margins, stage_details
from bertopt.results import Margin, Report, Stage, factor
from bertopt.system import atomic_write

if TYPE_CHECKING:
    from jinja2 import Template

_EXITS = {
    0: "every gate passed", 1: "bertopt itself failed", 2: "the recipe is wrong", 3: "a gate failed",
    4: "the environment lacks something", 5: "out of memory or disk", 6: "integrity refused", 7: "timed out",
    129: "its terminal closed", 130: "interrupted", 143: "terminated",
}  # fmt: skip
#: The table's columns: what decides first, since a narrow page shows the left ones.
_ORDER = ("stage", "status", "verdict", "parity", "rate", "ms", "size", "quality", "changed")


def write(report: Report, path: Path) -> None:
    """Write the page to `path`, whole or not at all."""
    atomic_write.write(path, page(report))


def page(report: Report) -> str:
    words = formatting.grid(report)
    return template("report.html.jinja").render(
        report=report,
        grid=words,
        keys=[key for key in _ORDER if key in words.heads],
        tiles=tiles(report),
        pictures={name: draw(report, False) for name, draw in charts.PICTURES.items()},
        details=stage_details,
        meanings=glossary.MEANINGS,
        warnings=list(stage_details.warnings(report)),
        baselines=formatting.baselines(report),
        head_to_head=formatting.head_to_head(report),
        meaning=_EXITS.get(report.exit_code, "failed"),
    )  # fmt: skip


def fragment(report: Report) -> str:
    """The verdict and the table alone, for a notebook: no style that reaches beyond it."""
    return template("notebook.html.jinja").render(
        report=report, grid=formatting.grid(report), meaning=_EXITS.get(report.exit_code, "failed"), numbers=formatting.NUMBERS,
    )  # fmt: skip


def template(name: str) -> Template:
    """Return a page's template with the filters that the pages share."""
    import jinja2

    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {
        "figure": formatting.figure, "count": formatting.count, "flat": formatting.flat, "parity": formatting.parity, "margin": formatting.margin,
        "quality": formatting.quality, "coverage": formatting.coverage, "ratio": lambda ratio: str(ratio or formatting.NONE), "rounding": limit_margins.rounding, "clean": formatting.clean, "one_line": formatting.one_line,
        "percent": lambda share: f"{100 * share:.1f} %",
    }  # fmt: skip
    return found.get_template(name)


@dataclass(frozen=True)
class Tile:
    """One of the figures at the top."""

    label: str
    value: str
    note: str
    tone: str = ""


def tiles(report: Report) -> list[Tile]:
    """What was delivered, how much faster it is, how near to its limits, how big."""
    stage = next((stage for stage in report.stages if report.delivers(stage)), None)
    if stage is None:
        return [Tile("delivered", "nothing", "no artefact was written", "bad"), *_nearest(report.stages)]
    kind = " · ".join(word for word in (stage.form, stage.precision) if word)
    found = [Tile("delivered", stage.name, kind), *_faster(report, stage), *_nearest([stage])]
    if stage.size_bytes is not None:
        base = report.stages[0].size_bytes
        note = f"the reference has {formatting.megabytes(base)} MB" if base and stage is not report.stages[0] else ""
        found.append(Tile("size", f"{formatting.megabytes(stage.size_bytes)} MB", note))
    return found


def _faster(report: Report, stage: Stage) -> list[Tile]:
    shape = formatting.largest_shape(report)
    timed = stage.mix() or formatting.shape_case(stage, shape)
    if timed is None or timed.vs_reference is None:
        return []
    ratio = timed.vs_reference
    tone = {"FASTER": "good", "SLOWER": "bad"}.get(ratio.verdict, "")
    what = "whole texts" if timed.kind == "mix" else f"batch {timed.batch} × {timed.sequence}"
    interval = f"{factor(ratio.low)} to {factor(ratio.high)}"
    if ratio.verdict == "INCONCLUSIVE":
        return [Tile("speed: inconclusive", f"{interval}×", f"95 % interval, {what}")]
    return [Tile(f"speed: {ratio.verdict.lower()}", f"{factor(ratio.ratio)}×", f"95 % interval {interval}, {what}", tone)]


def _nearest(stages: list[Stage]) -> list[Tile]:
    """What is nearest to its limit: of the first stage that missed one, else of the last that has any."""
    having = [(stage, found) for stage in stages if (found := _margin(stage))]
    missed = [each for each in having if each[1].used > 1 and not each[0].waived and each[0].status != "skipped"]
    stage, found = next(iter([*missed, *having[-1:]]), (None, None))
    if stage is None or found is None:
        return []
    tone = "good" if found.used <= 1 else "warn" if stage.waived else "bad"
    note = f"{stage.name}, {found.where}" if found.where else stage.name
    words = formatting.beside(found.value, found.limit, found.least)
    label = "limit missed" if found.used > 1 else "nearest to its limit"
    return [Tile(f"{label}: {formatting.margin_name(found)}", words, note, tone)]


def _margin(stage: Stage) -> Margin | None:
    """Of all limits; in a report of 0.1, of parity's alone."""
    if stage.nearest or stage.parity is None:
        return stage.nearest
    worst = stage.parity.worst
    return Margin(gate="parity", metric=worst.metric, value=worst.value, limit=worst.limit, where=worst.where)
