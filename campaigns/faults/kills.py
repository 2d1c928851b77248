"""Kill exports with SIGKILL: `python -m campaigns.faults.kills [--times 270]`.

Of `times`, three in four kill bertopt, one in five a worker and the rest the server of the workers, at random moments.
No committed stage may be damaged, nothing may keep running, the next run must end in the artefact of a run that nobody
killed, and leave no temporary directory behind. Once, an export is also watched for a power cut: every file of a
directory must be on disk (fsync) before a rename shows it. Not looked at: what a disk does that lies about fsync.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from pathlib import Path

from bertopt.stages import read_manifest
from campaigns.faults import exports, outcome
from campaigns.kill_resume import EXPORT, corrupt, vanish

#: An export that says of every rename of a directory or file of its output which of its files were not fsynced before.
WATCHED = '''
import os, pathlib, sys
synced, real_fsync, real_rename, real_replace = {}, os.fsync, os.rename, os.replace
def fsync(fd):
    real_fsync(fd)
    seen = os.fstat(fd)
    synced[seen.st_dev, seen.st_ino] = seen.st_mtime_ns
def look(source, target):
    source = pathlib.Path(source)
    if os.environ["BERTOPT_TEST_OUT"] in str(source):
        for path in [source, *source.rglob("*")] if source.is_dir() else [source]:
            seen = path.stat()
            late = synced.get((seen.st_dev, seen.st_ino)) != seen.st_mtime_ns
            print(f"POWER {'LOST' if late else 'KEPT'} {path}", file=sys.stderr)
def rename(source, target, **more):
    look(source, target)
    return real_rename(source, target, **more)
def replace(source, target, **more):
    look(source, target)
    return real_replace(source, target, **more)
os.fsync, os.rename, os.replace = fsync, rename, replace
''' + EXPORT  # fmt: skip


def run(times: int, seed: int, scratch: Path) -> outcome.Outcome:
    """Kill `times` exports."""
    rng, result = random.Random(seed), outcome.Outcome()
    recipe, temporary = exports.recipe_in(scratch), scratch / "tmp"
    temporary.mkdir()
    began = time.monotonic()
    code, said = exports.ended(exports.start(recipe, scratch / "whole", script=WATCHED, TMPDIR=str(temporary)))
    duration = time.monotonic() - began
    if code:
        result.count("uninterrupted", f"exit {code}: {said[-500:]}")
        return result
    expected = read_manifest(scratch / "whole" / "artifact").content_sha256
    for line in said.splitlines():
        if line.startswith("POWER "):
            result.count("files on disk before a rename shows them", f"not synced: {line[11:]}" if "LOST" in line else None)
    for number in range(times):
        whom = "parent" if number < times * 0.74 else "worker" if number < times * 0.926 else "server"
        result.count(f"{whom} killed", _killed(recipe, scratch / f"run-{number}", temporary, whom, rng.uniform(0, duration), expected))
    return result


def _killed(recipe: Path, out: Path, temporary: Path, whom: str, moment: float, expected: str) -> str | None:
    process = exports.start(recipe, out, TMPDIR=str(temporary))
    deadline, victim = time.monotonic() + moment, process.pid
    while whom != "parent" and process.poll() is None:
        family = _family(process.pid)
        chosen = family.get(whom, [])
        if time.monotonic() >= deadline and chosen:
            victim = chosen[-1]
            break
        time.sleep(0.02)
    if whom == "parent":
        time.sleep(moment)
    with contextlib.suppress(ProcessLookupError):
        os.kill(victim, signal.SIGKILL)
    code, said = exports.ended(process)
    problems = [f"{moment:.2f} s: {problem}" for problem in corrupt(out)] if out.exists() else []
    if whom != "parent" and (wrong := exports.judged(code, said, (0, 5))):
        problems.append(wrong)
    if left := vanish(out):
        problems.append(f"{left} still run")
    code, said = exports.ended(exports.start(recipe, out, TMPDIR=str(temporary)))
    got = read_manifest(out / "artifact").content_sha256 if code == 0 else f"exit {code}: {said[-300:]}"
    if got != expected:
        problems.append(f"resumed to {got}")
    if kept := [path.name for path in temporary.iterdir() if path.name.startswith("bertopt-")]:
        problems.append(f"temporary directories stay: {kept}")
    return "; ".join(problems) or None


def _family(parent: int) -> dict[str, list[int]]:
    """The server of the workers and the workers of an export."""
    import psutil

    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(parent).children():
            if "bertopt.workers.server" in child.cmdline():
                return {"server": [child.pid], "worker": [worker.pid for worker in child.children()]}
    return {}


if __name__ == "__main__":
    sys.exit(outcome.main("kills", __doc__ or "", run, 270))
