"""Fuzz the recipe reader: `python -m campaigns.faults.recipes [--times 100000]`.

Every recipe, as text or as plain data, must be read or refused with UsageError within 2 s of CPU time. Not looked at:
what a readable recipe then does.
"""

from __future__ import annotations

import contextlib
import random
import sys
import warnings
from pathlib import Path

import yaml

from bertopt.commands import recipes as shipped
from bertopt.recipe import parser
from campaigns.faults import fuzzing, outcome

FULL = """schema_version: 1
model: org/name
revision: main
task: text-classification
device: cpu
inputs: {shapes: [[1, 8], [2, 16]], texts: null}
timing: {shape_s: 1.5, mix_s: 2, quick: false}
limits:
  float32: {rel_l2: 1.0e-4, max_abs: 1e-3}
  int8: {cosine_min: 0.98, label_flips_max: 0.02}
steps:
  - pass: use_sdpa
  - {pass: cast_half, name: half, dtype: bfloat16, after: use_sdpa, on_fail: skip, timeout: 60}
  - pass: export_onnx
    after: use_sdpa
    limits: {rel_l2: 1e-5}
  - {pass: quantize_int8, allow_noop: true}
waivers:
  - {stage: half, metric: rel_l2, reason: "known, see 12", expires: 2030-01-31}
deliver: fastest
"""


def run(times: int, seed: int, scratch: Path) -> outcome.Outcome:
    """Read `times` mutated recipes."""
    rng, result, slowest = random.Random(seed), outcome.Outcome(), [0.0]
    bases = [FULL, FULL, FULL, *(path.read_text("utf-8") for path in sorted(shipped.FOLDER.glob("*.yaml")))]
    documents = [yaml.safe_load(base) for base in bases]
    with warnings.catch_warnings(), contextlib.suppress(KeyboardInterrupt):  # what was done until then counts
        warnings.simplefilter("ignore")
        for number in outcome.in_time(range(times)):
            kind = number % 4
            if kind == 3:
                given = rng.choice(documents)
                for _ in range(rng.randint(1, 3)):
                    given = fuzzing.data(rng, given)
                what, call = "as plain data", lambda given=given: parser.from_dict(given)
            elif kind == 2:
                override = fuzzing.text(rng, rng.choice(("steps.1.dtype=float16", "limits.int8.cosine_min=0.9", "device=cuda")), FULL)
                what, call = "--set", lambda override=override: parser.parse(FULL, "r.yaml", [override])
            else:
                text = fuzzing.text(rng, rng.choice(bases), rng.choice(bases))
                what, call = "as text", lambda text=text: parser.parse(text, "r.yaml")
            problem = fuzzing.verdict(call, slowest)
            result.count(what, f"number {number}: {problem}" if problem else None)
    result.notes["slowest, CPU seconds"] = round(max(slowest), 2)
    return result


if __name__ == "__main__":
    sys.exit(outcome.main("recipes", __doc__ or "", run, 100_000))
