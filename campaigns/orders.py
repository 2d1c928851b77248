"""`python -m campaigns.orders`: every ordered pair and triple of the built-in passes is refused with a reason, or works.

Each pass stands with its defaults (and what `OPTIONS` adds), each order starts from a tiny checkpoint; where its first
pass takes a form that no checkpoint has, the passes that make the form come before. What the recipe checker lets
through is built, opened in a fresh worker and compared with the checkpoint by `bertopt.run`, as one tree, so that
orders share their beginnings. Prints a table; exits with 1 where an order was let through and then failed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from bertopt import passes, pipeline
from bertopt import recipe as recipes
from bertopt.core import Eager, Model
from bertopt.errors import UsageError
from bertopt.pipeline import ReportCallback
from bertopt.results import Report, Stage
from tests.support.example_passes import make_cheap
from tests.support.tiny_models import write_tiny

Order = tuple[str, ...]
OUTCOMES = ("ok", "built", "refused", "missing", "broken")
PROFILE = {"min": [1, 1], "opt": [2, 8], "max": [4, 16]}
#: What a pass needs besides its defaults. Engines are built ahead of time, for a GPU that need not be here.
OPTIONS: dict[str, dict[str, Any]] = {
    "build_tensorrt": {"library": "tensorrt_rtx", "targets": ["sm86"], "profiles": [PROFILE]}
}
#: Passes that no order on a CPU takes: one needs a GPU.
LEFT_OUT = ("capture_graphs",)
#: What a pass follows besides the form that it takes.
FOLLOWS: dict[str, Order] = {"quantize_fp8": ("cast_half",)}
SHAPES = [[1, 8], [3, 8]]
TEXTS = ["the cat sat on the mat", "a very good film , not bad !", "it was bad", "they ran", "the dog is not good"] * 8
#: A tiny random model's labels are close to each other: a few flip in reduced precision, as in tests/support/lab.py.
LIMITS = {
    "bfloat16": {"label_flips_max": 0.1, "cosine_min": 0.998},
    "float16": {"label_flips_max": 0.06},
    "int8": {"label_flips_max": 0.1},
}


@dataclass(frozen=True)
class Case:
    """What came of an order: refused, ok, built (it needs a GPU to run), missing (a library is), or broken."""

    order: Order
    line: Order
    """All passes from the checkpoint on: the order, and before it what its first pass needs."""
    outcome: str
    reason: str | None


def built_in() -> list[str]:
    """The passes of bertopt itself, in the order of its registry."""
    named = (name for name, cls in passes.all_passes().items() if cls.__module__.startswith("bertopt.passes."))
    return [name for name in named if name not in LEFT_OUT]


def orders(names: Sequence[str], length: int) -> list[Order]:
    """Every ordered choice of `length` passes, repeats included."""
    return list(itertools.product(names, repeat=length))


def lead(name: str) -> Order:
    """The fewest passes that make what `name` takes out of a checkpoint."""
    takes = passes.require(name).forms()[0]
    reached: dict[type[Model], Order] = {Eager: ()}
    while not any(issubclass(form, takes) for form in reached):
        size = len(reached)
        for maker in built_in():
            needs, gives = passes.require(maker).forms()
            if needs in reached and gives not in reached:
                reached[gives] = (*reached[needs], maker)
        assert len(reached) > size, f"no pass gives what {name} takes"
    return next(order for form, order in reached.items() if issubclass(form, takes)) + FOLLOWS.get(name, ())


def as_recipe(model: Path, tree: Iterable[Order], texts: Path | None = None) -> dict[str, Any]:
    """One recipe for all orders: a step for each of their beginnings. A stage that fails ends its own branch only."""
    nodes = sorted(
        {order[:end] for order in tree for end in range(1, len(order) + 1)}, key=lambda node: (len(node), node)
    )
    names = {node: f"{node[-1]}-{number}" for number, node in enumerate(nodes, 1)}
    steps = [
        {"pass": node[-1], "name": names[node], "after": names.get(node[:-1], "reference"), "on_fail": "revert"}
        | OPTIONS.get(node[-1], {})
        for node in nodes
    ]
    inputs = {"shapes": SHAPES} | ({"texts": str(texts)} if texts else {})
    return {
        "schema_version": 1,
        "model": str(model),
        "device": "cpu",
        "inputs": inputs,
        "limits": LIMITS,
        "steps": steps,
    }


def refusal(model: Path, line: Order) -> str | None:
    """Why the recipe checker refuses these passes, each after the one before it; None where it does not."""
    try:
        recipes.from_dict(as_recipe(model, [line]))
    except UsageError as error:
        return str(error).replace("<dict>:", "")
    return None


def check(model: Path, wanted: Iterable[Order], out: Path, on_report: ReportCallback | None = None) -> list[Case]:
    """What comes of every order. `out` is where stages are built; those that lie there already are used again."""
    lines = {order: (*lead(order[0]), *order) for order in wanted}
    refusals = {line: refusal(model, line) for line in lines.values()}
    accepted = [line for line, reason in refusals.items() if reason is None]
    rows: dict[Order, Stage] = {}
    if accepted:
        texts = out / "texts.txt"
        texts.write_text("\n".join(TEXTS) + "\n")
        rows = by_line(
            pipeline.run(recipes.from_dict(as_recipe(model, accepted, texts)), out, build_only=True, on_report=on_report)
        )
    cases = []
    for order, line in lines.items():
        reason = refusals[line]
        outcome, why = ("refused", reason) if reason is not None else _outcome(line, rows)
        cases.append(Case(order, line, outcome, why))
    return cases


def by_line(report: Report) -> dict[Order, Stage]:
    rows = {row.name: row for row in report.stages}

    def line(row: Stage) -> Order:
        assert row.pass_ is not None and row.after is not None
        return (*(line(rows[row.after]) if row.after != "reference" else ()), row.pass_)

    return {line(row): row for row in report.stages[1:]}


def _outcome(line: Order, rows: dict[Order, Stage]) -> tuple[str, str | None]:
    """From the stage's own row, or that of the first stage it starts from that is not as it should be."""
    for end in range(1, len(line) + 1):
        row = rows[line[:end]]
        if row.status == "ok" or (row.status == "unverified" and row.form == "engine"):
            continue
        where = "" if end == len(line) else f"after {' > '.join(line[:end])}: "
        missing = row.status == "unsupported" and "pip install" in (row.reason or "")
        return "missing" if missing else "broken", f"{where}{row.status}: {row.reason}"
    return ("built", row.reason) if row.status == "unverified" else ("ok", None)


def table(cases: Sequence[Case]) -> str:
    """The pairs one a line, how many orders came to what, and everything broken with its reason."""
    pairs = [case for case in cases if len(case.order) == 2]
    width = max((len(_shown(case)) for case in pairs), default=0)
    lines = [
        f"{_shown(case):{width}}  {case.outcome:8} {(case.reason or '').partition(chr(10))[0]}".rstrip()
        for case in pairs
    ]
    for length, name in ((2, "pairs"), (3, "triples")):
        counts = Counter(case.outcome for case in cases if len(case.order) == length)
        shown = ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES)
        lines.append(f"{counts.total()} {name}: {shown}")
    lines += [f"BROKEN {_shown(case)}: {case.reason}" for case in cases if case.outcome == "broken"]
    return "\n".join(lines)


def _shown(case: Case) -> str:
    before = " > ".join(case.line[: -len(case.order)])
    return (f"({before}) > " if before else "") + " > ".join(case.order)


def _tell(_: Report, doing: str | None, __: float | None) -> None:
    if doing:
        print(doing, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[2])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every order with its outcome and reason")
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep the stages here, and use those of an earlier run")
    parser.add_argument("--pairs", action="store_true", help="leave out the triples")
    chosen = parser.parse_args()
    wanted = [order for length in ((2,) if chosen.pairs else (2, 3)) for order in orders(built_in(), length)]
    with tempfile.TemporaryDirectory(prefix="bertopt-orders-") as scratch, pytest.MonkeyPatch.context() as patch:
        make_cheap(patch)
        out = chosen.out or Path(scratch)
        out.mkdir(parents=True, exist_ok=True)
        model = out / "model"
        if not model.exists():
            write_tiny(model)
        cases = check(model, wanted, out, _tell)
    print(table(cases))
    if chosen.json:
        chosen.json.write_text(json.dumps([asdict(case) for case in cases], indent=1) + "\n", "utf-8")
    return int(any(case.outcome == "broken" for case in cases))


if __name__ == "__main__":
    sys.exit(main())
