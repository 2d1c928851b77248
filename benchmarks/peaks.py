"""How fast this machine multiplies matrices: one library, one precision, one number of threads a process.

    python -m benchmarks.peaks float32:torch 2        prints {"4096x1024x1024": 1.2e11, …}, operations a second by shape

The int8 kinds multiply u8 by s8, as quantised models do. OpenVINO's chains four products with quantisation in between, so
that activations stay int8 from one to the next; its first quantisation and last dequantisation are inside the clock.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

#: [M, K, N]: tokens, inputs, outputs. Square in K and N, so that products can be chained.
SHAPES = ((1024, 768, 768), (1024, 1024, 1024), (4096, 1024, 1024), (1024, 3072, 3072), (2048, 4096, 4096))
KINDS = ("float32:torch", "float32:openvino", "float32:onnxruntime", "int8:openvino", "int8:onnxruntime")
#: Only where the CPU multiplies bfloat16 by itself.
BF16_KINDS = ("bfloat16:torch", "bfloat16:openvino")
#: The instruction set, of `environment.describe`, that each kind of product of registers needs.
REGISTERS = {"float32:registers": "avx512f", "bfloat16:registers": "avx512_bf16", "int8:registers": "avx512_vnni"}
#: Products in OpenVINO's chain.
CHAIN = 4
#: Seconds spent on each shape, and the least repetitions.
SECONDS, TIMES = 0.7, 4

Run = Callable[[], Any]


def torch_product(m: int, k: int, n: int, threads: int, dtype: str) -> tuple[Run, int]:
    import torch

    torch.set_num_threads(threads)
    kind = getattr(torch, dtype)
    a, b, out = torch.randn(m, k).to(kind), torch.randn(k, n).to(kind), torch.empty(m, n, dtype=kind)
    return lambda: torch.mm(a, b, out=out), 1


def openvino_product(m: int, k: int, n: int, threads: int, dtype: str) -> tuple[Run, int]:
    import openvino as ov
    from openvino import opset13 as ops

    rng = np.random.default_rng(0)
    entry = node = ops.parameter([m, k], np.float32)
    for _ in range(CHAIN):
        weights = ops.constant((rng.standard_normal((k, n)) / np.sqrt(k)).astype(np.float32))
        if dtype == "int8":
            node = ops.fake_quantize(node, *(np.float32(x) for x in (-4, 4, -4, 4)), 256)
            weights = ops.fake_quantize(weights, *(np.float32(x) for x in (-0.2, 0.2, -0.2, 0.2)), 255)
        node = ops.matmul(node, weights, False, False)
    hint = "bf16" if dtype == "bfloat16" else "f32"
    properties = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": hint, "PERFORMANCE_HINT": "LATENCY"}
    request = ov.Core().compile_model(ov.Model([node], [entry]), "CPU", properties).create_infer_request()
    request.set_input_tensor(ov.Tensor(rng.standard_normal((m, k)).astype(np.float32)))
    return request.infer, CHAIN


def onnxruntime_product(m: int, k: int, n: int, threads: int, dtype: str) -> tuple[Run, int]:
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    integer = dtype == "int8"
    rng = np.random.default_rng(0)
    weights = rng.integers(-127, 128, (k, n)).astype(np.int8 if integer else np.float32)
    given = rng.integers(0, 256, (m, k)).astype(np.uint8 if integer else np.float32)
    kind_in, kind_out = (TensorProto.UINT8, TensorProto.INT32) if integer else (TensorProto.FLOAT,) * 2
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger" if integer else "MatMul", ["a", "b"], ["c"])], "product",
        [helper.make_tensor_value_info("a", kind_in, [m, k])], [helper.make_tensor_value_info("c", kind_out, [m, n])],
        [numpy_helper.from_array(weights, "b")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, {"a": given}), 1


MAKERS: dict[str, Callable[[int, int, int, int, str], tuple[Run, int]]] = {
    "torch": torch_product, "openvino": openvino_product, "onnxruntime": onnxruntime_product,
}  # fmt: skip


def kinds(isa: Sequence[str]) -> list[str]:
    """Return the kinds that a CPU with these instruction sets, and what is installed, can run."""
    from benchmarks.peers.roster import BF16

    bf16 = BF16_KINDS if set(BF16) & set(isa) else ()
    registers = [kind for kind, needed in REGISTERS.items() if needed in isa] if shutil.which("g++") else []
    return [*KINDS, *bf16, *registers]


def registers(dtype: str, threads: int, seconds: float) -> float:
    """Return operations a second of products of registers, of all threads together. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as folder:
        program, source = Path(folder) / "registers", Path(__file__).with_name("registers.cpp")
        subprocess.run(["g++", "-O2", "-std=c++20", "-mavx512f", "-pthread", str(source), "-o", str(program)], check=True)
        done = subprocess.run([str(program), dtype, str(threads), f"{seconds:g}"], stdout=subprocess.PIPE, check=True)
    return float(done.stdout)


def rates(kind: str, threads: int, seconds: float = SECONDS) -> dict[str, float]:
    """Operations a second by shape, of the fastest repetition: a peak is what nothing disturbed."""
    dtype, library = kind.split(":")
    if library == "registers":
        return {"registers": registers(dtype, threads, seconds)}
    found = {}
    for m, k, n in SHAPES:
        run, products = MAKERS[library](m, k, n, threads, dtype)
        run()
        best, done, end = float("inf"), 0, time.perf_counter() + seconds
        while done < TIMES or time.perf_counter() < end:
            start = time.perf_counter()
            run()
            best = min(best, time.perf_counter() - start)
            done += 1
        found[f"{m}x{k}x{n}"] = 2 * m * k * n * products / best
    return found


def peak(kind: str, threads: int, seconds: float = SECONDS) -> dict[str, float]:
    """`rates` in a separate process. Raises CalledProcessError."""
    command = [sys.executable, "-m", "benchmarks.peaks", kind, str(threads), str(seconds)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    root = Path(__file__).parent.parent
    done = subprocess.run(command, env=environment, cwd=root, stdout=subprocess.PIPE, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    print(json.dumps(rates(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]) if sys.argv[3:] else SECONDS)))
