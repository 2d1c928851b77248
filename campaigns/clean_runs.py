"""Run recipes with nothing wrong in them: `python -m campaigns.clean_runs [--times 100] [--first 0] [--json FILE]`.

Each seed draws a family, a task, a pooling, weights and a line of passes that the recipe checker accepts. Every stage
must end `ok`, `unsupported` or `unverified`; anything else is a false alarm. With `--json`, one line a run is appended
to FILE and the seeds already in it are not run again.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import bertopt
from bertopt import recipe as recipes
from bertopt.errors import BertoptError, UsageError
from tests.support.shared_workers import cheap_workers
from tests.support.tiny_models import FAMILIES, OTHER_FAMILIES, TASKS, write_tiny

POOLINGS = ("mean", "cls", "max", "mean_sqrt_len")
#: INT8 with one scale a tensor costs more than with one a channel, which default limits refuse: who asks for it states so.
PER_TENSOR = {"pass": "quantize_int8", "per_channel": False, "limits": {"error_ratio_max": 4.0}}
#: Passes with options, and how often each is drawn.
PASSES: tuple[tuple[dict[str, Any], float], ...] = (
    ({"pass": "use_sdpa"}, 3), ({"pass": "use_sdpa", "backend": "math"}, 1), ({"pass": "use_better_transformer"}, 1),
    ({"pass": "use_better_transformer", "nested_tensors": False}, 1), ({"pass": "keep_cls_only"}, 1),
    ({"pass": "merge_qkv"}, 2), ({"pass": "pack_sequences"}, 1), ({"pass": "pack_sequences", "row_length": 32}, 1),
    ({"pass": "cast_half"}, 1), ({"pass": "cast_half", "mode": "autocast"}, 1), ({"pass": "quantize_fp8"}, 1), ({"pass": "compile_torch"}, 3),
    ({"pass": "package_aot"}, 1), ({"pass": "build_native"}, 2), ({"pass": "build_native", "precision": "bf16"}, 1),
    ({"pass": "export_onnx"}, 4), ({"pass": "export_onnx", "opset": 20}, 2), ({"pass": "fuse_ort"}, 2),
    ({"pass": "cast_onnx_half"}, 1), ({"pass": "cast_onnx_half", "dtype": "bfloat16"}, 1),
    ({"pass": "quantize_int8"}, 2), (PER_TENSOR, 1), ({"pass": "convert_openvino"}, 1),
)  # fmt: skip
#: Passes that need a GPU.
LEFT_OUT = ("capture_graphs", "build_tensorrt")
LONGEST = 4
#: Share of runs that may compile, which takes ten times as long as all else.
COMPILING, SLOW = 0.06, ("compile_torch", "package_aot")
#: The default limits are measured on trained checkpoints. Random weights, scaled up so that every mistake shows, round
#: two to four times worse; float32 keeps its own. With two or three outputs, one rounding may cost half or twice another.
LIMITS = {
    "float16": {"rel_l2": 0.03, "cosine_min": 0.999, "label_flips_max": 0.05, "error_ratio_max": 1.6},
    "bfloat16": {"rel_l2": 0.25, "cosine_min": 0.98, "label_flips_max": 0.15, "error_ratio_max": 1.6},
    # Three logits near zero point anywhere after fp8 or INT8, so the worst single cosine of a random tagger says nothing.
    "float8": {"rel_l2": 0.7, "cosine_min": -1, "cosine_mean": 0.9, "label_flips_max": 0.25, "error_ratio_max": 1.6},
    "int8": {"rel_l2": 0.7, "cosine_min": -1, "cosine_mean": 0.9, "label_flips_max": 0.25, "error_ratio_max": 1.6},
}
GOOD = ("ok", "unsupported", "unverified", "skipped")


def draw(seed: int, folder: Path) -> tuple[str, dict[str, Any]]:
    """What the seed stands for, and its recipe; the checkpoint is written to `folder`."""
    rng = random.Random(seed)
    family, task = rng.choice(FAMILIES + OTHER_FAMILIES), rng.choice(TASKS)
    pooling = rng.choice((None, *POOLINGS)) if task == "feature-extraction" else None
    head: dict[str, Any] = {
        "schema_version": 1, "model": str(write_tiny(folder / "tiny", family, task, pooling, seed=seed)), "device": "cpu",
        "limits": LIMITS, "inputs": {"shapes": [[1, 8], [rng.choice((2, 3)), rng.choice((8, 13, 32))]]},
    }  # fmt: skip
    compiling = rng.random() < COMPILING
    known = [entry for entry in PASSES if compiling or entry[0]["pass"] not in SLOW]
    steps: list[dict[str, Any]] = []
    length = rng.randint(1, LONGEST)
    while len(steps) < length:
        used = {step["pass"] for step in steps}
        offered = [entry for entry in known if entry[0]["pass"] not in used and accepted(head, [*steps, entry[0]])]
        if not offered:
            break
        steps.append(rng.choices([step for step, _ in offered], [weight for _, weight in offered])[0])
    line = " ".join(":".join(str(value) for value in step.values()) for step in steps)
    return f"{family} {task} {pooling or '-'}: {line}", {**head, "steps": steps}


def accepted(head: dict[str, Any], steps: list[dict[str, Any]]) -> bool:
    try:
        recipes.from_dict({**head, "steps": steps})
    except UsageError:
        return False
    return True


def clean_run(seed: int) -> dict[str, Any]:
    """Run one seed; its stages' statuses and every alarm with its reason."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bertopt-clean-") as scratch:
        what, drawn = draw(seed, Path(scratch))
        try:
            report = bertopt.run(drawn, Path(scratch) / "out")
        except BertoptError as error:
            statuses, alarms = ["raised"], [f"{type(error).__name__}: {error}"]
        else:
            statuses = [row.status for row in report.stages[1:]]
            alarms = [f"{row.name}: {row.reason}" for row in report.stages if row.status not in GOOD]
    return {
        "seed": seed,
        "what": what,
        "statuses": statuses,
        "alarms": alarms,
        "seconds": round(time.monotonic() - start, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--json", type=Path, help="append one line a run here, and go on from what it has")
    arguments = parser.parse_args()
    seeds = range(arguments.first, arguments.first + arguments.times)
    done: dict[int, dict[str, Any]] = {}
    if arguments.json and arguments.json.exists():
        done = {entry["seed"]: entry for entry in map(json.loads, arguments.json.read_text().splitlines())}
    with cheap_workers("pipeline"):
        for seed in [seed for seed in seeds if seed not in done]:
            done[seed] = found = clean_run(seed)
            print(f"{seed:4} {found['seconds']:5.1f} s  {found['what']}  {' '.join(found['statuses'])}", flush=True)
            print(
                *(f"     ALARM {alarm}" for alarm in found["alarms"]),
                sep="\n",
                end="\n" if found["alarms"] else "",
                flush=True,
            )
            if arguments.json:
                with arguments.json.open("a") as file:
                    file.write(json.dumps(found) + "\n")
    runs = [done[seed] for seed in seeds]
    alarms = [entry for entry in runs if entry["alarms"]]
    statuses = Counter(status for entry in runs for status in entry["statuses"])
    print(
        f"{len(runs)} clean runs, {len(alarms)} false alarms; stages: {', '.join(f'{n} {s}' for s, n in statuses.most_common())}"
    )
    return 1 if alarms else 0


if __name__ == "__main__":
    sys.exit(main())
