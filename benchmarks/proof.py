"""Gather the outcomes of clean runs and orders, with the machine they ran on, in benchmarks/results/proof.json.

python -m campaigns.clean_runs --json clean.jsonl; python -m campaigns.orders --json orders.json
python -m benchmarks.proof clean.jsonl orders.json
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from bertopt.system import environment

RESULT = Path(__file__).parent / "results" / "proof.json"


def gathered(clean: Path, orders: Path) -> dict[str, Any]:
    """Return one document of both; of clean runs only the false alarms, of orders only those not refused."""
    runs = [json.loads(line) for line in clean.read_text("utf-8").splitlines()]
    cases = json.loads(orders.read_text("utf-8"))
    return {
        "environment": environment.describe(),
        "clean_runs": {
            "runs": len(runs),
            "alarms": [run for run in runs if run["alarms"]],
            "statuses": dict(Counter(status for run in runs for status in run["statuses"])),
        },
        "orders": {
            str(length): dict(Counter(case["outcome"] for case in cases if len(case["order"]) == length))
            for length in (2, 3)
        },
        "orders_not_refused": [case for case in cases if case["outcome"] != "refused"],
    }


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    document = gathered(*map(Path, sys.argv[1:]))
    RESULT.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()
