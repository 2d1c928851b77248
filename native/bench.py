"""Time packed models against each other, and against other runtimes where asked: python bench.py --help

Contenders take turns. Each runs in a separate process, because two runtimes' threads disturb each other; a process does
a few runs, then the next one does. Figures are the least of all runs: on a shared machine that is the only one that
repeats, and still only roughly. `--cpu` takes CPU time instead of wall time (one thread).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

SHAPES = {
    "minilm": {"hidden_size": 384, "num_attention_heads": 12, "num_hidden_layers": 6, "intermediate_size": 1536},
    "base": {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12, "intermediate_size": 3072},
    "large": {"hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 24, "intermediate_size": 4096},
}
VOCABULARY = 30_000


def random_tensors(shape: dict[str, int]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return config and tensors of a BERT of this shape. Times do not depend on the numbers."""
    rng = np.random.default_rng(0)
    h, inner = shape["hidden_size"], shape["intermediate_size"]
    names = {
        "embeddings.word_embeddings": (VOCABULARY, h),
        "embeddings.position_embeddings": (512, h),
        "embeddings.token_type_embeddings": (2, h),
    }
    tensors: dict[str, Any] = {f"{n}.weight": rng.standard_normal(s, np.float32) * 0.05 for n, s in names.items()}
    products = {"attention.self.query": (h, h), "attention.self.key": (h, h), "attention.self.value": (h, h), "attention.output.dense": (h, h),
                "intermediate.dense": (inner, h), "output.dense": (h, inner)}  # fmt: skip
    norms = ["embeddings.LayerNorm"]
    for i in range(shape["num_hidden_layers"]):
        for name, size in products.items():
            tensors[f"encoder.layer.{i}.{name}.weight"] = rng.standard_normal(size, np.float32) * 0.05
            tensors[f"encoder.layer.{i}.{name}.bias"] = np.zeros(size[0], np.float32)
        norms += [f"encoder.layer.{i}.attention.output.LayerNorm", f"encoder.layer.{i}.output.LayerNorm"]
    for name in norms:
        tensors |= {f"{name}.weight": np.ones(h, np.float32), f"{name}.bias": np.zeros(h, np.float32)}
    return {"model_type": "bert", "hidden_act": "gelu", "layer_norm_eps": 1e-12, **shape}, tensors


def operations(shape: dict[str, int], lengths: Sequence[int]) -> float:
    """Return additions and multiplications of the products, attention's included."""
    h, inner = shape["hidden_size"], shape["intermediate_size"]
    tokens = sum(lengths)
    return float(
        shape["num_hidden_layers"] * (2 * tokens * (4 * h * h + 2 * h * inner) + 4 * h * sum(n * n for n in lengths))
    )


def native(path: str, isa: str, threads: int, lengths: Sequence[int]) -> Callable[[], object]:
    """Return one run of a packed file."""
    import bertopt_native

    encoder = bertopt_native.Encoder(path, threads, isa)
    ids = np.random.default_rng(0).integers(0, VOCABULARY, sum(lengths)).astype(np.int32)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return lambda: encoder.run(ids, starts, output="mean", normalize=True)


def openvino(path: str, threads: int, lengths: Sequence[int]) -> Callable[[], object]:
    """Return one run of an OpenVINO network with BERT's inputs, on a padded batch."""
    import openvino as ov

    options = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1}
    request = ov.Core().compile_model(path, "CPU", options).create_infer_request()
    shape = (len(lengths), max(lengths))
    mask = (np.arange(shape[1])[None] < np.array(lengths)[:, None]).astype(np.int64)
    ids = np.random.default_rng(0).integers(0, VOCABULARY, shape)
    given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros(shape, np.int64)}
    wanted = {name for port in request.model_inputs for name in port.names}
    for name, value in given.items():
        if name in wanted:
            request.set_tensor(name, ov.Tensor(value))
    return lambda: request.infer()  # noqa: PLW0108  (OpenVINO has no types)


def serve(contender: dict[str, Any]) -> None:
    """Answer each line of lengths and a number of runs with their times in ms."""
    for line in sys.stdin:
        order = json.loads(line)
        lengths, clock = order["lengths"], time.process_time if order["cpu"] else time.perf_counter
        if contender["kind"] == "native":
            run = native(contender["path"], contender["isa"], contender["threads"], lengths)
        else:
            run = openvino(contender["path"], contender["threads"], lengths)
        run()
        times = []
        for _ in range(order["runs"]):
            begin = clock()
            run()
            times.append((clock() - begin) * 1e3)
        print(json.dumps(times), flush=True)


def measure(
    contenders: dict[str, dict[str, Any]], lengths: Sequence[int], rounds: int, runs: int, cpu: bool
) -> dict[str, float]:
    """Return the least time of each contender in ms; they take turns."""
    servers = {
        name: subprocess.Popen(
            [sys.executable, __file__, "--serve", json.dumps(c)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name, c in contenders.items()
    }
    least = dict.fromkeys(contenders, float("inf"))
    try:
        for _ in range(rounds):
            for name, server in servers.items():
                assert server.stdin and server.stdout
                server.stdin.write(json.dumps({"lengths": list(lengths), "runs": runs, "cpu": cpu}) + "\n")
                server.stdin.flush()
                least[name] = min(least[name], *json.loads(server.stdout.readline()))
    finally:
        for server in servers.values():
            server.kill()
            server.wait()
    return least


def main() -> None:
    """Pack, measure, print."""
    import bertopt_native

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="minilm")
    parser.add_argument("--batches", nargs="+", default=["8x128", "1x128", "1x16"], help="texts x tokens")
    parser.add_argument("--precision", nargs="+", default=["int8", "bf16"])
    parser.add_argument("--isa", nargs="+", default=[bertopt_native.isa()])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--cpu", action="store_true", help="CPU time instead of wall time")
    parser.add_argument("--openvino", help="an OpenVINO network of the same shape, as a contender")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(json.loads(options.serve))
        return
    shape = SHAPES[options.shape]
    config, tensors = random_tensors(shape)
    with tempfile.TemporaryDirectory() as folder:
        contenders: dict[str, dict[str, Any]] = {}
        for precision in options.precision:
            bertopt_native.pack(Path(folder) / precision, config, tensors, precision)
        for threads in options.threads:
            if options.openvino:
                contenders[f"openvino {threads}"] = {"kind": "openvino", "path": options.openvino, "threads": threads}
            for precision in options.precision:
                for isa in options.isa:
                    path = str(Path(folder) / precision)
                    contenders[f"{precision} {isa} {threads}"] = {
                        "kind": "native",
                        "path": path,
                        "isa": isa,
                        "threads": threads,
                    }
        for batch in options.batches:
            texts, tokens = map(int, batch.split("x"))
            lengths = [tokens] * texts
            least = measure(contenders, lengths, options.rounds, options.runs, options.cpu)
            first = next(iter(least.values()))
            print(f"{options.shape} {batch}")
            for name, ms in least.items():
                rate = operations(shape, lengths) / ms / 1e9
                print(
                    f"  {name:28} {ms:9.2f} ms  {sum(lengths) / ms:8.1f} k tokens/s  {rate:6.3f} TOP/s  {first / ms:5.2f} x the first"
                )


if __name__ == "__main__":
    main()
