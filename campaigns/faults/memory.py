"""Export with too little memory: `python -m campaigns.faults.memory [--times 10]`.

A limit on address space (`ulimit -v`) of `times` sizes, from what Python needs to what the last step lacks. Each export
must end with 5, or with 0 where the limit was enough, and without a traceback. Not looked at: limits of a cgroup, which end
in a SIGKILL from the kernel (see kills).
"""

from __future__ import annotations

import sys
from pathlib import Path

from campaigns.faults import exports, outcome

LEAST, MOST = 150 * 2**20, 1_100 * 2**20


def run(times: int, seed: int, scratch: Path) -> outcome.Outcome:
    """Export under `times` limits, evenly spread."""
    result, recipe = outcome.Outcome(), exports.recipe_in(scratch)
    for number in outcome.in_time(range(times)):
        size = LEAST + (MOST - LEAST) * number // max(1, times - 1)
        code, said = exports.ended(exports.start(recipe, scratch / f"out-{number}", prefix=("prlimit", f"--as={size}")))
        problem = exports.judged(code, said, (0, 5))
        result.count("ends with 5, or was enough", f"{size >> 20} MiB: {problem}" if problem else None)
        result.notes[f"{size >> 20} MiB"] = f"exit {code}"
    return result


if __name__ == "__main__":
    sys.exit(outcome.main("memory", __doc__ or "", run, 10))
