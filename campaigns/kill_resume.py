"""Kill an export at random moments and resume it: `python -m campaigns.kill_resume [--times 50]`.

Whatever the moment, no committed stage may be damaged, nothing may keep running, and the resumed run must end in
the artefact that an uninterrupted one gives.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

#: Runs the command line with timing that takes no time: what is timed is no part of what is compared.
EXPORT = """
import sys
from bertopt.checks import latency
from bertopt.cli import main
from bertopt.pipeline.race import Budget
latency.TURN_MS = 1.0
Budget.of = lambda _: Budget(0.0, 0.0, min_rounds=3)
main(["export", *sys.argv[1:]])
"""
RECIPE = """
schema_version: 1
model: {model}
device: cpu
inputs: {{shapes: [[1, 8], [2, 8]], texts: {texts}}}
limits: {{int8: {{cosine_min: -1, cosine_mean: -1, rel_l2: 9, label_flips_max: 1}}}}
steps:
  - pass: use_sdpa
  - pass: export_onnx
  - pass: fuse_ort
  - pass: quantize_int8
"""


def write_recipe(folder: Path, model: Path) -> Path:
    (folder / "texts.txt").write_text("the cat sat on the mat\na very good film , not bad !\n")
    (folder / "recipe.yaml").write_text(RECIPE.format(model=model, texts=folder / "texts.txt"))
    return folder / "recipe.yaml"


def start(recipe: Path, out: Path, script: str = EXPORT) -> subprocess.Popen[str]:
    """An export of `recipe` in a new session. Its processes carry `out` in their environment."""
    return subprocess.Popen(
        [sys.executable, "-c", script, str(recipe), "--out", str(out)], start_new_session=True, text=True,
        cwd=Path(__file__).parents[1],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "BERTOPT_TEST_OUT": str(out)},
    )  # fmt: skip


def running(out: Path) -> list[int]:
    """Process ids of what `start` started for `out`: the export, its worker server and its workers."""
    mark = f"BERTOPT_TEST_OUT={out}".encode()
    found = []
    for path in Path("/proc").iterdir():
        try:
            # A zombie's environment is empty.
            if path.name.isdigit() and mark in (path / "environ").read_bytes().split(b"\0"):
                found.append(int(path.name))
        except OSError:
            continue
    return found


def vanish(out: Path, seconds: float = 30.0) -> list[int]:
    """Wait until nothing runs for `out`; what still does when the time is up."""
    deadline = time.monotonic() + seconds
    while (left := running(out)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def stages(out: Path) -> list[Path]:
    """The committed stages in `out`."""
    return sorted(path for path in (out / "stages").glob("*") if not path.name.startswith(".part-"))


def corrupt(out: Path) -> list[str]:
    """The committed stages that do not verify."""
    from bertopt.errors import BertoptError
    from bertopt.stages import verify

    found = []
    for path in stages(out):
        try:
            verify(path)
        except BertoptError as error:
            found.append(f"{path}: {error}")
    return found


def finish(recipe: Path, out: Path) -> str:
    """Run to the end; the artefact's content hash, or what went wrong."""
    from bertopt.stages import read_manifest

    process = start(recipe, out)
    _, said = process.communicate(timeout=600)
    return read_manifest(out / "artifact").content_sha256 if process.returncode == 0 else f"exit {process.returncode}: {said}"


def main() -> int:
    from tests.support.tiny_models import write_tiny

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    problems: list[str] = []
    damaged = resumed = 0
    with tempfile.TemporaryDirectory(prefix="bertopt-kill-") as scratch:
        folder = Path(scratch)
        recipe = write_recipe(folder, write_tiny(folder / "tiny"))
        began = time.monotonic()
        expected = finish(recipe, folder / "whole")
        duration = time.monotonic() - began
        print(f"uninterrupted: {duration:.1f} s, artefact {expected[:12]}", flush=True)
        if expected.startswith("exit"):
            print(expected)
            return 1
        for number in range(arguments.times):
            out, moment = folder / f"run-{number}", rng.uniform(0, duration)
            process = start(recipe, out)
            time.sleep(moment)
            os.kill(process.pid, signal.SIGKILL)
            process.communicate()
            left, bad, kept = vanish(out), corrupt(out), len(stages(out))
            got = finish(recipe, out)
            damaged, resumed = damaged + len(bad), resumed + (got == expected)
            problems += [f"kill {number} at {moment:.2f} s: {problem}" for problem in bad]
            problems += [f"kill {number} at {moment:.2f} s: {left} still run"] if left else []
            problems += [f"kill {number} at {moment:.2f} s: ended in {got}"] if got != expected else []
            print(f"{number}: killed at {moment:.2f} s, {kept} stages kept, {got[:12]}", flush=True)
    print(*problems, sep="\n", end="\n" if problems else "")
    print(f"{arguments.times} kills, {damaged} corrupt stages, {resumed} resumed to the same artefact")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
