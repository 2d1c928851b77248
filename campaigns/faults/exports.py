"""Exports of a tiny model in processes of their own, as the campaigns need them: limited, killed, or beside each other."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bertopt.checks.framing import Frame
from bertopt.spec import Spec
from campaigns.kill_resume import EXPORT, write_recipe

ROOT = Path(__file__).parents[2]


def cheapen() -> None:
    """Leave two sweeps of coverage and no run in a new interpreter: a campaign asks how an export ends, not what it proves."""
    from bertopt.checks import sweep_plan
    from bertopt.pipeline.job import Job

    Job._run_copy = lambda *_: None  # type: ignore[method-assign]

    whole = sweep_plan.plan

    def plan(spec: Spec, seed: int, most_tokens: int, frame: Frame | None = None) -> sweep_plan.Plan:
        probes = whole(spec, seed, most_tokens, frame).probes
        return sweep_plan.Plan(seed, (probes[0], probes[-1]), frozenset({probes[0].name}), frame)

    sweep_plan.plan = plan


def recipe_in(folder: Path) -> Path:
    """Write a tiny model and a recipe of four steps, and return the recipe."""
    from tests.support.tiny_models import write_tiny

    folder.mkdir(parents=True, exist_ok=True)
    return write_recipe(folder, write_tiny(folder / "tiny"))


def start(
    recipe: Path, out: Path | str, prefix: Sequence[str] = (), script: str = EXPORT, **environment: str
) -> subprocess.Popen[str]:
    """Start an export. `prefix` is a command that starts it, such as `prlimit`."""
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", script, str(recipe), "--out", str(out)], text=True, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "BERTOPT_TEST_OUT": str(out), **environment},
    )  # fmt: skip


def ended(process: subprocess.Popen[str], seconds: float = 900.0) -> tuple[int, str]:
    """Wait for an export and return its exit code and stderr."""
    try:
        _, said = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        _, said = process.communicate()
        return 124, f"{said}\nstill running after {seconds:g} s"
    return process.returncode, said


def judged(code: int, said: str, promised: Sequence[int]) -> str | None:
    """Return what was wrong with how an export ended: another exit code than promised, a traceback, no reason."""
    last = said.strip().splitlines()[-1] if said.strip() else ""
    if code not in promised:
        return f"exit {code}, promised {'/'.join(map(str, promised))}: {last[:200]}"
    if "Traceback (most recent call last)" in said:
        return f"exit {code} with a traceback: {last[:200]}"
    if code and not last:
        return f"exit {code} without a reason"
    return None
