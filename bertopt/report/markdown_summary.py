"""A run, a verification or a comparison in Markdown, as a job's summary: the verdict first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from bertopt.report.diff import Diff
from bertopt.report.diff_table import escaped
from bertopt.report.diff_table import markdown as changes
from bertopt.report.formatting import baselines, head_to_head
from bertopt.report.terminal import markdown as stages
from bertopt.results import Report
from bertopt.system import atomic_write


def write(path: Path, report: Report | None, diff: Diff | None = None) -> None:
    """Write the summary of `report` and `diff` to `path`, whole or not at all."""
    atomic_write.write(path, render(report, diff))


def render(report: Report | None, diff: Diff | None = None) -> str:
    """Markdown: verdict, table, reasons, waivers, blame, differences of environment."""
    parts = [*(_report(report) if report is not None else ()), *(_diff(diff) if diff is not None else ())]
    return "\n".join(parts)


def _report(report: Report) -> Iterator[str]:
    source = escaped(str(report.model.get("source") or report.recipe.get("model") or "model"))
    yield f"## bertopt: {'passed' if not report.exit_code else f'failed (exit code {report.exit_code})'}\n"
    if report.reason:
        yield f"**{escaped(report.reason)}**\n"
    if report.delivered:
        row = report.stage(report.delivered.stage)
        speed = f": {ratio} against the checkpoint" if (ratio := row.speed_up()) else ""
        yield f"Delivered `{row.name}` of {source}{speed}.\n"
    if report.stages:
        yield stages(report)
    if compared := baselines(report):
        yield f"Baselines: {escaped(compared)}.\n"
    if raced := head_to_head(report):
        yield f"Head to head: {escaped(raced)}.\n"
    yield from _list("Reasons", [f"`{row.name}` {row.status}: {escaped(row.reason)}" for row in report.stages if row.reason])  # fmt: skip
    yield from _list("Waived", [f"`{row.name}`: {escaped(text)}" for row in report.stages for text in row.waived])
    blamed = [(row, row.parity.blame) for row in report.stages if row.parity and row.parity.blame]
    yield from _list("Where the difference comes from", [
        f"`{row.name}`: most of its rel\\_l2 {blame.total:.3g} was introduced by `{blame.stage}` ({blame.rel_l2:.3g} against its parent)"
        for row, blame in blamed if blame.stage != row.name
    ])  # fmt: skip
    yield from _list("Warnings", [escaped(str(text)) for text in report.model.get("warnings") or []])
    machine = [f"{key} {report.environment[key]}" for key in ("cpu", "cores", "memory_gib", "python") if key in report.environment]  # fmt: skip
    if machine:
        yield f"Measured on {escaped(', '.join(machine))}; {report.wall_s:.0f} s.\n"


def _diff(diff: Diff) -> Iterator[str]:
    found = len(diff.regressions())
    yield f"## bertopt compare: {f'{found} regression(s)' if found else 'no regression'}\n"
    yield f"**{escaped(diff.reason)}**\n"
    yield f"Baseline {escaped(diff.baseline)}, candidate {escaped(diff.candidate)}.\n"
    if found:
        yield changes(diff, only_regressions=True)
        yield "<details><summary>All figures</summary>\n"
    yield changes(diff)
    if found:
        yield "</details>\n"
    yield from _list("Not compared", [escaped(text) for text in diff.not_compared])
    yield from _list("Differences of environment", [escaped(text) for text in diff.environment])


def _list(title: str, items: Sequence[str]) -> Iterator[str]:
    if items:
        yield f"### {title}\n"
        yield "".join(f"- {item}\n" for item in items)
