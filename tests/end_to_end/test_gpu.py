"""What needs an NVIDIA GPU: `pytest -m gpu`. Skipped, not faked, where there is none."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import zipfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bertopt
from bertopt.checks import parity, probes
from bertopt.commands.verify import verify
from bertopt.core import Context, Device, Eager, Model, Packaged
from bertopt.errors import Unsupported
from bertopt.modeling import checkpoint
from bertopt.passes import (
    BuildTensorrt,
    CaptureGraphs,
    CastHalf,
    CastOnnxHalf,
    CompileTorch,
    ExportOnnx,
    FuseOrt,
    MergeQkv,
    PackageAot,
    PackSequences,
    QuantizeFp8,
    UseBetterTransformer,
    UseSdpa,
)
from bertopt.sessions import open_session
from bertopt.system import gpu
from tests.support.tiny_models import Tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
SHAPES = [(1, 8), (4, 16)]


@pytest.fixture
def reference(tiny: Tiny) -> Eager:
    return checkpoint.load(tiny())


def agrees(model: Model, reference: Eager) -> None:
    """`model` on the GPU within its precision's default limits of the reference on the CPU."""
    ours, theirs = open_session(model, "cuda"), open_session(reference, "cpu")
    spec = reference.spec
    found = [
        parity.compare(probe, spec, parity.answer(ours, probe, spec), parity.answer(theirs, probe, spec))
        for probe in probes.grid(spec, SHAPES, model.shapes)
        if model.spec.layout == "padded" or probes.packable(spec, probe)
    ]
    verdict = parity.judge(found, parity.DEFAULT_LIMITS[model.precision], None)
    assert verdict.passed, verdict.worst


def context(folder: Path, name: str) -> Context:
    (folder / name).mkdir()
    return Context(folder / name, "cuda", tuple(SHAPES))


def test_fp16_eager(reference: Eager, tmp_path: Path) -> None:
    model = UseSdpa()(reference, context(tmp_path, "sdpa")).model
    agrees(CastHalf(dtype="float16")(model, context(tmp_path, "half")).model, reference)


def test_compiled(reference: Eager, tmp_path: Path) -> None:
    model = UseSdpa()(reference, context(tmp_path, "sdpa")).model
    agrees(CompileTorch()(model, context(tmp_path, "compiled")).model, reference)


def test_better_transformer_after_half(reference: Eager, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="tanh"):
        UseBetterTransformer()(reference, context(tmp_path, "float32"))
    half = CastHalf()(reference, context(tmp_path, "half")).model
    agrees(UseBetterTransformer()(half, context(tmp_path, "better")).model, reference)


@pytest.mark.parametrize("backend", ["efficient", "math"])
def test_attention_kernels(reference: Eager, tmp_path: Path, backend: str) -> None:
    agrees(UseSdpa.model_validate({"backend": backend})(reference, context(tmp_path, "sdpa")).model, reference)


@pytest.mark.parametrize("task, pooling", [("text-classification", None), ("feature-extraction", "mean"), ("token-classification", None)])
@pytest.mark.parametrize("compiled", [False, True])
def test_unpadded_with_graphs(tiny: Tiny, tmp_path: Path, task: str, pooling: str | None, compiled: bool) -> None:
    reference = checkpoint.load(tiny("bert", task, pooling))
    half = CastHalf(dtype="bfloat16")(MergeQkv()(reference, context(tmp_path, "qkv")).model, context(tmp_path, "half")).model
    unpadded = PackSequences(attention="varlen")(half, context(tmp_path, "unpadded")).model
    agrees(unpadded, reference)
    graphs: Any = CaptureGraphs()(unpadded, context(tmp_path, "graphs")).model
    if compiled:
        graphs = CompileTorch()(graphs, context(tmp_path, "compiled")).model
    agrees(graphs, reference)
    # As many texts as a graph of 128 tokens has places, and padding behind them.
    dice = np.random.default_rng(0)
    ids = dice.integers(5, reference.spec.vocabulary, (8, 12))
    inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    got, wanted = (open_session(model, device).run(inputs) for model, device in ((graphs, "cuda"), (reference, "cpu")))  # type: ignore[arg-type]
    for name, value in wanted.items():
        np.testing.assert_allclose(got[name], value, atol=0.03 * float(np.abs(value).max()))


@pytest.mark.parametrize("compiled", [False, True])
def test_fp8(tiny: Tiny, tmp_path: Path, compiled: bool) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU of sm89 or later")
    reference = checkpoint.load(tiny("bert", "feature-extraction", "mean"))
    half = CastHalf(dtype="bfloat16")(UseSdpa()(reference, context(tmp_path, "sdpa")).model, context(tmp_path, "half")).model
    model: Any = QuantizeFp8()(half, context(tmp_path, "fp8")).model
    agrees(CompileTorch()(model, context(tmp_path, "compiled")).model if compiled else model, reference)


def run_package(model: Packaged, device: Device, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return open_session(model, device).run(inputs)


@pytest.mark.parametrize("unpadded", [False, True])
def test_package(reference: Eager, tmp_path: Path, unpadded: bool) -> None:
    model = CastHalf(dtype="bfloat16")(UseSdpa()(reference, context(tmp_path, "sdpa")).model, context(tmp_path, "half")).model
    if unpadded:
        model = PackSequences(attention="varlen")(model, context(tmp_path, "unpadded")).model
    package = PackageAot()(model, context(tmp_path, "package")).model
    with zipfile.ZipFile(package.path) as files:
        code = b"".join(files.read(name) for name in files.namelist() if name.endswith("wrapper.cpp"))
    assert code and b"cudnn_attention" not in code
    # A package is native code: one that crashes ends this process, not the tests.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        inputs = {name: np.ones((2, 8), np.int64) for name in reference.spec.inputs}
        answers = pool.submit(run_package, package, "cuda", inputs).result()
    assert all(np.isfinite(value).all() for value in answers.values())
    agrees(package, reference)


def test_a_recipe_is_delivered_verified_and_opened(tiny: Tiny, tmp_path: Path) -> None:
    """All passes that write for a GPU through the workers, every check on the GPU, and an artefact that opens."""
    (tmp_path / "texts.txt").write_text("the cat sat on the mat\na very good film , not bad !\n")
    half = {"pass": "cast_half", "dtype": "bfloat16"}
    steps: list[dict[str, Any]] = [
        {"pass": "use_sdpa"}, {**half, "name": "bf16"}, {"pass": "compile_torch"}, {"pass": "merge_qkv", "after": "reference"},
        {**half, "name": "merged"}, {"pass": "pack_sequences", "attention": "varlen", "name": "unpadded"}, {"pass": "capture_graphs"},
    ]  # fmt: skip
    if torch.cuda.get_device_capability() >= (8, 9):
        steps += [{"pass": "quantize_fp8", "after": "unpadded"}]
    recipe = {
        "schema_version": 1, "model": str(tiny("bert", "feature-extraction", "mean")), "device": "cuda", "steps": steps,
        "inputs": {"shapes": [[1, 8], [2, 8]], "texts": str(tmp_path / "texts.txt")}, "deliver": "last",
    }  # fmt: skip
    report = bertopt.run(recipe, tmp_path / "out")
    assert report.exit_code == 0, [(row.name, row.status, row.reason) for row in report.stages]
    artifact = tmp_path / "out" / "artifact"
    assert verify(artifact).exit_code == 0
    code = "import bertopt, sys; print(bertopt.load(sys.argv[1], device='cuda')(['the cat sat']).shape)"
    fresh = subprocess.run([sys.executable, "-c", code, str(artifact)], capture_output=True, text=True, check=False)
    assert fresh.returncode == 0 and fresh.stdout.startswith("(1, "), fresh.stderr


def test_onnxruntime_cuda(reference: Eager, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        pytest.skip("needs onnxruntime-gpu")
    model = UseSdpa()(reference, context(tmp_path, "sdpa")).model
    graph = FuseOrt()(ExportOnnx(opset=20)(model, context(tmp_path, "onnx")).model, context(tmp_path, "fused")).model
    agrees(graph, reference)
    agrees(CastOnnxHalf()(graph, context(tmp_path, "fp16")).model, reference)


def test_nvml_sees_the_gpu_and_what_a_process_takes_of_it() -> None:
    pytest.importorskip("pynvml")
    before = gpu.state()
    assert before is not None and before.capability == "sm{}{}".format(*torch.cuda.get_device_capability())
    assert before.driver_cuda >= (11, 0)
    # In a new process: this one has its CUDA context and some memory already, and in a container NVML may not know it by its id.
    code = (
        "import os, torch\n"
        "from bertopt.system import gpu\n"
        "before = gpu.state().used_bytes\n"
        "kept = torch.ones(64 << 20, device='cuda')\n"
        "print(gpu.memory_of(os.getpid(), before))"
    )
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert asked.returncode == 0 and int(asked.stdout) >= 256 << 20, asked.stderr


@pytest.mark.parametrize("cuda_graphs", [False, True])
@pytest.mark.parametrize("library", ["tensorrt", "tensorrt_rtx"])
def test_tensorrt(reference: Eager, tmp_path: Path, library: str, cuda_graphs: bool) -> None:
    pytest.importorskip(library)
    model = UseSdpa()(reference, context(tmp_path, "sdpa")).model
    graph = CastOnnxHalf()(ExportOnnx()(model, context(tmp_path, "onnx")).model, context(tmp_path, "fp16")).model
    # Two profiles, so that one is switched for the other, and no targets: the engine is for the GPU here.
    profiles = ({"min": (1, 1), "opt": (1, 16), "max": (1, 64)}, {"min": (2, 8), "opt": (4, 16), "max": (8, 32)})
    try:
        options = {"library": library, "profiles": profiles, "cuda_graphs": cuda_graphs}
        built = BuildTensorrt.model_validate(options)(graph, context(tmp_path, "engine"))
    except Unsupported as error:
        pytest.skip(str(error))
    agrees(built.model, reference)
