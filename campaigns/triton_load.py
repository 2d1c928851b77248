"""A running Triton with a model of `bertopt deploy triton`: every answer under merged requests compared with the known one.

    python -m campaigns.triton_load --artifact DIR --model NAME [--requests 10000] [--url 127.0.0.1:8000] [--grpc 127.0.0.1:8001] [--out FILE]

Half of the 16 clients speak HTTP, half gRPC; each sends 1 to 16 texts of an embedding model at a time, one request after the other.
Needs `tritonclient[http,grpc]`. Exits 1 where an answer is wrong or lost, or no requests were merged.

What it does not look at: GPUs, several instances, other tasks, and clients that go away.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

import bertopt
from bertopt.system import environment

CLIENTS, POOL, LIMIT = 16, 500, 1e-5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--artifact", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--url", default="127.0.0.1:8000")
    parser.add_argument("--grpc", default="127.0.0.1:8001")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/triton_load.json"))
    arguments = parser.parse_args()
    import tritonclient.grpc
    import tritonclient.http

    rng, predictor = random.Random(5), bertopt.load(arguments.artifact, threads=1)
    words = sorted(word for word in predictor.tokenizer.fast.get_vocab() if word.isalpha())
    texts = [" ".join(rng.choices(words, k=min(100, int(rng.lognormvariate(2.5, 0.8)) + 3))) for _ in range(POOL)]
    spec = predictor.spec
    right, output = np.concatenate([predictor([text]) for text in texts]), spec.outputs[0]
    # Lists, since clients are threads: append is atomic, adding to a counter is not.
    outcomes: list[str] = []
    errors: list[float] = []
    left = iter(range(arguments.requests))

    def client(seed: int) -> None:
        module, url = (tritonclient.http, arguments.url) if seed % 2 else (tritonclient.grpc, arguments.grpc)
        rng, server = random.Random(seed), module.InferenceServerClient(url)
        while next(left, None) is not None:
            numbers = rng.choices(range(POOL), k=rng.choice((1, rng.randint(2, 16))))
            tensor = module.InferInput("text", [len(numbers), 1], "BYTES")
            tensor.set_data_from_numpy(np.array([texts[number].encode() for number in numbers], object)[:, None])
            try:
                got = server.infer(arguments.model, [tensor]).as_numpy(output)
            except Exception as error:
                outcomes.append(f"{module.__name__}: {type(error).__name__}: {str(error)[:80]}")
                continue
            difference = float(np.abs(got - right[numbers]).max()) if got.shape == right[numbers].shape else float("inf")
            errors.append(difference)
            outcomes.append("right" if difference <= LIMIT else "wrong")

    before = _merged(tritonclient.http, arguments)
    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    after = _merged(tritonclient.http, arguments)
    calls, rows = after[0] - before[0], after[1] - before[1]
    count = Counter(outcomes)
    result: dict[str, Any] = {
        "artefact": f"{spec.family} of {spec.layers} layers of {spec.hidden}",
        "environment": environment.describe(), "requests": sum(count.values()), "outcomes": dict(count), "largest_error": max(errors, default=0.0),
        "limit": LIMIT, "model_calls": calls, "texts": rows,
        "server": tritonclient.http.InferenceServerClient(arguments.url).get_server_metadata()["version"],
        "holds": count["right"] == arguments.requests and calls < arguments.requests,
    }  # fmt: skip
    print(json.dumps(result))
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    if not result["holds"]:
        sys.exit("does not hold: each request must get its own answer, and requests must have been merged")


def _merged(http: Any, arguments: argparse.Namespace) -> tuple[int, int]:
    """Return how often the model was called, and with how many texts in all."""
    (stats,) = http.InferenceServerClient(arguments.url).get_inference_statistics(arguments.model)["model_stats"]
    return int(stats["execution_count"]), int(stats["inference_count"])


if __name__ == "__main__":
    main()
