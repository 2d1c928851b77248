"""Fuzz the reader of texts: `python -m campaigns.faults.texts [--times 1000]`.

Every file must be read or refused with UsageError within 2 s of CPU time, and what was read must be texts that can be
tokenised: valid Unicode, at least one. Not looked at: whether a refusal names the right line.
"""

from __future__ import annotations

import random
import sys
from functools import partial
from pathlib import Path

from bertopt.recipe import texts
from campaigns.faults import fuzzing, outcome

PLAIN = "the cat sat on the mat\na very good film , not bad !\nzwei Wörter\n"
LINES = '{"text": "the cat sat", "label": "good"}\n{"text": "a dog", "label": 0, "id": [1, {"a": null}]}\n'


def written(rng: random.Random, base: str) -> bytes:
    """Bytes of a mutated file: one in four is no UTF-8, of another encoding, or large."""
    content = fuzzing.text(rng, base, rng.choice((PLAIN, LINES))).encode("utf-8", "surrogatepass")
    kind = rng.randrange(16)
    if kind == 0:
        at = rng.randint(0, len(content))
        content = content[:at] + rng.randbytes(rng.randint(1, 8)) + content[at:]
    elif kind == 1:
        content = content.decode("utf-8", "replace").encode(rng.choice(("utf-16", "utf-32", "utf-8-sig", "utf-7")), "replace")
    elif kind == 2:
        content = content.replace(b"\n", rng.choice((b"\r\n", b"\r", b"\n\n", b"\0")))
    elif kind == 3:
        content *= rng.choice((100, 2000))
    return content


def run(times: int, seed: int, scratch: Path) -> outcome.Outcome:
    """Read `times` mutated files."""
    rng, result, slowest = random.Random(seed), outcome.Outcome(), [0.0]
    for number in outcome.in_time(range(times)):
        suffix, base = rng.choice(((".txt", PLAIN), (".jsonl", LINES)))
        path = scratch / f"t{suffix}"
        path.write_bytes(written(rng, base))
        problem = fuzzing.verdict(partial(read, path), slowest)
        result.count(suffix, f"number {number}: {problem}" if problem else None)
    result.notes["slowest, CPU seconds"] = round(max(slowest), 2)
    return result


def read(path: Path) -> None:
    found = texts.read(path)
    for given in (*found.texts, *(found.labels or ())):
        for part in (given,) if isinstance(given, str) else given:
            part.encode()
    assert found.texts and found.digest


if __name__ == "__main__":
    sys.exit(outcome.main("texts", __doc__ or "", run, 1000))
