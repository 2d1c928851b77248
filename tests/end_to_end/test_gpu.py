"""What needs an NVIDIA GPU: `pytest -m gpu`. Skipped, not faked, where there is none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from bertopt.checks import parity, probes
from bertopt.core import Context, Eager, Model
from bertopt.errors import Unsupported
from bertopt.modeling import checkpoint
from bertopt.passes import (
    BuildTensorrt,
    CastHalf,
    CastOnnxHalf,
    CompileTorch,
    ExportOnnx,
    FuseOrt,
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


def test_onnxruntime_cuda(reference: Eager, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        pytest.skip("needs onnxruntime-gpu")
    model = UseSdpa()(reference, context(tmp_path, "sdpa")).model
    graph = FuseOrt()(ExportOnnx(opset=20)(model, context(tmp_path, "onnx")).model, context(tmp_path, "fused")).model
    agrees(graph, reference)
    agrees(CastOnnxHalf()(graph, context(tmp_path, "fp16")).model, reference)


def test_nvml_sees_this_process_and_its_gpu(reference: Eager) -> None:
    pytest.importorskip("pynvml")
    before = gpu.state()
    assert before is not None and before.capability == "sm{}{}".format(*torch.cuda.get_device_capability())
    assert before.total_bytes > 1 << 30 and before.driver_cuda >= (11, 0)
    session = open_session(reference, "cuda")
    held = gpu.memory_of(os.getpid(), before.used_bytes)
    assert session is not None and held is not None and held > 0


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
