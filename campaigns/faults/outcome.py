"""What every campaign of faults shares: its command line, its table, and its figures in benchmarks/results/faults.json."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
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
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing new after this many seconds")
    parser.add_argument("--add", action="store_true", help="add to the figures kept so far, with another seed: a campaign in parts")
    parser.add_argument("--json", type=Path, default=RESULT, help="the file that keeps the figures, beside other campaigns'")
    options = parser.parse_args()
    _deadline[0] = time.monotonic() + options.seconds
    earlier = kept(options.json)["campaigns"].get(name, {}) if options.add else {}
    with tempfile.TemporaryDirectory(prefix=f"bertopt-{name}-") as scratch:
        outcome = run(options.times, options.seed + len(earlier.get("parts", ())), Path(scratch))
    print(*outcome.lines(), sep="\n")
    keep(options.json, name, outcome, options.seed, earlier)
    return 1 if outcome.problems else 0


#: When `in_time` stops; `main` sets it.
_deadline = [math.inf]


def in_time(items: Iterable[T]) -> Iterator[T]:
    """Yield items until the time of this part of the campaign is up."""
    for item in items:
        if time.monotonic() >= _deadline[0]:
            return
        yield item


def kept(path: Path) -> dict[str, Any]:
    """Return the figures of all campaigns so far."""
    return json.loads(path.read_text("utf-8")) if path.is_file() else {"campaigns": {}}


def _worst(earlier: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Return the notes of both, the larger where both have a number."""
    larger = {key: max(value, now[key]) for key, value in earlier.items() if isinstance(value, float) and isinstance(now.get(key), float)}
    return {**earlier, **now, **larger}


def keep(path: Path, name: str, outcome: Outcome, seed: int, earlier: dict[str, Any]) -> None:
    """Write a campaign's figures, added to those of its `earlier` parts. A part names the commit that it ran on."""
    from bertopt.system import environment

    document = kept(path)
    described = environment.describe()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    tried, right = (Counter(earlier.get(key, {})) for key in ("tried", "right"))
    tried.update(outcome.tried)
    right.update(outcome.right)
    document["environment"] = described
    document["campaigns"][name] = {
        "seed": seed, "tried": dict(tried), "right": dict(right), "notes": _worst(earlier.get("notes", {}), outcome.notes),
        "problems": [*earlier.get("problems", []), *outcome.problems][:SHOWN],
        "parts": [*earlier.get("parts", []), {"commit": commit, "tried": sum(outcome.tried.values()), "cpu": described["cpu"], "cores": described["cores"]}],
    }  # fmt: skip
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False, sort_keys=True) + "\n", "utf-8")
