"""Cut the power of exports: `python -m campaigns.faults.power [--times 100]`.

At a random moment the export and its workers are killed, and what they had not asked the kernel to keep is lost: files
without fsync since their last write become empty, half as long or zeros, renames without fsync of their directory may be
undone. No stage that is then there may be damaged, and the next run must end in the artefact of a run without a cut.
Needs a C compiler. Not looked at: deleted files that come back, writes of one file that arrive out of order, and disks that
lie about fsync.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from bertopt.stages import read_manifest
from campaigns.faults import exports, forked, outcome
from campaigns.faults.kills import EAGER_STEPS
from campaigns.kill_resume import corrupt

SOURCE = Path(__file__).with_name("power_log.c")
LOG = "BERTOPT_POWER_LOG"


def run(times: int, seed: int, scratch: Path) -> outcome.Outcome:
    """Cut the power of `times` exports."""
    rng, result, log = random.Random(seed), outcome.Outcome(), Path(os.environ[LOG])
    temporary, said = scratch / "tmp", scratch / "said"
    temporary.mkdir()
    forked.prepare()
    recipe = exports.recipe_in(scratch / "eager")
    recipe.write_text(recipe.read_text().partition("steps:")[0] + EAGER_STEPS)
    began = time.monotonic()
    code = forked.start(recipe, scratch / "whole", temporary, said).wait()
    duration = time.monotonic() - began
    if code or forked.left() or not log.exists():
        result.count("uninterrupted", f"exit {code}: {said.read_text()[-500:]}")
        return result
    expected = read_manifest(scratch / "whole" / "artifact").content_sha256
    out = scratch / "out"
    for number in outcome.in_time(range(times)):
        shutil.rmtree(out, ignore_errors=True)
        log.unlink(missing_ok=True)
        process = forked.start(recipe, out, temporary, said)
        time.sleep(rng.uniform(0, duration))
        _kill(process)
        lost, undone = cut(out, log.read_text("utf-8") if log.exists() else "", rng)
        result.notes["files lost"] = result.notes.get("files lost", 0) + lost
        result.notes["renames undone"] = result.notes.get("renames undone", 0) + undone
        problems = corrupt(out) if out.exists() else []
        code = forked.start(recipe, out, temporary, said).wait()
        got = read_manifest(out / "artifact").content_sha256 if code == 0 else f"exit {code}: {said.read_text()[-300:]}"
        if got != expected:
            problems.append(f"resumed to {got}")
        forked.left()
        result.count("power cut", f"number {number}: {'; '.join(problems)}" if problems else None)
    return result


def _kill(process: forked.Forked) -> None:
    """Kill an export and all it started, as far as possible at once."""
    family = [psutil.Process(process.pid)]
    family += family[0].children(recursive=True)
    for each in family:
        each.suspend()
    for each in family:
        each.kill()
    forked.left()


def cut(out: Path, log: str, rng: random.Random) -> tuple[int, int]:
    """Lose of `out` what `log` does not show as kept; return how many files were changed and renames undone."""
    kept: dict[tuple[int, int], tuple[int, int]] = {}
    renames: list[tuple[Path, Path, int]] = []
    synced_at: dict[tuple[int, int], int] = {}
    for moment, line in enumerate(log.splitlines()):
        what, *fields = line.split("\t")
        if what == "fsync":
            device, inode, modified, size = map(int, fields)
            kept[device, inode], synced_at[device, inode] = (modified, size), moment
        elif fields[1].startswith(f"{out}{os.sep}") and fields[2] == "0":
            renames.append((Path(fields[0]), Path(fields[1]), moment))
    lost = undone = 0
    for path in sorted(path for path in out.rglob("*") if path.is_file() and not path.is_symlink()):
        seen = path.stat()
        if seen.st_size and kept.get((seen.st_dev, seen.st_ino)) != (seen.st_mtime_ns, seen.st_size):
            content = rng.choice((b"", path.read_bytes()[: seen.st_size // 2], bytes(seen.st_size)))
            path.write_bytes(content)
            lost += 1
    for source, target, moment in reversed(renames):
        if not target.exists() or source.exists() or not source.parent.is_dir():
            continue
        parent = target.parent.stat()
        if synced_at.get((parent.st_dev, parent.st_ino), -1) < moment and rng.random() < 0.5:
            target.rename(source)
            undone += 1
    return lost, undone


def main() -> int:
    """Start again with the log preloaded, and run."""
    if LOG not in os.environ:
        with tempfile.TemporaryDirectory(prefix="bertopt-power-log-") as folder:
            library = Path(folder) / "power_log.so"
            compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("g++")
            if compiler is None:
                sys.exit("this campaign needs a C compiler: apt-get install gcc")
            subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-x", "c", "-o", library, SOURCE, "-ldl"], check=True)
            environment = {**os.environ, "LD_PRELOAD": str(library), LOG: str(Path(folder) / "log")}
            return subprocess.run([sys.executable, "-m", "campaigns.faults.power", *sys.argv[1:]], env=environment, check=False).returncode
    return outcome.main("power", __doc__ or "", run, 100)


if __name__ == "__main__":
    sys.exit(main())
