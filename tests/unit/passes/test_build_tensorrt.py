"""`build_tensorrt` without a GPU: what TensorRT-RTX builds ahead of time, for whom, and what is refused. No engine is run."""

from __future__ import annotations

import hashlib
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bertopt.core import Engine, Onnx, Pass, Profile
from bertopt.errors import IntegrityError, Unsupported
from bertopt.passes import BuildTensorrt, CastOnnxHalf, ExportOnnx, QuantizeInt8, UseSdpa, build_tensorrt
from bertopt.sessions import open_session
from bertopt.system import tensorrt_import
from tests.support.built import Built
from tests.support.compared import cases
from tests.support.exports import Exports
from tests.support.tiny_models import WORDS, Tiny

SDPA, E23, E20 = UseSdpa(), ExportOnnx(), ExportOnnx(opset=20)
#: The last pass of a graph with spelled-out attention, by precision.
LAST: dict[str, tuple[Pass[Any, Any], ...]] = {
    "float32": (), "float16": (CastOnnxHalf(),), "int8": (QuantizeInt8(scheme="static", symmetric=True, samples=8),),
}  # fmt: skip


@pytest.fixture(scope="module")
def rtx() -> Any:
    return pytest.importorskip("tensorrt_rtx")


@pytest.fixture(scope="module")
def built(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory, export: Exports) -> Iterator[Built]:
    texts = [" ".join(WORDS[i : i + 5]) for i in range(20)]
    with Built.opened(tiny, tmp_path_factory.mktemp("tensorrt"), export, texts) as built:
        yield built


def graph(built: Built, precision: str, family: str = "bert") -> Onnx:
    found: Onnx = built.build(family, SDPA, E20, *LAST[precision]).model
    return found


PROFILES = (Profile(min=(1, 1), opt=(1, 8), max=(1, 32)), Profile(min=(1, 1), opt=(4, 8), max=(8, 16)))


def config_of(trt: Any) -> Any:
    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    return types.SimpleNamespace(builder=builder, network=builder.create_network(0))


def test_tf32_is_cleared(rtx: Any, built: Built) -> None:
    made = config_of(rtx)
    assert made.builder.create_builder_config().get_flag(rtx.BuilderFlag.TF32)
    config = BuildTensorrt()._config(rtx, made.builder, made.network, graph(built, "float32"))
    assert not config.get_flag(rtx.BuilderFlag.TF32)


def test_without_targets_the_engine_is_for_the_gpu_here(
    rtx: Any, built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (12, 0))
    config = config_of(rtx).builder.create_builder_config()
    assert BuildTensorrt(library="tensorrt_rtx")._targets(rtx, config, replace(built.context(), device="cuda")) == ("sm120",)
    assert config.num_compute_capabilities == 1
    assert config.get_compute_capability(0) == rtx.ComputeCapability.CURRENT


@pytest.mark.parametrize(("operator", "advice"), [("Attention", "; TensorRT reads Attention from 10.14 on; use that, or export with opset: 20"), ("Other", "")])
def test_an_operator_that_the_parser_does_not_know_is_named(
    rtx: Any, built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operator: str, advice: str
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
        build_tensorrt._parse(rtx, builder, tensorrt_import.logger(rtx), replace(graph(built, "float16"), path=tmp_path / "model.onnx"))


@pytest.mark.parametrize("precision", ["float32", "float16", "int8"])
def test_engines_of_several_profiles_are_built(rtx: Any, built: Built, precision: str) -> None:
    build = BuildTensorrt(library="tensorrt_rtx", profiles=PROFILES, targets=("sm86", "sm89"))
    result = build(graph(built, precision), built.context())
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
def test_engines_of_8_bits_are_built_for_the_gpus_that_have_them(rtx: Any, built: Built, tmp_path: Path, family: str) -> None:
    """Built, not run: whether the products then run in 8 bits cannot be seen without a GPU."""
    int8 = graph(built, "int8", family)
    profiles = (*PROFILES, Profile(min=(1, 1), opt=(2, 24), max=(2, 48)))

    def engine(of: Onnx, *targets: Any) -> Any:
        return BuildTensorrt(library="tensorrt_rtx", profiles=profiles, targets=targets)(of, built.context())

    assert engine(int8, "sm86", "sm89", "sm120").changes["dequantize_layers"] > 0
    fp8 = fp8_of(int8, tmp_path / "fp8.onnx")
    assert engine(fp8, "sm89", "sm120").model.path.stat().st_size > 10_000
    with pytest.raises(Unsupported, match=r"(?i)fp8"):
        engine(fp8, "sm86")


@pytest.mark.parametrize(("family", "precision"), [("roberta", "float16"), ("distilbert", "bfloat16"), ("bert", "bfloat16")])
def test_engines_of_other_families_are_built(rtx: Any, built: Built, family: str, precision: Any) -> None:
    half = built.build(family, SDPA, E20, CastOnnxHalf(dtype=precision)).model
    profiles = (*PROFILES, Profile(min=(1, 1), opt=(2, 24), max=(2, 48)))
    build = BuildTensorrt(library="tensorrt_rtx", profiles=profiles, targets_if_no_gpu=("sm86", "sm89", "sm120"))
    engine = build(half, built.context()).model
    assert engine.targets == ("sm86", "sm89", "sm120") and len(engine.profiles) == 3
    assert engine.sha256 == hashlib.sha256(engine.path.read_bytes()).hexdigest()
    assert (engine.driver, engine.cuda_version) == (None, None)


def test_targets_of_a_machine_without_a_gpu_do_not_matter_where_there_is_one(
    rtx: Any, built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (12, 0))
    step = BuildTensorrt(library="tensorrt_rtx", targets_if_no_gpu=("sm86",))
    config = config_of(rtx).builder.create_builder_config()
    assert step._targets(rtx, config, replace(built.context(), device="cuda")) == ("sm120",)
    assert step._targets(rtx, config, built.context()) == ("sm86",)


def test_zero_points_are_why_tensorrt_refuses_int8(built: Built) -> None:
    import onnx_ir

    nodes = onnx_ir.load(graph(built, "int8").path).graph
    down = [node for node in nodes if node.op_type == "QuantizeLinear"]
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
    reason = BuildTensorrt().conflict([SDPA, E20, step])
    assert reason is None if words is None else words in str(reason)


def test_symmetric_is_static() -> None:
    assert "scheme: static" in str(QuantizeInt8(symmetric=True).conflict([]))
    step = QuantizeInt8(scheme="static", symmetric=True)
    assert step.conflict([]) is None and step.device_conflict("cuda", []) is None
    assert "symmetric: true" in str(QuantizeInt8(scheme="static").device_conflict("cuda", []))


def test_symmetric_int8_is_quantised_and_close(built: Built) -> None:
    model = graph(built, "int8")
    session = open_session(model, threads=1)
    counts = QuantizeInt8(scheme="static", symmetric=True).effects(model, session.facts())
    assert counts == {"products with INT8 weights": (14, 14)}
    plain = open_session(graph(built, "float32"), threads=1)
    found = cases(session, plain, model.spec, [(2, 16)])
    assert np.mean([case.cosine_mean for case in found if case.cosine_mean is not None]) > 0.95


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


def test_rtx_has_no_use_for_a_timing_cache_and_says_so(rtx: Any, built: Built, tmp_path: Path) -> None:
    path = tmp_path / "timings"
    build = BuildTensorrt(library="tensorrt_rtx", profiles=PROFILES[:1], targets=("sm86",), timing_cache=str(path))
    assert build(graph(built, "float16"), built.context()).changes["timing_cache_not_used"] == 1
    assert not path.exists()


# Attention as one node, and targets

PROFILE = Profile(min=(1, 1), opt=(2, 8), max=(4, 64))
Build = Callable[..., BuildTensorrt]


@pytest.fixture(scope="module")
def ahead() -> Build:
    """`ahead(*targets)`: a build with TensorRT-RTX."""
    pytest.importorskip("tensorrt_rtx")
    return lambda *targets: BuildTensorrt(library="tensorrt_rtx", profiles=(PROFILE,), targets=targets)


def test_engine_for_two_gpus(built: Built, ahead: Build) -> None:
    half = built.build("bert", SDPA, E23, CastOnnxHalf()).model
    result = ahead("sm86", "sm89")(half, built.context())
    engine = result.model
    assert isinstance(engine, Engine)
    # Six products a layer, pooler and classifier; each attention is a pair of products inside.
    assert result.changes["fp16_products"] == 16
    assert not [kind for kind in result.changes if kind.endswith("_products") and kind != "fp16_products"]
    assert (engine.precision, engine.targets, engine.profiles) == ("float16", ("sm86", "sm89"), (PROFILE,))
    assert engine.path.parent.name == f"tensorrt_rtx-{engine.version}_sm86_sm89"
    assert engine.path.stat().st_size > 10_000
    if not torch.cuda.is_available():
        with pytest.raises(Unsupported, match="the engine is for sm86, sm89 and there is no CUDA GPU here"):
            open_session(engine)


def test_engine_profiles_stop_at_the_usable_positions(built: Built, ahead: Build) -> None:
    half = built.build("bert", SDPA, E23, CastOnnxHalf()).model
    step = ahead("sm86").model_copy(update={"profiles": (Profile(),)})
    assert step(half, built.context()).model.profiles == (Profile(opt=(8, 64), max=(32, 64)),)


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (("sm86", "sm1"), r"targets must be among sm.*sm86.*; got sm1$"),
        ((), r"no GPU here to build for; name some with targets: \[sm86, sm89\]"),
    ],
)
def test_engine_for_no_known_gpu(built: Built, ahead: Build, targets: tuple[str, ...], words: str) -> None:
    with pytest.raises(Unsupported, match=words):
        ahead(*targets)(built.build("bert", SDPA, E23, CastOnnxHalf()).model, built.context())


def test_engine_of_native_float32_attention_is_refused_with_advice(built: Built, ahead: Build) -> None:
    with pytest.raises(
        Unsupported, match="no float32 Attention kernel: put cast_onnx_half before, or export with opset"
    ):
        ahead("sm86")(built.build("bert", SDPA, E23).model, built.context())


def test_engine_of_heads_without_a_kernel_is_refused_with_advice(built: Built, ahead: Build) -> None:
    """UltraBERT's tiny model has heads of 8."""
    with pytest.raises(Unsupported, match="no Attention kernel for heads of size 8: export with opset: 22"):
        ahead("sm86")(built.build("ultrabert", SDPA, E23, CastOnnxHalf()).model, built.context())


def test_engine_shapes() -> None:
    step = BuildTensorrt(profiles=(PROFILE, Profile(min=(5, 1), opt=(8, 16), max=(8, 32))))
    assert step.shape_conflict([(1, 64), (8, 32)]) is None
    found = step.shape_conflict([(1, 16), (8, 64)])
    assert found is not None
    assert found.startswith("shape [8, 64] is outside every profile ([1, 1] to [4, 64]; [5, 1] to [8, 32])")


def test_tensorrt_is_not_built_where_no_gpu_is(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Onnx(built.build("bert").model.spec, "float32", Path("model.onnx"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "tensorrt" or None)
    with pytest.raises(Unsupported, match="use library: tensorrt_rtx with targets"):
        BuildTensorrt()(model, built.context())
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(Unsupported, match=r"no tensorrt_rtx or tensorrt here; pip install"):
        BuildTensorrt()(model, built.context())
