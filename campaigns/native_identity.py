"""Random calls of the native encoder, bit-identical to each text alone.

    python -m campaigns.native_identity [--calls 10000] [--out FILE]

For MiniLM's widths, two layers and random weights, in INT8 and bf16 and with every instruction set of this CPU: 1,000 texts of 1 to 60 tokens are
run one by one on one thread. Then come random calls with 1 and 2 threads: mostly 1 to 12 texts in random order, 1 in 200 all
1,000 shuffled. Every vector must be that text's, to the last bit. Calls are spread evenly; counts are written as they come.
Exits 1 where a bit differs. It does not look at several callers at once, more than 2 threads or longer texts (native/tests do).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import bertopt_native
import numpy as np

from bertopt.system import atomic_write, environment

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "native_identity.json"
TEXTS, LONGEST, VOCABULARY = 1_000, 60, 2_000
OUTPUTS = ("mean", "first", "max")


def random_bert(rng: np.random.Generator) -> tuple[dict[str, Any], dict[str, Any]]:
    """Config and weights of MiniLM's widths with two layers and few words."""
    h, inner, layers = 384, 1536, 2
    shapes: dict[str, tuple[int, ...]] = {f"embeddings.{name}_embeddings.weight": (n, h) for name, n in (("word", VOCABULARY), ("position", 512), ("token_type", 2))}
    norms = ["embeddings.LayerNorm"]
    for i in range(layers):
        layer = f"encoder.layer.{i}"
        for name, shape in (
            *((f"attention.self.{part}", (h, h)) for part in ("query", "key", "value")), ("attention.output.dense", (h, h)),
            ("intermediate.dense", (inner, h)), ("output.dense", (h, inner)),
        ):  # fmt: skip
            shapes |= {f"{layer}.{name}.weight": shape, f"{layer}.{name}.bias": shape[:1]}
        norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"]
    tensors: dict[str, Any] = {name: rng.standard_normal(shape, np.float32) * np.float32(0.06) for name, shape in shapes.items()}
    for name in norms:
        tensors |= {f"{name}.weight": np.ones(h, np.float32), f"{name}.bias": np.zeros(h, np.float32)}
    config = {
        "model_type": "bert", "hidden_act": "gelu", "layer_norm_eps": 1e-12, "hidden_size": h, "num_attention_heads": 12,
        "num_hidden_layers": layers, "intermediate_size": inner,
    }  # fmt: skip
    return config, tensors


def batch(texts: list[Any]) -> tuple[Any, Any]:
    return np.concatenate(texts), np.concatenate([[0], np.cumsum([len(text) for text in texts])]).astype(np.int64)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    rng = np.random.default_rng(17)
    texts = [rng.integers(0, VOCABULARY, n).astype(np.int32) for n in rng.integers(1, LONGEST + 1, TEXTS)]
    found = environment.describe()
    result: dict[str, Any] = {
        "environment": {key: found[key] for key in ("cpu", "isa")}, "bertopt_native": bertopt_native.__version__,
        "asked_calls": options.calls, "calls": 0, "calls_with_all_texts": 0, "vectors": 0, "different": 0, "by_kind": {},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        config, tensors = random_bert(rng)
        for precision in ("int8", "bf16"):
            bertopt_native.pack(Path(folder) / precision, config, tensors, precision)
        kinds = [(precision, isa) for precision in ("int8", "bf16") for isa in bertopt_native.supported()]
        for number, (precision, isa) in enumerate(kinds):
            encoders = [bertopt_native.Encoder(Path(folder) / precision, threads=threads, isa=isa) for threads in (1, 2)]
            alone = {output: np.concatenate([encoders[0].run(*batch([text]), output=output) for text in texts]) for output in OUTPUTS}
            calls = options.calls * (number + 1) // len(kinds) - options.calls * number // len(kinds)
            for call in range(calls):
                everyone = call % 200 == 0
                chosen = rng.permutation(TEXTS)[: TEXTS if everyone else int(rng.integers(1, 13))]
                output = OUTPUTS[int(rng.integers(len(OUTPUTS)))]
                got = encoders[call % 2].run(*batch([texts[i] for i in chosen]), output=output)
                same = (got.view(np.uint32) == alone[output][chosen].view(np.uint32)).all(axis=1)
                result["vectors"] += len(chosen)
                result["different"] += int((~same).sum())
                result["calls_with_all_texts"] += everyone
            result["calls"] += calls
            result["by_kind"][f"{precision} {isa}"] = calls
            atomic_write.write(options.out, json.dumps(result, indent=1) + "\n")
            print(f"{precision} {isa}: {calls} calls, {result['different']} vectors differ so far", flush=True)
    return int(result["different"] > 0)


if __name__ == "__main__":
    sys.exit(main())
