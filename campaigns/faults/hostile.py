"""Export hostile checkpoints: `python -m campaigns.faults.hostile [--only WORD] [--json FILE]`.

Each must end in a promised exit code, with one line that says why and no traceback, run none of the checkpoint's code, and
stay within 60 s and 4 GB. Exit code 1 where one does not.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bertopt.cli import main as bertopt_main
from campaigns.faults.checkpoints import Hostile, every
from tests.support.shared_workers import SharedWorkers, cheap_workers
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


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m campaigns.faults.hostile", description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="bertopt-hostile-") as temporary, cheap_workers("pipeline") as shared:
        scratch = Path(temporary)
        os.environ["PYTHONPATH"] = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
        good = write_tiny(scratch / "good", "bert", "text-classification")
        for case in (case for case in every() if options.only in case.name):
            row = try_one(case, good, scratch)
            rows.append(row)
            print(f"{'WRONG' if row['wrong'] else 'right'}  exit {row['code']}  {row['seconds']:5.1f} s  {row['case']}: "
                  f"{'; '.join(row['wrong']) or row['last'][:100]}", flush=True)  # fmt: skip
            revive(shared)
    bad = [row for row in rows if row["wrong"]]
    print(f"{len(rows)} hostile checkpoints, {len(bad)} wrong, slowest {max(row['seconds'] for row in rows):.1f} s")
    if options.json:
        options.json.write_text(json.dumps({"cases": rows}, indent=1) + "\n")
    return 1 if bad else 0


def revive(workers: SharedWorkers) -> None:
    """Close what a case left open."""
    workers.close()


if __name__ == "__main__":
    sys.exit(main())
