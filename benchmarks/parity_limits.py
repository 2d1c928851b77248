"""How far each precision is from fp32 on real checkpoints: what the default limits are set from.

    python -m benchmarks.parity_limits REPORT.json …     writes benchmarks/results/parity_limits.json

Give the reports of runs over real checkpoints, such as quickstart, trt_fp16 and ladder on a classifier.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from bertopt.checks.parity import cosine_median
from bertopt.results import Report

RESULT = Path(__file__).parent / "results" / "parity_limits.json"


def rows(report: Report) -> list[dict[str, Any]]:
    """The worst of every metric for each stage that was compared."""
    found: list[dict[str, Any]] = []
    for stage in report.stages:
        if stage.parity is None:
            continue
        cases = stage.parity.cases
        flips = [case.label_flips for case in cases if case.label_flips is not None]
        found.append(
            {
                "model": Path(report.model["source"]).name, "sha256": report.model["sha256"], "stage": stage.name,
                "precision": stage.precision, "cases": len(cases),
                "max_abs": max(case.max_abs for case in cases), "rel_l2": max(case.rel_l2 for case in cases),
                "cosine_min": min(case.cosine_min for case in cases),
                "cosine_mean": min(case.cosine_mean for case in cases),
                "label_flips": sum(flips) / sum(case.compared for case in cases) if flips else None,
                "invariance": stage.invariance.max_abs if stage.invariance else None,
                "cosine_median_min": cosine_median(cases),
                **(stage.rounding.model_dump(exclude={"vectors"}) if stage.rounding else {}),
            }
        )  # fmt: skip
    return found


def main() -> None:
    reports = [Report.model_validate_json(Path(path).read_text("utf-8")) for path in sys.argv[1:]]
    if not reports:
        raise SystemExit(__doc__)
    measured = [row for report in reports for row in rows(report)]
    document = {"environment": reports[-1].environment, "rows": measured}
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(document, indent=2) + "\n", "utf-8")
    print(f"{RESULT}: {len(measured)} stages of {len({row['sha256'] for row in measured})} checkpoints")


if __name__ == "__main__":
    main()
