"""Write README's tables from result files: the quickstart's report, and the parity measurement.

    python -m benchmarks.readme [out/quickstart/report.json]

With a report, it is first kept as benchmarks/results/quickstart.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from bertopt.report.table import markdown
from bertopt.results import Report

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "quickstart.json"
LIMITS = ROOT / "benchmarks" / "results" / "parity_limits.json"


def section(report: Report) -> str:
    environment = report.environment
    packages = environment["packages"]
    names = ("torch", "transformers", "onnxruntime")
    where = f"{environment['cores']} cores of {environment['cpu']} ({', '.join(environment['isa'])}), " + ", ".join(
        f"{name} {packages[name]}" for name in names
    )
    return f"{markdown(report)}\nMeasured on {where}; {report.wall_s:.0f} s in all.\n"


def limits(found: dict[str, Any]) -> str:
    """For each precision, the worst of every metric measured, and the limit."""
    lines = ["| precision | worst measured | default limit |", "| :-- | :-- | :-- |"]
    for precision, allowed in found["limits"].items():
        rows = [row for row in found["rows"] if row["precision"] == precision]
        worst = []
        for metric in allowed:
            values = [row[metric.removesuffix("_max")] for row in rows if row[metric.removesuffix("_max")] is not None]
            pick = min if metric.startswith("cosine") else max
            worst.append(f"{metric.removesuffix('_max')} {pick(values):.6g}")
        lines.append(f"| {precision} | {', '.join(worst)} | {', '.join(f'{k} {v:g}' for k, v in allowed.items())} |")
    return "\n".join(lines) + "\n"


def updated(readme: str) -> str:
    """README with both tables written anew."""
    report = Report.model_validate_json(RESULT.read_text("utf-8"))
    for name, text in (("quickstart", section(report)), ("limits", limits(json.loads(LIMITS.read_text("utf-8"))))):
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        head, rest = readme.split(begin)
        readme = f"{head}{begin}\n{text}{end}{rest.split(end)[1]}"
    return readme


def main() -> None:
    if len(sys.argv) > 1:
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(Path(sys.argv[1]).read_text("utf-8"), "utf-8")
    readme = ROOT / "README.md"
    readme.write_text(updated(readme.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
