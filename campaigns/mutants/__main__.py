"""`python -m campaigns.mutants [NAME…] [--json FILE]`: plant wrong models one at a time; each must be caught by its gate."""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from pathlib import Path

from bertopt.system import environment
from campaigns.mutants.controls import CONTROLS
from campaigns.mutants.harness import Bench, Finding, judged
from campaigns.mutants.plant import NEW, Mutant, table
from tests.support.shared_workers import cheap_workers


def show(finding: Finding) -> None:
    mark = "  " if finding.good else "!!"
    caught = ", ".join(finding.caught_by) or "nobody"
    print(
        f"{mark} {finding.name:28} exit {finding.exit_code} {caught:20} {finding.expected:12} {finding.seconds:5.1f} s  {finding.said}",
        flush=True,
    )


def chosen(names: list[str], new: bool, known: Path | None, every: int) -> list[Mutant]:
    """Return the mutants to plant: those named or all, of the second round's tables if `new`, one of `every`, none that the file `known` has."""
    there = table()
    if unknown := [name for name in names if name not in there]:
        raise SystemExit(f"no mutant {', '.join(unknown)}; known: {', '.join(there)}")
    done = {json.loads(line)["name"] for line in known.read_text("utf-8").splitlines()} if known and known.exists() else set()
    mutants = [there[name] for name in names or there if name not in done]
    # Those on one checkpoint together: their stages are shared.
    mutants.sort(key=lambda mutant: (mutant.deed, str(mutant.on), str(mutant.line)))
    return [mutant for mutant in mutants if not new or mutant.table in NEW][::every]


def refused_control(bench: Bench) -> str | None:
    """Return what was said of a right model that a gate refuses, None where all pass."""
    for name, checkpoint, steps in CONTROLS:
        caught, said = judged(bench.recipe(checkpoint, steps))
        print(f"   {name:28} {', '.join(caught) or 'nobody'}: a control, which must pass every gate", flush=True)
        if caught:
            return f"the control '{name}' was refused, so no finding would prove anything: {said}"
    return None


def write(path: Path, findings: list[Finding]) -> None:
    document = {"environment": environment.describe(), "findings": [finding.record() for finding in findings]}
    # Without the temporary folder's name.
    text = re.sub(r"[^\s'\"]*bertopt-mutants-\w+/", "", json.dumps(document, indent=1, ensure_ascii=False))
    path.write_text(text + "\n", "utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants to plant; default: all")
    parser.add_argument("--new", action="store_true", help="the second round's tables alone")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="one mutant of N, to sample a table")
    parser.add_argument("--except", dest="known", type=Path, metavar="FILE", help="leave out the mutants that FILE, written by --out, holds")
    parser.add_argument("--out", type=Path, help="append each finding here as it comes, a JSON object a line")
    parser.add_argument("--json", type=Path, help="write the findings here, such as benchmarks/results/mutants.json")
    parser.add_argument("--list", action="store_true", help="name every mutant and what it does wrong")
    arguments = parser.parse_args()
    mutants = chosen(arguments.names, arguments.new, arguments.known, arguments.every)
    if arguments.list:
        for mutant in mutants:
            print(f"{mutant.name:28} {mutant.gate:12} {mutant.about}")
        return 0
    started = time.monotonic()
    print(f"   {'mutant':28} {'caught by':20} {'expected':12}          what it said")
    findings = []
    with tempfile.TemporaryDirectory(prefix="bertopt-mutants-") as scratch, cheap_workers("pipeline", new_interpreter=True):
        bench = Bench(Path(scratch))
        if refused := refused_control(bench):
            print(refused)
            return 1
        for mutant in mutants:
            findings.append(bench.plant(mutant))
            show(findings[-1])
            if arguments.out:
                with arguments.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(findings[-1].record()) + "\n")
    if arguments.json:
        write(arguments.json, findings)
    good, expected = sum(f.good for f in findings), sum(f.good and f.expected in f.caught_by for f in findings)
    seconds = time.monotonic() - started
    print(f"{good} of {len(findings)} end with another exit code than 0 ({expected} by the expected gate), {seconds:.0f} s")
    return 0 if good == len(findings) else 1


if __name__ == "__main__":
    sys.exit(main())
