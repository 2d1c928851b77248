"""What every campaign of faults shares: its command line, its table, and its figures in benchmarks/results/faults.json."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "faults.json"
#: Problems that are printed and kept.
SHOWN = 20


@dataclass
class Outcome:
    """How often each thing was tried and was as promised, and what was not."""

    tried: Counter[str] = field(default_factory=Counter)
    right: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)

    def count(self, what: str, problem: str | None = None) -> None:
        self.tried[what] += 1
        self.right[what] += problem is None
        if problem is not None:
            self.problems.append(f"{what}: {problem}")

    def lines(self) -> list[str]:
        width = max(map(len, self.tried), default=4)
        rows = [f"{what:{width}}  {self.right[what]:>7} of {tried}" for what, tried in self.tried.items()]
        return [*rows, *(f"{name}: {value}" for name, value in self.notes.items()), *self.problems[:SHOWN]]


#: `run(times, seed, scratch)`.
Run = Callable[[int, int, Path], Outcome]


def main(name: str, doc: str, run: Run, times: int) -> int:
    """Run a campaign from the command line, print its table, and keep its figures."""
    parser = argparse.ArgumentParser(prog=f"python -m campaigns.faults.{name}", description=doc)
    parser.add_argument("--times", type=int, default=times, help=f"its size (default {times})")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=RESULT, help="the file that keeps the figures, beside other campaigns'")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix=f"bertopt-{name}-") as scratch:
        outcome = run(options.times, options.seed, Path(scratch))
    print(*outcome.lines(), sep="\n")
    keep(options.json, name, outcome, options.seed)
    return 1 if outcome.problems else 0


def keep(path: Path, name: str, outcome: Outcome, seed: int) -> None:
    from bertopt.system import environment

    document = json.loads(path.read_text("utf-8")) if path.is_file() else {"campaigns": {}}
    document["environment"] = environment.describe()
    document["campaigns"][name] = {
        "seed": seed, "tried": dict(outcome.tried), "right": dict(outcome.right), "notes": outcome.notes,
        "problems": outcome.problems[:SHOWN],
    }  # fmt: skip
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False, sort_keys=True) + "\n", "utf-8")
