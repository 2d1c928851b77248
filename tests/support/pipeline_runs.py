"""What is read of a run of a recipe, and of what it leaves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bertopt.results import Report
from tests.support.shared_workers import SharedWorkers

Run = Callable[..., Report]
INT8 = {"int8": {"cosine_min": -1.0, "cosine_mean": -1.0, "rel_l2": 9.0, "label_flips_max": 1.0}}
TEXTS = ["the cat sat on the mat", "a very good film , not bad !"]


def statuses(report: Report) -> dict[str, str]:
    return {row.name: row.status for row in report.stages[1:]}


def reused(report: Report) -> list[str]:
    return [row.name for row in report.stages if row.reused]


def stage_names(out: Path) -> list[str]:
    return sorted(path.name.rpartition("-")[0] for path in (out / "stages").iterdir())


def nothing_left(out: Path, workers: SharedWorkers) -> bool:
    """No worker and no half-written stage remains. The server forks every worker, so they are its children."""
    server = workers._server.pid
    children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    return not children and not list((out / "stages").glob(".part-*"))
