"""Accuracy of the native encoder on a classifier, and how often it gives the label that float32 gives.

    python -m benchmarks.native_classifier [CHECKPOINT] [--texts FILE] [--out FILE]

Every labelled text is answered by transformers in float32, and by what build_native makes of the checkpoint in INT8 and in bf16.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers import roster
from bertopt.system import atomic_write, environment

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "native_classifier.json"
SHARED = ROOT.parent / "shared"
CHECKPOINT, TEXTS = SHARED / "checkpoints" / "debian-sections-minilm", SHARED / "data" / "debian-sections" / "validation.jsonl"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", type=Path, default=CHECKPOINT, help="directory of a text classifier")
    parser.add_argument("--texts", type=Path, default=TEXTS, help=".jsonl with text and label")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    lines = [json.loads(line) for line in options.texts.read_text("utf-8").splitlines()]
    texts, labels = [line["text"] for line in lines], [line["label"] for line in lines]
    given = {"float32": _reference(options.checkpoint, texts)}
    with tempfile.TemporaryDirectory() as folder:
        for precision in ("int8", "bf16"):
            given[precision] = _native(options.checkpoint, Path(folder), precision, texts)
    found = environment.describe()
    result = {
        "environment": {key: found[key] for key in ("cpu", "cores", "isa", "packages")}, "model": options.checkpoint.name, "texts": len(texts),
        "rows": [
            {"precision": name, "right": sum(a == b for a, b in zip(answers, labels, strict=True)),
             "as_float32": sum(a == b for a, b in zip(answers, given["float32"], strict=True))} for name, answers in given.items()
        ],
    }  # fmt: skip
    atomic_write.write(options.out, json.dumps(result, indent=1) + "\n")
    print(table(result))
    return 0


def _reference(checkpoint: Path, texts: list[str]) -> list[str]:
    import torch
    import transformers

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(checkpoint)
    network = transformers.AutoModelForSequenceClassification.from_pretrained(checkpoint, dtype=torch.float32).eval()
    longest = network.config.max_position_embeddings
    with torch.inference_mode():
        logits = [network(**tokenizer(text, truncation=True, max_length=longest, return_tensors="pt")).logits[0].numpy() for text in texts]
    return [network.config.id2label[int(np.argmax(row))] for row in logits]


def _native(checkpoint: Path, folder: Path, precision: Any, texts: list[str]) -> list[str]:
    import bertopt

    answers: Any = bertopt.load(roster.native_artefact(checkpoint, folder, precision))(texts)
    return [answer["label"] for answer in answers]


def table(found: dict[str, Any]) -> str:
    """Return the Markdown table of a result."""
    lines = [f"| {found['model']}, {found['texts']:,} texts | accuracy | same label as float32 |", "| :-- | --: | --: |"]
    lines += [f"| {row['precision']} | {row['right'] / found['texts']:.3f} | {row['as_float32'] / found['texts']:.1%} |" for row in found["rows"]]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
