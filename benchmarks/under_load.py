"""What a busy machine does to a call: its latency alone, and while another process computes on every core.

    python -m benchmarks.under_load [--rounds 6] [--seconds 2] [--out FILE]

all-MiniLM-L6-v2 in INT8: the native encoder and the peers of `cpu_peers`, whose environments and models it shares
(`python -m benchmarks.cpu_peers --prepare` builds them). Each contender has a process and two threads; a round times one after
the other, alone and beside processes that count in a loop, one pinned to each core, in turn. The scheduler gives a thread half of a core then,
so that a call takes twice its time at least where it is long; what it takes beyond that is waiting for threads that have no core.
Not looked at: other kinds of load (memory, caches), priorities, limits of containers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers import models, race, roster
from benchmarks.peers.contender import Contender
from bertopt.system import atomic_write, environment

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "under_load.json"
CONTENDERS = ("bertopt native int8", "openvino qint8", "openvino qint8, 2 streams", "onnxruntime qint8")
#: Name of a case: its texts and how many of them a call takes.
CASES = {"short query": ("short", 1), "8 texts of 128 tokens": ("flat", 8)}
LOOP = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"


@contextlib.contextmanager
def busy(cores: list[int]) -> Iterator[None]:
    """Keep every core busy with one process each."""
    loops = [subprocess.Popen([sys.executable, "-c", LOOP, str(core)]) for core in cores]
    try:
        time.sleep(0.3)
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def timed(contender: Contender, texts: str, window: int, of: int, seconds: float) -> list[float]:
    """Milliseconds of calls, one after the other, for about so long."""
    taken, start = list[float](), time.monotonic()
    while time.monotonic() - start < seconds:
        first = len(taken) * window % of
        found = contender.ask("run", name=texts, start=first, stop=min(first + window, of), window=window)
        taken.append(1e3 * found["seconds"][0])
    return taken


def table(found: dict[str, Any]) -> str:
    """Return the Markdown table of a result."""
    lines = ["| | case | alone, ms: p50, p90 | beside a process on every core | ratio of medians |", "| :-- | :-- | --: | --: | --: |"]
    for name, cases in found["contenders"].items():
        for case, row in cases.items():
            alone, beside = row["alone"], row["busy"]
            low, high = row["ratio_range"]
            lines.append(f"| {name} | {case} | {alone['p50_ms']:.2f}, {alone['p90_ms']:.2f} | {beside['p50_ms']:.2f}, {beside['p90_ms']:.2f} "
                         f"| {row['ratio']:.1f} ({low:.1f} to {high:.1f}) |")  # fmt: skip
    where = found["environment"]
    return "\n".join([*lines, "", f"Medians of {found['rounds']} rounds; in brackets the least and the largest ratio of a round. 2 threads on 2 cores of {where['cpu']} ({', '.join(where['isa'])})."])


def summary(rounds: list[dict[str, list[float]]]) -> dict[str, Any]:
    """Return the figures of one case from the calls of its rounds, alone and busy."""
    ratios = [statistics.median(calls["busy"]) / statistics.median(calls["alone"]) for calls in rounds]
    found: dict[str, Any] = {"ratio": statistics.median(ratios), "ratio_range": [min(ratios), max(ratios)]}
    for how in ("alone", "busy"):
        calls = [one for each in rounds for one in each[how]]
        p50, p90 = (float(value) for value in np.quantile(calls, [0.5, 0.9]))
        found[how] = {"p50_ms": p50, "p90_ms": p90, "calls": len(calls)}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each contender, case and state in a round")
    parser.add_argument("--peers", type=Path, default=ROOT / ".peers")
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    checkpoint, cores = models.CHECKPOINTS["minilm"], sorted(os.sched_getaffinity(0))[:2]
    source = models.source_of("minilm", options.peers, options.shared)
    data = options.shared / "data" / "debian-sections"
    natural, truth = models.read(data / "validation.jsonl", 64)
    texts = {"short": models.cut(source, natural, models.SHORT, 64), "flat": models.cut(source, natural, 128, 64)}
    calibration = roster.calibration(models.existing(data / "train.jsonl"), options.peers)
    common = {"threads": len(cores), "streams": 0, "max_length": models.max_length(source), "cores": cores}
    job = race.Job((), texts, truth, options.rounds, 0.0, 300.0)
    logs = options.peers / "models" / "minilm"
    calls: dict[str, dict[str, list[dict[str, list[float]]]]] = defaultdict(lambda: defaultdict(list))
    with contextlib.ExitStack() as stack:
        running = {
            entry.name: stack.enter_context(race.start(roster.ready(entry, checkpoint, source, options.peers, calibration, common), logs, job))
            for entry in roster.wanted(checkpoint, (), CONTENDERS)
        }  # fmt: skip
        for number in range(options.rounds + 1):
            for name, contender in running.items():
                for case, (of, window) in CASES.items():
                    found = {"alone": timed(contender, of, window, len(texts[of]), options.seconds)}
                    with busy(cores):
                        found["busy"] = timed(contender, of, window, len(texts[of]), options.seconds)
                    if number:  # the first round warms up
                        calls[name][case].append(found)
            print(f"round {number} of {options.rounds}", file=sys.stderr)
    result = {
        "environment": environment.describe(), "rounds": options.rounds,
        "contenders": {name: {case: summary(rounds) for case, rounds in cases.items()} for name, cases in calls.items()},
    }  # fmt: skip
    atomic_write.write(options.out, json.dumps(result, indent=1) + "\n")
    print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
