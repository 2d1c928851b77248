"""Hang, crash and kill workers whose children try to get away: `python -m campaigns.hung_workers [--times 30]`.

Each time a recipe runs for real: a stage that misbehaves, then one that does not. All processes must be gone within
the stage's timeout + 5 s, the report must say what happened, and the next stage or the next run must be ok.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import bertopt
from bertopt.system import process_tree
from tests.support import example_passes

TIMEOUT_S, GRACE_S = 2.0, 5.0
CHILDREN = ("none", "plain", "setsid", "daemon", "deaf", "stopped")
#: How the worker ends, the exit code that the run must have, and words of its reason.
ENDS = {
    "hang": (7, "took longer than"),
    "SIGSEGV": (1, "signal SIGSEGV"),
    "SIGKILL": (5, "memory runs out"),
    "stop": (7, "took longer than"),
    "deaf": (7, "took longer than"),
    "exit": (1, "exit code 3"),
}


class Watch(threading.Thread):
    """Notes when the first process was noted in the directory `pids`, and when the last of those was gone."""

    def __init__(self, pids: Path) -> None:
        super().__init__(daemon=True)
        self.pids, self.stop = pids, threading.Event()
        self.born = self.seen = 0.0

    def run(self) -> None:
        while not self.stop.wait(0.02):
            # A worker without children may be noted and gone between two looks.
            if self.alive() or (not self.born and any(self.pids.iterdir())):
                self.seen = time.monotonic()
                self.born = self.born or self.seen

    def alive(self) -> list[int]:
        return [int(path.name) for path in self.pids.iterdir() if process_tree.runs(int(path.name))]


def marked(mark: str) -> list[int]:
    """Process ids of whatever carries `mark` in its environment: worker servers, workers and all they started."""
    found = []
    for path in Path("/proc").iterdir():
        try:
            if path.name.isdigit() and mark.encode() in (path / "environ").read_bytes().split(b"\0"):
                found.append(int(path.name))
        except OSError:
            continue
    return found


def once(number: int, folder: Path, model: Path, child: str, end: str) -> list[str]:
    """One run with a misbehaving stage, and the run after it; everything that was not as it must be."""
    pids = folder / f"pids-{number}"
    pids.mkdir()
    os.environ["BERTOPT_TEST_OUT"] = str(pids)
    on_fail = "stop" if number % 2 else "revert"
    bad: dict[str, Any] = {"pass": "family", "child": child, "end": end, "pids": str(pids), "timeout": TIMEOUT_S}
    recipe: dict[str, Any] = {
        "schema_version": 1, "model": str(model), "device": "cpu",
        "inputs": {"shapes": [[1, 8]], "texts": str(folder / "texts.txt")},
        "steps": [{**bad, "on_fail": on_fail}, {"pass": "touch"}],
    }  # fmt: skip
    watch = Watch(pids)
    watch.start()
    report = bertopt.run(recipe, folder / "out")
    watch.stop.set()
    watch.join()
    took = watch.seen - watch.born
    code, words = ENDS[end]
    row = report.stage("family")
    problems = []
    if not watch.born or len(list(pids.iterdir())) != (1 if child == "none" else 3):
        problems.append("its processes were not all seen")
    if took > TIMEOUT_S + GRACE_S or watch.alive():
        problems.append(f"gone only after {took:.1f} s, or not at all: {watch.alive()}")
    if left := marked(f"BERTOPT_TEST_OUT={pids}"):
        problems.append(f"{left} outlived the run")
    if words not in (row.reason or ""):
        problems.append(f"the reason must say '{words}'; got '{row.reason}'")
    if end in ("hang", "SIGSEGV") and "example_passes.py" not in str(row.facts.get("log")):
        problems.append("the report does not show where it was")
    if on_fail == "revert" and (row.status, report.stage("touch").status, report.exit_code) != ("reverted", "ok", 0):
        problems.append(f"the next stage is {report.stage('touch').status}: {report.stage('touch').reason}")
    if on_fail == "stop":
        if report.exit_code != code:
            problems.append(f"the exit code must be {code}; got {report.exit_code}")
        after = bertopt.run({**recipe, "steps": [{"pass": "touch"}]}, folder / "out")
        if after.exit_code != 0 or after.stage("touch").status != "ok":
            problems.append(f"the next run is {after.exit_code}: {after.reason}")
    print(f"{number}: {end}, children {child}: gone {took:.2f} s after they were seen", *problems, sep="; ", flush=True)
    return problems


def main() -> int:
    from tests.support.tiny_models import write_tiny

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=30)
    arguments = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory(prefix="bertopt-hung-") as scratch, pytest.MonkeyPatch.context() as patch:
        example_passes.make_cheap(patch)
        folder = Path(scratch)
        (folder / "texts.txt").write_text("the cat sat on the mat\na very good film , not bad !\n")
        model = write_tiny(folder / "tiny")
        mixed = itertools.cycle(itertools.product(ENDS, CHILDREN))
        # 7 and 36 have no common divisor: a few times already mix all ends and all children.
        cases = [case for i, case in enumerate(itertools.islice(mixed, 7 * arguments.times)) if i % 7 == 0]
        for number, (end, child) in enumerate(cases):
            failed += bool(once(number, folder, model, child, end))
    gone = arguments.times - failed
    print(
        f"{gone} of {arguments.times} hung or crashing workers: all gone within {TIMEOUT_S:g} + {GRACE_S:g} s, the rest unaffected"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
