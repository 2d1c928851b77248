"""Export hostile checkpoints: `python -m campaigns.faults.hostile`.

Each must end in a promised exit code, with one line that says why and no traceback, run none of the checkpoint's code, and
stay within 60 s and 4 GB. In parts: `--times 50 --add`, once for each fifty. Not looked at: memory of a process that its parent
did not wait for.
"""

from __future__ import annotations

import contextlib
import io
import os
import resource
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from bertopt.cli import main as bertopt_main
from campaigns.faults import exports, outcome
from campaigns.faults.checkpoints import Hostile, every
from tests.support.shared_workers import cheap_workers
from tests.support.tiny_models import write_tiny

SECONDS, BYTES = 60.0, 4 * 2**30
RECIPE = """
schema_version: 1
model: {model}
device: cpu
inputs: {{shapes: [[2, 8]]}}
steps: [{{pass: use_sdpa}}]
"""


def try_one(case: Hostile, good: Path, scratch: Path) -> dict[str, Any]:
    """Return the exit code, the last line of stderr, seconds, and what was wrong with them."""
    directory, out = scratch / "model", scratch / "out"
    for path in (directory, out):
        shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(good, directory)
    case.spoil(directory)
    canary = Path("CANARY")
    (scratch / "recipe.yaml").write_text(RECIPE.format(model=directory))
    said, started = io.StringIO(), time.monotonic()
    code: int | str | None = 0
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            bertopt_main(["export", str(scratch / "recipe.yaml"), "--out", str(out)])
        except SystemExit as ended:
            code = ended.code
        except BaseException as error:
            code = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - started
    text = said.getvalue()
    wrong = []
    if code not in case.codes:
        wrong.append(f"exit {code}, promised {sorted(case.codes)}")
    if "Traceback" in text:
        wrong.append("a traceback")
    if "\x1b" in text:
        wrong.append("an escape sequence reaches the terminal")
    if len(text) > 5000:
        wrong.append(f"{len(text)} characters said")
    if seconds > SECONDS:
        wrong.append(f"{seconds:.0f} s")
    if canary.exists():
        canary.unlink()
        wrong.append("ran code of the checkpoint")
    last = text.strip().splitlines()[-1] if text.strip() else ""
    return {"case": case.name, "code": code, "seconds": round(seconds, 2), "last": last[:300], "wrong": wrong}


def run(times: int, seed: int, scratch: Path) -> outcome.Outcome:
    """Export `times` of the hostile checkpoints, from number `seed` × `times` on."""
    result, slowest = outcome.Outcome(), 0.0
    os.environ["PYTHONPATH"] = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    exports.cheapen()
    with cheap_workers("pipeline") as shared:
        good = write_tiny(scratch / "good", "bert", "text-classification")
        for case in outcome.in_time(list(every())[seed * times : (seed + 1) * times]):
            row = try_one(case, good, scratch)
            shared.close()
            result.count("hostile checkpoints", f"{case.name}: {'; '.join(row['wrong'])}; {row['last'][:100]}" if row["wrong"] else None)
            result.count("code of a checkpoint not run", "CANARY" if "ran code of the checkpoint" in row["wrong"] else None)
            slowest = max(slowest, row["seconds"])
            print(f"exit {row['code']}  {row['seconds']:5.1f} s  {row['case']}: {row['last'][:100]}", flush=True)
    largest = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) * 1024
    result.notes |= {f"part {seed}, slowest, s": slowest, f"part {seed}, largest process, GB": round(largest / 1e9, 2)}
    if largest > BYTES:
        result.problems.append(f"a process of {largest / 1e9:.1f} GB")
    return result


if __name__ == "__main__":
    sys.exit(outcome.main("hostile", __doc__ or "", run, 1000))
