"""Memory and order of `predictor.stream` over many short texts.

python -m benchmarks.stream ARTIFACT [--texts 100000] [--streams 2] [--out benchmarks/results/stream.json]

Memory is the process's resident set, read at every window; growth is counted from the end of the second window, when
buffers and caches have their size. Order is checked on texts whose answers were computed before, alone: every copy of one
must be nearest to its own answer.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import bertopt
from bertopt.runtime.predictor import WINDOW
from bertopt.system import environment

#: Different texts, of 1 to 12 words, that the stream repeats in a random order.
DISTINCT = 997
WORDS = ["price", "order", "return", "battery", "screen", "late", "refund", "broken", "great", "cheap", "small", "blue", "quick", "delivery", "support", "phone", "box", "river", "mountain", "doctor", "music", "winter", "garden", "letter", "engine", "planet", "bread"]


def texts() -> list[str]:
    rng = np.random.default_rng(0)
    return [" ".join(rng.choice(WORDS, int(n))) + f" {i}" for i, n in enumerate(rng.integers(1, 13, DISTINCT))]


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(directory: str, count: int, streams: int | None, threads: int | None) -> dict[str, Any]:
    """Stream `count` texts; embeddings only."""
    before = rss_bytes()
    predictor = bertopt.load(directory, streams=streams, threads=threads)
    if predictor.spec.pooling is None:
        raise SystemExit("expected an artefact that gives embeddings")
    opened = rss_bytes()
    known = texts()
    answers = np.stack([predictor([text])[0] for text in known])
    order = np.random.default_rng(1).integers(0, DISTINCT, count)
    pulled = 0

    def source() -> Iterator[str]:
        nonlocal pulled
        for number in order:
            pulled += 1
            yield known[number]

    memory: list[int] = []
    held = wrong = number = 0
    farthest = 0.0
    start = time.perf_counter()
    for answer in predictor.stream(source(), progress=lambda _: memory.append(rss_bytes())):
        held = max(held, pulled - number)
        wrong += int((answers @ answer).argmax() != order[number])
        farthest = max(farthest, float(np.abs(answers[order[number]] - answer).max()))
        number += 1
    seconds = time.perf_counter() - start
    settled = memory[min(1, len(memory) - 1)]
    return {
        "bertopt_version": bertopt.__version__, "environment": environment.describe(), "artifact": Path(directory).name,
        "facts": predictor.session.facts().model_dump(exclude_none=True), "texts": count, "answered": number, "out_of_order": wrong,
        "farthest_from_alone": farthest, "held_at_most": held, "window": WINDOW, "seconds": round(seconds, 2),
        "texts_per_s": round(number / seconds, 1),
        "rss_mb": {
            "before": round(before / 2**20, 1), "opened": round(opened / 2**20, 1), "settled": round(settled / 2**20, 1),
            "highest": round(max(memory) / 2**20, 1), "end": round(memory[-1] / 2**20, 1),
            "growth": round((memory[-1] - settled) / 2**20, 1),
        },
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact")
    parser.add_argument("--texts", type=int, default=100_000)
    parser.add_argument("--streams", type=int)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/stream.json"))
    asked = parser.parse_args()
    found = measure(asked.artifact, asked.texts, asked.streams, asked.threads)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    print(json.dumps(found, indent=1))
    good = found["answered"] == asked.texts and not found["out_of_order"] and abs(found["rss_mb"]["growth"]) <= 50
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
