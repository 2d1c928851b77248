"""Kill exports with SIGKILL: `python -m campaigns.faults.kills [--times 270]`.

Of 270, 200 kill bertopt, 50 a worker and 20 the server of the workers, at random moments. In parts: `--add --seconds 300`.
No committed stage may be damaged, nothing may keep running, the next run must end in the artefact of a run that nobody
killed, and leave no temporary directory behind. Not looked at: kills while Python starts (exports are forked), or while
the delivered copy runs in a new interpreter; what a power cut loses besides (see power).
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

from bertopt.stages import read_manifest
from campaigns.faults import exports, forked, outcome
from campaigns.kill_resume import corrupt

SHARES = ("server",) * 2 + ("worker",) * 5 + ("parent",) * 20
EAGER_STEPS = "steps: [{pass: use_sdpa}, {pass: merge_qkv}]\n"


def run(times: int, seed: int, scratch: Path) -> outcome.Outcome:
    """Kill `times` exports."""
    rng, result = random.Random(seed), outcome.Outcome()
    temporary = scratch / "tmp"
    temporary.mkdir()
    forked.prepare()
    recipe = exports.recipe_in(scratch / "eager")
    recipe.write_text(recipe.read_text().partition("steps:")[0] + EAGER_STEPS)
    began = time.monotonic()
    code = forked.start(recipe, scratch / "whole", temporary, scratch / "said").wait()
    duration = time.monotonic() - began
    if code or forked.left():
        result.count("uninterrupted", f"exit {code}: {(scratch / 'said').read_text()[-500:]}")
        return result
    expected = read_manifest(scratch / "whole" / "artifact").content_sha256
    for number in outcome.in_time(range(times)):
        whom = SHARES[number % len(SHARES)]
        problem = _killed(recipe, scratch, temporary, whom, rng.uniform(0, duration), expected)
        result.count(f"{whom} killed", f"number {number}: {problem}" if problem else None)
    return result


def _killed(recipe: Path, scratch: Path, temporary: Path, whom: str, moment: float, expected: str) -> str | None:
    out, said = scratch / "out", scratch / "said"
    shutil.rmtree(out, ignore_errors=True)
    process = forked.start(recipe, out, temporary, said)
    deadline, victim = time.monotonic() + moment, process.pid
    while whom != "parent" and process.poll() is None:
        chosen = _family(process.pid)[whom]
        if time.monotonic() >= deadline and chosen:
            victim = chosen[-1]
            break
        time.sleep(0.01)
    if whom == "parent":
        time.sleep(moment)
    with contextlib.suppress(ProcessLookupError):
        if process.poll() is None:
            os.kill(victim, signal.SIGKILL)
    code = process.wait()
    problems = [f"{moment:.2f} s: {problem}" for problem in corrupt(out)] if out.exists() else []
    if whom != "parent" and (wrong := exports.judged(code, said.read_text("utf-8", "replace"), (0, 5))):
        problems.append(wrong)
    if still := forked.left():
        problems.append(f"{still} still run")
    code = forked.start(recipe, out, temporary, said).wait()
    got = read_manifest(out / "artifact").content_sha256 if code == 0 else f"exit {code}: {said.read_text()[-300:]}"
    if got != expected:
        problems.append(f"resumed to {got}")
    if still := forked.left():
        problems.append(f"{still} still run after the resumed run")
    if kept := [path.name for path in temporary.iterdir() if path.name.startswith("bertopt-")]:
        problems.append(f"temporary directories stay: {kept}")
    return "; ".join(problems) or None


def _family(parent: int) -> dict[str, list[int]]:
    """The server of the workers and the workers of an export."""
    import psutil

    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(parent).children():
            return {"server": [child.pid], "worker": [worker.pid for worker in child.children()]}
    return {"server": [], "worker": []}


if __name__ == "__main__":
    sys.exit(outcome.main("kills", __doc__ or "", run, 270))
