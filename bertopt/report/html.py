"""The report as one HTML file: no network, no script, light and dark, on paper too."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bertopt.report import charts, formatting, limit_margins, stage_details
from bertopt.results import Ratio, Report, Stage
from bertopt.system import atomic_write

if TYPE_CHECKING:
    from jinja2 import Template

_EXITS = {
    0: "every gate passed", 1: "bertopt itself failed", 2: "the recipe is wrong", 3: "a gate failed",
    4: "the environment lacks something", 5: "out of memory or disk", 6: "integrity refused", 7: "timed out",
    130: "interrupted", 143: "terminated",
}  # fmt: skip
#: The table's columns: what decides first, since a narrow page shows the left ones.
_NUMBERS = ("ms", "rate", "size", "quality")
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
        delivered=report.delivered.stage if report.delivered else None,
        tiles=tiles(report),
        pictures={name: draw(report, False) for name, draw in charts.PICTURES.items()},
        details=stage_details,
        warnings=list(stage_details.warnings(report)),
        baselines=formatting.baselines(report),
        meaning=_EXITS.get(report.exit_code, "failed"),
    )  # fmt: skip


def fragment(report: Report) -> str:
    """The verdict and the table alone, for a notebook: no style that reaches beyond it."""
    return template("notebook.html.jinja").render(
        report=report, grid=formatting.grid(report), meaning=_EXITS.get(report.exit_code, "failed"),
        delivered=report.delivered.stage if report.delivered else None, numbers=_NUMBERS,
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
        "figure": formatting.figure, "count": formatting.count, "flat": formatting.flat, "parity": formatting.parity,
        "quality": formatting.quality, "coverage": formatting.coverage, "ratio": _ratio, "rounding": limit_margins.rounding, "clean": formatting.clean, "one_line": formatting.one_line,
        "percent": lambda share: f"{100 * share:.1f} %",
    }  # fmt: skip
    return found.get_template(name)


def _ratio(found: Ratio | None) -> str:
    return formatting.verdict(found) if found else formatting.NONE


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
    interval = f"{ratio.low:.2f} to {ratio.high:.2f}"
    if ratio.verdict == "INCONCLUSIVE":
        return [Tile("speed: inconclusive", f"{interval}×", f"95 % interval, {what}")]
    return [Tile(f"speed: {ratio.verdict.lower()}", f"{ratio.ratio:.2f}×", f"95 % interval {interval}, {what}", tone)]


def _nearest(stages: list[Stage]) -> list[Tile]:
    """The worst parity: of the first stage that failed it, else of the last that has any."""
    having = [stage for stage in stages if stage.parity]
    failed = [row for row in having if row.parity and not row.parity.passed and not row.waived and row.status != "skipped"]
    stage = next(iter([*failed, *having[-1:]]), None)
    if stage is None or stage.parity is None:
        return []
    worst = stage.parity.worst
    value = formatting.parity(stage.parity).removeprefix(f"{worst.metric} ")
    tone = "good" if stage.parity.passed else "warn" if stage.waived else "bad"
    return [Tile(f"worst parity: {worst.metric}", value, f"{stage.name} at {worst.where}", tone)]
