"""What needs an NVIDIA GPU: `pytest -m gpu`. Skipped, not faked, where there is none."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
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
    KeepClsOnly,
    MergeQkv,
    PackageAot,
    PackSequences,
    QuantizeFp8,
    UseBetterTransformer,
    UseSdpa,
)
from bertopt.runtime import replay
from bertopt.runtime.predictor import Predictor
from bertopt.sessions import open_session
from bertopt.system import compilers, gpu
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


def need_compiler(check: Callable[[str], None] = compilers.check_compiler) -> None:
    """Skip where there is none: the passes then say so, which needs no GPU to test."""
    try:
        check("cuda")
    except Unsupported as error:
        pytest.skip(str(error))


def context(folder: Path, name: str) -> Context:
    (folder / name).mkdir()
    return Context(folder / name, "cuda", tuple(SHAPES))


def test_fp16_eager(reference: Eager, tmp_path: Path) -> None:
    model = UseSdpa()(reference, context(tmp_path, "sdpa")).model
    agrees(CastHalf(dtype="float16")(model, context(tmp_path, "half")).model, reference)


def test_compiled(reference: Eager, tmp_path: Path) -> None:
    need_compiler()
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
    if compiled:
        need_compiler()
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


def built(model: Model, folder: Path, *passes: Any) -> Any:
    for number, step in enumerate(passes):
        model = step(model, context(folder, f"{number}-{step.name()}")).model
    return model


@pytest.mark.parametrize("task", ["feature-extraction", "text-classification"])
def test_first_tokens_of_unpadded_rows(tiny: Tiny, tmp_path: Path, task: str) -> None:
    """The last layer has one query a text, and keys of all its tokens."""
    reference = checkpoint.load(tiny("bert", task, "cls" if task == "feature-extraction" else None))
    passes = (KeepClsOnly(), MergeQkv(), CastHalf(), PackSequences(attention="varlen"), CaptureGraphs())
    agrees(built(reference, tmp_path, *passes), reference)


@pytest.mark.parametrize("family", ["roberta", "albert", "deberta-v2", "deberta", "modernbert", "nomic_bert", "gte", "eurobert"])
def test_other_families(tiny: Tiny, tmp_path: Path, family: str) -> None:
    reference = checkpoint.load(tiny(family, "token-classification"))
    (tmp_path / "padded").mkdir()
    agrees(built(reference, tmp_path / "padded", *(() if family.startswith("deberta") else (UseSdpa(),)), CastHalf()), reference)
    if family in ("roberta", "albert", "nomic_bert", "gte"):
        agrees(built(reference, tmp_path, CastHalf(), PackSequences(attention="varlen"), CaptureGraphs()), reference)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("task, pooling", [("text-classification", None), ("feature-extraction", "mean")])
def test_calls_at_once_and_one_left_early_change_no_answer(tiny: Tiny, tmp_path: Path, task: str, pooling: str | None, graphs: bool) -> None:
    """What a delivery does in a new process: one text alone, a long one, 33 in one call, pairs, and such calls from several threads."""
    folder = tiny("bert", task, pooling)
    passes = (MergeQkv(), CastHalf(), PackSequences(attention="varlen"), CaptureGraphs()) if graphs else (UseSdpa(), CastHalf())
    model = built(checkpoint.load(folder), tmp_path, *passes)
    predictor = Predictor(open_session(model, "cuda"), model.spec, folder)
    alone = replay.answers(predictor)
    for one_by_one, *at_once in (replay.at_once(predictor), replay.calls_at_once(predictor)):
        for answered in at_once:
            replay.check(answered, one_by_one, model.precision, "a call while other threads call")
    replay.check(replay.after_one_that_ends_early(predictor), alone, model.precision, "a call after one that was left")


@pytest.mark.parametrize("compiled", [False, True])
def test_fp8(tiny: Tiny, tmp_path: Path, compiled: bool) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU of sm89 or later")
    if compiled:
        need_compiler()
    reference = checkpoint.load(tiny("bert", "feature-extraction", "mean"))
    half = CastHalf(dtype="bfloat16")(UseSdpa()(reference, context(tmp_path, "sdpa")).model, context(tmp_path, "half")).model
    model: Any = QuantizeFp8()(half, context(tmp_path, "fp8")).model
    agrees(CompileTorch()(model, context(tmp_path, "compiled")).model if compiled else model, reference)


def run_package(model: Packaged, device: Device, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return open_session(model, device).run(inputs)


@pytest.mark.parametrize("unpadded", [False, True])
def test_package(reference: Eager, tmp_path: Path, unpadded: bool) -> None:
    need_compiler(compilers.check_packaging)
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


_HALF = {"pass": "cast_half", "dtype": "bfloat16"}
_UNPADDED: list[dict[str, Any]] = [
    {"pass": "merge_qkv"}, {**_HALF, "name": "merged"}, {"pass": "pack_sequences", "attention": "varlen", "name": "unpadded"},
]  # fmt: skip
RECIPES: dict[str, list[dict[str, Any]]] = {
    "compiled": [{"pass": "use_sdpa"}, _HALF, {"pass": "compile_torch"}],
    "graphs": [*_UNPADDED, {"pass": "capture_graphs"}],
    "fp8": [*_UNPADDED, {"pass": "quantize_fp8"}],
}


@pytest.mark.parametrize("last", RECIPES)
def test_a_recipe_is_delivered_verified_and_opened(tiny: Tiny, tmp_path: Path, last: str) -> None:
    """Passes that write for a GPU through the workers, every check on the GPU, and an artefact that opens; its texts may have a prompt."""
    if last == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU of sm89 or later")
    if last == "compiled":
        need_compiler()
    (tmp_path / "texts.txt").write_text("the cat sat on the mat\na very good film , not bad !\n")
    source = shutil.copytree(tiny("bert", "feature-extraction", "mean"), tmp_path / "model")
    (source / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "is it "}}))
    recipe = {
        "schema_version": 1, "model": str(source), "device": "cuda", "steps": RECIPES[last], "timing": {"quick": True},
        "inputs": {"shapes": [[1, 8], [2, 8]], "texts": str(tmp_path / "texts.txt")}, "deliver": "last",
    }  # fmt: skip
    report = bertopt.run(recipe, tmp_path / "out")
    assert report.exit_code == 0, [(row.name, row.status, row.reason) for row in report.stages]
    artifact = tmp_path / "out" / "artifact"
    assert verify(artifact).exit_code == 0
    code = "import bertopt, sys; print(bertopt.load(sys.argv[1], device='cuda')(['the cat sat'], prompt_name='query').shape)"
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
