"""What share of the machine's matrix-product peak each stage reaches.

    python -m benchmarks.roofline fastest=out/cpu_fastest/artifact near=out/cpu_near [--seconds 3] [--out FILE]

Give artefacts, stages, or the output directories of runs, of which every stage is taken. Peaks are measured before and
after, of registers alone and with every library that has such a product, and the highest counts. A stage's rate is the arithmetic of its
useful tokens, as the unpruned model does it (2 × weights of the layers' linear maps × tokens, and both attention
products), over the time of one step at 8 × 128 and 4 × 256 without padding, and of texts through the predictor,
tokenisation included. So a stage that computes padding is charged for it. Exit code 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks import peaks
from bertopt import stages
from bertopt.errors import BertoptError, UsageError
from bertopt.pipeline.progress import ProgressCallback
from bertopt.spec import Spec
from bertopt.system import environment
from bertopt.workers.client import Workers

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "roofline.json"
TEXTS = ROOT.parent / "shared" / "data" / "debian-sections" / "validation.jsonl"
SHAPES = ((8, 128), (4, 256))
#: Texts of the natural mix.
MIX = 256
#: Families whose layers are four square maps and a feed-forward of two.
FAMILIES = ("bert", "roberta", "xlm-roberta", "distilbert", "electra", "mpnet")


def linear_weights(spec: Spec, config: Mapping[str, Any]) -> int:
    """Weights in the linear maps of all layers. Raises ValueError for a family with other layers."""
    inner = config.get("intermediate_size") or config.get("hidden_dim")
    if spec.family not in FAMILIES or not inner:
        raise ValueError(
            f"expected one of {', '.join(FAMILIES)}; got '{spec.family}', whose layers are not counted here"
        )
    return int(spec.layers * (4 * spec.hidden**2 + 2 * spec.hidden * inner))


def operations(spec: Spec, weights: int, lengths: Sequence[int]) -> int:
    """Multiplications and additions for texts of `lengths` tokens: linear maps, scores and weighted values."""
    attention = sum(4 * length**2 * spec.hidden for length in lengths)
    return 2 * weights * sum(lengths) + spec.layers * attention


def stage_paths(word: str) -> dict[str, Path]:
    """Names and directories in one NAME=DIR. Raises UsageError."""
    name, _, directory = word.partition("=")
    path = Path(directory)
    if not (name and directory):
        raise UsageError(f"expected NAME=DIR; got '{word}'")
    if (path / stages.MANIFEST).is_file():
        return {name: path}
    found = {
        f"{name} {p.name.rpartition('-')[0]}": p
        for p in sorted((path / "stages").glob("*/"))
        if (p / stages.MANIFEST).is_file()
    }
    if not found:
        raise UsageError(f"'{path}' is no stage, artefact or output directory of a run")
    return found


def measured(directory: Path, texts: list[str], seconds: float) -> dict[str, Any]:
    """A stage's rates, operations a second, by case."""
    from tokenizers import Tokenizer

    manifest = stages.read_manifest(directory)
    spec = manifest.spec
    weights = linear_weights(spec, json.loads((directory / "config.json").read_text("utf-8")))
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.enable_truncation(spec.text_length)
    tokenizer.no_padding()
    lengths = [len(encoded.ids) for encoded in tokenizer.encode_batch(texts)]
    cases = []
    with Workers() as workers, workers.start() as worker:
        worker.call("open", directory=str(directory), device="cpu")
        worker.call("mix", texts=texts)

        def fastest(op: str, **fields: Any) -> tuple[float, float]:
            worker.call(op, steps=1, **fields)
            once = worker.call(op, steps=1, **fields)["step_ms"][0]
            taken = worker.call(op, steps=max(3, min(200, int(1e3 * seconds / once))), **fields)["step_ms"]
            return float(np.median(taken)), min(taken)

        for batch, length in SHAPES:
            if worker.fits((batch, length)) and length <= spec.max_length:
                median, least = fastest("time", shape=[batch, length])
                cases.append(
                    (f"{batch} × {length}", operations(spec, weights, [length] * batch), median, least, batch * length)
                )
        cases.append(("natural mix", operations(spec, weights, lengths), *fastest("time_mix"), sum(lengths)))
    return {
        "precision": manifest.precision, "form": manifest.form, "layers": spec.layers, "hidden": spec.hidden,
        "cases": [
            {"case": case, "operations": work, "p50_ms": median, "min_ms": least, "tokens": tokens,
             "rate": work / (median / 1e3), "tokens_per_s": tokens / (median / 1e3)}
            for case, work, median, least, tokens in cases
        ],
    }  # fmt: skip


def measured_peaks(threads: Sequence[int], isa: Sequence[str], seconds: float, on_progress: ProgressCallback) -> list[dict[str, Any]]:
    found = []
    for kind in peaks.kinds(isa):
        for count in threads:
            by_shape = peaks.peak(kind, count, seconds)
            shape = max(by_shape, key=lambda name: by_shape[name])
            found.append(
                {"kind": kind, "threads": count, "shape": shape, "rate": by_shape[shape], "by_shape": by_shape}
            )
            on_progress(f"{kind}, {count} threads: {by_shape[shape] / 1e9:.0f} G/s at {shape}")
    return found


def best(found: Sequence[Mapping[str, Any]], precision: str, threads: int, registers: bool = True) -> Mapping[str, Any] | None:
    """The highest peak of a precision, of libraries alone or of `registers` too; None where this machine has no such product."""
    rows = [row for row in found if row["kind"].startswith(f"{precision}:") and row["threads"] == threads]
    rows = [row for row in rows if registers or row["kind"] not in peaks.REGISTERS]
    return max(rows, key=lambda row: float(row["rate"])) if rows else None


def table(document: Mapping[str, Any]) -> str:
    """Peaks, then stages × cases as shares of the peak of the stage's precision."""
    lines = ["| peak | threads | 10⁹ operations/s | library, shape |", "| :-- | --: | --: | :-- |"]
    for precision in ("float32", "bfloat16", "int8"):
        for threads in document["threads"]:
            row, highest = best(document["peaks"], precision, threads, registers=False), best(document["peaks"], precision, threads)
            if highest and highest["kind"] in peaks.REGISTERS:
                lines.append(f"| {precision} | {threads} | {highest['rate'] / 1e9:.0f} | registers alone |")
            if row:
                library = row["kind"].split(":")[1]
                lines.append(
                    f"| {precision} | {threads} | {row['rate'] / 1e9:.0f} | {library}, {row['shape'].replace('x', '×')} |"
                )
    names = list(dict.fromkeys(case["case"] for found in document["stages"].values() for case in found["cases"]))
    lines += ["", f"| stage | precision | {' | '.join(names)} |", "| :-- | :-- |" + " --: |" * len(names)]
    for name, found in document["stages"].items():
        row = best(document["peaks"], found["precision"], max(document["threads"]))
        cases = {case["case"]: case["rate"] for case in found["cases"]}
        shares = [f"{cases[n] / row['rate']:.0%}" if row and n in cases else "—" for n in names]
        lines.append(f"| {name} | {found['precision']} | {' | '.join(shares)} |")
    environment_ = document["environment"]
    lines += ["", f"{environment_['cores']} cores of {environment_['cpu']} ({', '.join(environment_['isa'])})."]
    return "\n".join(lines) + "\n"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="NAME=DIR")
    parser.add_argument("--seconds", type=float, default=3.0, help="of timing for each case of a stage")
    parser.add_argument("--peak-seconds", type=float, default=peaks.SECONDS, help="for each shape of a peak")
    parser.add_argument("--texts", type=Path, default=TEXTS, help=".jsonl with the natural mix")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args(words)
    console = Console(stderr=True)

    def on_progress(text: str | None) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    cores = len(os.sched_getaffinity(0))
    threads = sorted({1, cores})
    try:
        directories = {name: path for word in options.stages for name, path in stage_paths(word).items()}
        if not options.texts.is_file():
            raise UsageError(f"'{options.texts}' is missing; give a .jsonl with --texts")
        lines = options.texts.read_text("utf-8").splitlines()[:MIX]
        texts = [json.loads(line)["text"] for line in lines]
        described = environment.describe()
        found = measured_peaks(threads, described["isa"], options.peak_seconds, on_progress)
        results = {}
        for name, directory in directories.items():
            on_progress(f"{name}")
            results[name] = measured(directory, texts, options.seconds)
    except (BertoptError, ValueError) as error:
        on_progress(f"roofline: {error}")
        return 2
    if results:
        # A machine that got faster since must not make a stage look better than it is.
        found += measured_peaks([cores], described["isa"], options.peak_seconds, on_progress)
    document = {"environment": described, "threads": threads, "peaks": found, "stages": results}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    options.out.with_suffix(".md").write_text(table(document), "utf-8")
    print(table(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
