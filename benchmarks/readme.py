"""Write README's tables from result files: the quickstart's report, the parity measurement, what works for what,
and the benchmarks.

    python -m benchmarks.readme [out/quickstart/report.json]

With a report, it is first kept as benchmarks/results/quickstart.json.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import pipeline, roofline
from benchmarks.peers import tables
from bertopt.report.terminal import markdown
from bertopt.results import Report

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "quickstart.json"
LIMITS = ROOT / "benchmarks" / "results" / "parity_limits.json"
MATRIX = ROOT / "benchmarks" / "results" / "matrix.json"
PROOF = ROOT / "benchmarks" / "results" / "proof.json"
AA = ROOT / "benchmarks" / "results" / "aa.json"
AA_LONG = ROOT / "benchmarks" / "results" / "aa_long.json"
CPU_PEERS = ROOT / "benchmarks" / "results" / "cpu_peers.json"
ROOFLINE = ROOT / "benchmarks" / "results" / "roofline.json"
PIPELINE = ROOT / "benchmarks" / "results" / "pipeline.json"


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
            values = [row[key] for row in rows if row.get(key := metric.removesuffix("_max")) is not None]
            if not values:
                continue
            pick = min if metric.startswith("cosine") else max
            worst.append(f"{metric.removesuffix('_max')} {pick(values):.6g}")
        lines.append(f"| {precision} | {', '.join(worst)} | {', '.join(f'{k} {v:g}' for k, v in allowed.items())} |")
    return "\n".join(lines) + "\n"


def matrix(found: dict[str, Any]) -> str:
    """Families × passes: `ok` where every task is, else of how many, and the reasons below. Raises ValueError where a
    cell failed or is blank: such a table is not to be published."""
    cells = {(cell["family"], cell["pass_"], cell["task"]): cell["outcome"] for cell in found["cells"]}
    families, names, tasks = (list(dict.fromkeys(key[i] for key in cells)) for i in range(3))
    bad = [key for key, outcome in cells.items() if outcome.startswith("FAILED")]
    bad += [(f, n, t) for f in families for n in names for t in tasks if (f, n, t) not in cells]
    if bad:
        raise ValueError(
            f"matrix.json: {len(bad)} cells failed or are missing, first {' · '.join(bad[0])}; run campaigns.matrix"
        )
    lines = [f"| | {' | '.join(f'`{name}`' for name in names)} |", "| :-- |" + " :-- |" * len(names)]
    reasons: dict[tuple[str, str], list[str]] = {}
    for family in families:
        row = []
        for name in names:
            outcomes = [cells[family, name, task] for task in tasks]
            row.append(_cell(outcomes))
            for outcome in outcomes:
                if outcome.startswith("unsupported: "):
                    # Class and family names vary within one reason.
                    reason = outcome.removeprefix("unsupported: ").splitlines()[0]
                    where = reasons.setdefault((name, re.sub(rf"\b({family}|{_CLASS})\b", "…", reason)), [])
                    where += [family] if family not in where else []
        lines.append(f"| {family} | {' | '.join(row)} |")
    lines += ["", f"Tasks: {', '.join(tasks)}; {len(cells)} cells.", ""]
    lines += [f"- `{name}`, {', '.join(where)}: {reason}" for (name, reason), where in reasons.items()]
    return "\n".join(lines) + "\n"


#: A transformers class in a message.
_CLASS = r"[A-Z]\w+(?:For\w+|Model)"


def _cell(outcomes: Sequence[str]) -> str:
    kinds = ["unsupported" if outcome.startswith("unsupported") else outcome for outcome in outcomes]
    if len(set(kinds)) == 1:
        return kinds[0]
    return ", ".join(f"{kind} {kinds.count(kind)}/{len(kinds)}" for kind in dict.fromkeys(kinds))


def proof(found: dict[str, Any]) -> str:
    """What mutants, clean runs and orders of passes came to."""
    mutants, clean = found["mutants"], found["clean_runs"]
    caught = [mutant for mutant in mutants if mutant["good"]]
    lines = [
        f"- Wrong models: {len(caught)} of {len(mutants)} caught by the gate that should.",
        f"- Clean runs: {len(clean['alarms'])} false alarms in {clean['runs']} runs "
        f"({', '.join(f'{n} stages {status}' for status, n in clean['statuses'].items())}).",
    ]
    for length, name in (("2", "pairs"), ("3", "triples")):
        counts = found["orders"][length]
        outcomes = ", ".join(f"{n} {outcome}" for outcome, n in sorted(counts.items()))
        lines.append(f"- Ordered {name} of passes: {sum(counts.values())}, of which {outcomes}.")
    lines += [f"- Not caught by its gate: `{mutant['name']}`" for mutant in mutants if not mutant["good"]]
    return "\n".join(lines) + "\n"


def verdicts(found: dict[str, Any]) -> str:
    """How often a model was called faster or slower than itself, and a slower one slower, for each shape."""
    rows, settings = found["rows"], found["settings"]
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    parts = []
    for kind, wanted in (("aa", ("FASTER", "SLOWER")), ("slow", ("SLOWER",))):
        hits = {shape: [row["verdict"] in wanted for row in rows if (row["kind"], row["shape"]) == (kind, shape)]
                for shape in shapes}  # fmt: skip
        counts = ", ".join(f"{sum(of)} of {len(of)} at {shape.replace(' x ', '×')}" for shape, of in hits.items())
        every = [hit for of in hits.values() for hit in of]
        parts.append(f"{sum(every)} of {len(every)} races ({counts})")
    sides = "one process" if settings["processes"] == 1 else f"{settings['processes']} processes"
    cores, cpu = found["environment"]["cores"], found["environment"]["cpu"]
    model = "`" + "` > `".join(settings["model"].split(" > ")[1:]) + "`" if " > " in settings["model"] else "fp32"
    withheld = sum("withheld" in (row["warning"] or "") for row in rows) / len(rows)
    return (
        f"- With {sides} a side and {settings['shape_budget_s']:g} s for each shape, {2 * found['seconds'] / len(rows):.0f} s a race on average, a model "
        f"against itself is called faster or slower in {parts[0]}; counted {settings['slow_down']:.0%} slower, it is called slower in "
        f"{parts[1]}.\n  (Real MiniLM, {model}, {cores} cores of {cpu}; in {withheld:.0%} of the races a hypervisor withheld more than "
        "3 % of them.)\n"
    )


def cpu_peers(found: dict[str, Any]) -> str:
    """What users would run instead, beside our artefacts: tables, and a picture of each checkpoint."""
    raced = {name: race for name, race in found["models"].items() if race["turns"]}
    pictures = [f"![{race['title']}](benchmarks/results/cpu_peers_{name}.svg)" for name, race in raced.items()]
    return "\n".join([tables.markdown(found), *pictures]) + "\n"


def updated(readme: str) -> str:
    """README with every table written anew."""
    writers: dict[str, Callable[[], str]] = {
        "quickstart": lambda: section(Report.model_validate_json(RESULT.read_text("utf-8"))),
        "limits": lambda: limits(json.loads(LIMITS.read_text("utf-8"))),
        "matrix": lambda: matrix(json.loads(MATRIX.read_text("utf-8"))),
        "proof": lambda: proof(json.loads(PROOF.read_text("utf-8")))
        + "".join(verdicts(json.loads(path.read_text("utf-8"))) for path in (AA, AA_LONG)),
        "cpu_peers": lambda: cpu_peers(json.loads(CPU_PEERS.read_text("utf-8"))),
        "roofline": lambda: roofline.table(json.loads(ROOFLINE.read_text("utf-8"))),
        "pipeline": lambda: pipeline.table(json.loads(PIPELINE.read_text("utf-8"))),
    }
    for name, table in writers.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        if begin not in readme:
            continue
        text = table()
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
