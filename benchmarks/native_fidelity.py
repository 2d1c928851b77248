"""How near the native encoder is to float32 on natural and on very short texts, and what staying in bf16 buys.

    python -m benchmarks.native_fidelity [--texts FILE] [--short 2000] [--out FILE]

all-MiniLM-L6-v2, 512 natural texts and random ones of one to three of their words: cosines of mean-pooled vectors with
transformers' in float32. INT8, bf16, and INT8 with each product, each layer and two layers in bf16. `more_work` is the share of
the product time that a choice adds where bf16 has half of INT8's rate: arithmetic, not a measurement. Goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers import models
from bertopt.modeling import source
from bertopt.system import atomic_write, environment

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "native_fidelity.json"
TEXTS = ROOT.parent / "shared" / "data" / "debian-sections" / "validation.jsonl"
#: Products of a layer and their share of its weights.
PRODUCTS = {"qkv": 3 / 12, "attention_out": 1 / 12, "ffn_in": 4 / 12, "ffn_out": 4 / 12}
LAYERS, WANTED = 6, 0.998


#: Precision, and the products and layers that stay in bf16.
CHOICES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("bf16", ()), ("int8", ()), *(("int8", tuple(f"{layer}.{product}" for layer in range(LAYERS))) for product in PRODUCTS),
    *(("int8", (str(layer),)) for layer in range(LAYERS)), ("int8", ("3", "4")),
)  # fmt: skip
Ids = dict[str, list[list[int]]]


def unit(rows: Any) -> Any:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def token_ids(directory: Path, sets: dict[str, list[str]]) -> Ids:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(256)
    return {name: [encoded.ids for encoded in tokenizer.encode_batch(texts)] for name, texts in sets.items()}


def reference(network: Any, ids: Ids) -> dict[str, Any]:
    """Return the vectors [N, H] of each set of texts by transformers, each text alone."""
    import torch

    with torch.inference_mode():
        return {
            name: unit(np.stack([network(torch.tensor([one])).last_hidden_state[0].mean(0).double().numpy() for one in of]))
            for name, of in ids.items()
        }


def figures(encoder: Any, ids: list[list[int]], want: Any) -> dict[str, float]:
    """Return the cosines of an encoder's vectors with those in `want` [N, H]: their mean, the least, and how many are too small."""
    starts = np.concatenate([[0], np.cumsum([len(one) for one in ids])]).astype(np.int64)
    got = unit(encoder.run(np.concatenate(ids).astype(np.int32), starts, output="mean").astype(np.float64))
    cosines = (got * want).sum(axis=1)
    return {"mean": round(float(cosines.mean()), 6), "min": round(float(cosines.min()), 6), "below": int((cosines < WANTED).sum())}


def main() -> int:
    import bertopt_native
    import torch
    import transformers

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, default=TEXTS, help=".jsonl with natural texts")
    parser.add_argument("--short", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    directory = source.resolve(models.MINILM)
    natural = models.read(options.texts, 512)[0]
    words, rng = sorted({word for text in natural for word in text.split()}), np.random.default_rng(5)
    sets = {"natural": natural, "short": [" ".join(rng.choice(words, rng.integers(1, 4))) for _ in range(options.short)]}
    ids = token_ids(directory, sets)
    network = transformers.AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    config, tensors = network.config.to_dict(), {name: tensor.numpy() for name, tensor in network.state_dict().items()}
    want = reference(network, ids)
    found = environment.describe()
    result: dict[str, Any] = {
        "environment": {key: found[key] for key in ("cpu", "isa")}, "model": "all-MiniLM-L6-v2", "isa": bertopt_native.isa(),
        "texts": {name: len(texts) for name, texts in sets.items()}, "wanted": WANTED, "rows": [],
    }  # fmt: skip
    if options.out.is_file() and {**(old := json.loads(options.out.read_text("utf-8"))), "rows": []} == result:
        result["rows"] = old["rows"]
    done = {(row["precision"], *row["keep_bf16"]) for row in result["rows"]}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.bin"
        for precision, keep in CHOICES:
            if (precision, *keep) in done:
                continue
            bertopt_native.pack(path, config, tensors, precision, keep)
            encoder = bertopt_native.Encoder(path, threads=1)
            row: dict[str, Any] = {"precision": precision, "keep_bf16": keep}
            row["more_work"] = round(sum(PRODUCTS.get(item.partition(".")[2], 1.0) for item in keep) / LAYERS, 4)
            row |= {name: figures(encoder, of, want[name]) for name, of in ids.items()}
            result["rows"].append(row)
            atomic_write.write(options.out, json.dumps(result, indent=1) + "\n")
            print(precision, *keep, row["natural"], row["short"], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
