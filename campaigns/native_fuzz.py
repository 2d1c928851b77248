"""The native encoder's fuzzer in small parts, until `--batches` ran over one state of its code.

    cmake -S native -B build/fuzz -G Ninja -DBERTOPT_NATIVE_FUZZ=ON -DBERTOPT_NATIVE_SANITIZE=ON && cmake --build build/fuzz
    python -m campaigns.native_fuzz [--fuzz build/fuzz/fuzz] [--batches 1000000] [--part 20000] [--out FILE]

Random models, random ragged batches, wrong inputs and damaged files under AddressSanitizer and UndefinedBehaviorSanitizer; every part is
a process with new seeds. Each part's counts are added to FILE as it ends, and a later call goes on behind the last
seed as long as the sources under native/src and native/fuzz are the same. Exits 1 on the first finding, which FILE then has.
What it does not look at is in FILE under `does_not_cover`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from bertopt.system import atomic_write, environment

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "native_fuzz.json"
FIRST_SEED = 50_000
LINE = re.compile(
    r"fuzz: (?P<models>\d+) models, (?P<batches>\d+) batches, (?P<texts>\d+) texts, (?P<tokens>\d+) tokens, (?P<wrong_inputs_refused>\d+) "
    r"wrong inputs refused, (?P<damaged_files>\d+) damaged files of which (?P<damaged_files_that_ran>\d+) ran, .* next seed (?P<next_seed>\d+)"
)
BLIND = ("more than 5 threads", "intermediate sizes above 128", "more than 3 heads or layers", "allocation failure", "data races")


def source_digest() -> str:
    """Of what the fuzzer is built from."""
    digest = hashlib.sha256()
    for path in sorted(p for folder in ("src", "fuzz") for p in (ROOT / "native" / folder).rglob("*") if p.is_file()):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def opened(path: Path) -> dict[str, Any]:
    """The result to add to: the one in `path` if it is of these sources, else a new one."""
    found = environment.describe()
    new: dict[str, Any] = {
        "environment": {key: found[key] for key in ("cpu", "isa")}, "sanitizers": "address,undefined", "sources": source_digest(),
        "asked_batches": 0, "first_seed": FIRST_SEED, "next_seed": FIRST_SEED, "models": 0, "batches": 0, "texts": 0, "tokens": 0,
        "wrong_inputs_refused": 0, "damaged_files": 0, "damaged_files_that_ran": 0, "findings": 0, "does_not_cover": list(BLIND),
    }  # fmt: skip
    if path.is_file():
        old: dict[str, Any] = json.loads(path.read_text("utf-8"))
        if all(old.get(key) == new[key] for key in ("environment", "sources")):
            return old
    return new


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fuzz", type=Path, default=ROOT / "build" / "fuzz" / "fuzz")
    parser.add_argument("--batches", type=int, default=1_000_000)
    parser.add_argument("--part", type=int, default=20_000, help="batches of one process")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    if not options.fuzz.is_file():
        parser.error(f"'{options.fuzz}' is missing; build it as the help says")
    result = opened(options.out)
    result["asked_batches"] = options.batches
    while result["batches"] < options.batches and not result["findings"]:
        most = min(options.part, options.batches - result["batches"])
        command = [str(options.fuzz), "1e9", str(result["next_seed"]), str(most)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        counts = LINE.search(done.stdout)
        if done.returncode or counts is None:
            result["findings"] += 1
            result["finding"] = {"command": command[1:], "exit": done.returncode, "end": done.stderr[-4000:]}
        else:
            result["next_seed"] = int(counts["next_seed"])
            for key in counts.re.groupindex.keys() - {"next_seed"}:
                result[key] += int(counts[key])
        atomic_write.write(options.out, json.dumps(result, indent=1) + "\n")
        print(f"{result['batches']:,} of {options.batches:,} batches, {result['findings']} findings", flush=True)
    return int(result["findings"] > 0)


if __name__ == "__main__":
    sys.exit(main())
