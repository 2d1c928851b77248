"""Static INT8: what is quantised and with which ranges, what ONNX Runtime makes of it, and what is refused."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bertopt
from bertopt import passes, stages
from bertopt.checks import parity
from bertopt.checks.parity import DEFAULT_LIMITS
from bertopt.core import Onnx, Pass, RuntimeFacts
from bertopt.errors import Unsupported, UsageError
from bertopt.passes import ExportOnnx, FuseOrt, QuantizeInt8, UseSdpa
from bertopt.quantization import activation_ranges, calibration_inputs, qdq
from bertopt.quantization.activation_ranges import Range, Sample
from bertopt.recipe.parser import from_dict
from bertopt.results import Limits
from bertopt.sessions import open_session
from bertopt.system import environment
from tests.support.built import Built
from tests.support.compared import cases
from tests.support.exports import Exports
from tests.support.rewritten import nodes
from tests.support.shared_workers import cheap_workers
from tests.support.tiny_models import NORM_FIRST_FAMILIES, Tiny

SDPA, E23, E20, FUSE = UseSdpa(), ExportOnnx(), ExportOnnx(opset=20), FuseOrt()
STATIC = QuantizeInt8(scheme="static")
TEXTS = (
    "the cat sat on the mat .",
    "a very good film , not bad !",
    "it was bad",
    "",
    "they ran",
    "is the dog good ?",
) * 4
#: Two of 34 labels of a random model may flip: its logits are close together.
LIMITS = Limits(label_flips_max=0.06).over(DEFAULT_LIMITS["int8"])


@pytest.fixture(scope="module")
def built(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory, export: Exports) -> Iterator[Built]:
    with Built.opened(tiny, tmp_path_factory.mktemp("quantize_int8"), export, TEXTS) as built:
        yield built


def compared(reference: Any, model: Onnx) -> Any:
    ours, theirs = open_session(model, threads=1), open_session(reference, threads=1)
    return parity.judge(cases(ours, theirs, model.spec, [(2, 8), (3, 16)]), LIMITS, None)


ROUTES: dict[str, tuple[Pass[Any, Any], ...]] = {
    "23": (SDPA, E23, STATIC),
    "23_fused": (SDPA, E23, FUSE, STATIC),
    "20": (SDPA, E20, STATIC),
    "20_fused": (SDPA, E20, FUSE, STATIC),
    "eager": (E23, STATIC),
    "percentile": (SDPA, E23, QuantizeInt8(scheme="static", calibration="percentile")),
    "smooth": (SDPA, E23, QuantizeInt8(scheme="static", smooth_quant=0.5)),
    "smooth_fused": (SDPA, E23, FUSE, QuantizeInt8(scheme="static", smooth_quant=0.5)),
    "per_tensor": (SDPA, E23, QuantizeInt8(scheme="static", per_channel=False)),
    "reduced": (SDPA, E23, QuantizeInt8(scheme="static", reduce_range=True)),
}


@pytest.mark.parametrize(
    ("family", "route"),
    [("bert", route) for route in ROUTES]
    + [(family, "23") for family in ("roberta", "distilbert", "albert", "modernbert")]
    + [(family, "eager") for family in ("mpnet", "deberta-v2", "rembert")]
    + [(family, route) for family in NORM_FIRST_FAMILIES for route in ("23_fused", "smooth")],
)
def test_every_product_is_integer_in_the_session_and_the_answers_hold(built: Built, family: str, route: str) -> None:
    steps = ROUTES[route]
    result = built.build(family, *steps)
    model = result.model
    facts = open_session(model, threads=1).facts()
    found = steps[-1].effects(model, facts)
    number = result.changes["products"]
    assert number == len(qdq.products(graph_of(built.build(family, *steps[:-1]).model)))
    assert found == {
        "products with INT8 weights": (number, number), "products in integer kernels": (number, number),
    }  # fmt: skip
    assert model.precision == "int8"
    judged = compared(built.build(family).model, model)
    assert judged.passed, judged.worst


def test_nothing_but_products_reads_what_is_quantised_and_fusions_are_kept(built: Built) -> None:
    for route in ("23", "23_fused"):
        steps = ROUTES[route]
        before, after = (nodes(built.build("bert", *line).model) for line in (steps[:-1], steps))
        after -= Counter(QuantizeLinear=after["QuantizeLinear"], DequantizeLinear=after["DequantizeLinear"])
        assert after == before
        for node in graph_of(built.build("bert", *steps).model):
            if node.op_type == "DequantizeLinear":
                assert {user.op_type for user in node.outputs[0].consumers()} <= {"MatMul", "Gemm"}
    # Query, key and value share one quantised input.
    assert nodes(built.build("bert", *ROUTES["23"]).model)["QuantizeLinear"] == 10


def graph_of(model: Onnx) -> Any:
    import onnx_ir

    return onnx_ir.load(model.path).graph


def test_a_text_answers_alike_whatever_its_neighbours(built: Built) -> None:
    model = built.build("bert", *ROUTES["23"]).model
    session = open_session(model, threads=1)
    encode = built.context().encode
    assert encode is not None
    alone, among = encode(TEXTS[2:3]), encode(TEXTS[:6])
    assert np.abs(session.run(alone)["logits"][0] - session.run(among)["logits"][2]).max() < 1e-5


def test_facts_need_nothing_that_running_does_not_bring(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """`bertopt verify` asks for them where only `bertopt[serve]` is installed."""
    model = built.build("bert", *ROUTES["23"]).model
    monkeypatch.setitem(sys.modules, "onnx_ir", None)
    assert open_session(model, threads=1).facts().kernels is None


def test_weights_alone_are_no_integer_products(built: Built, tmp_path: Path) -> None:
    # What onnxruntime's own quantize_static leaves of a fused graph: floats are multiplied.
    import onnx_ir

    model = built.build("bert", *ROUTES["23"]).model
    graph = onnx_ir.load(model.path)
    for node in list(graph.graph):
        if node.op_type in ("MatMul", "Gemm") and node.inputs[0].name.endswith("_dequantized"):
            node.replace_input_with(0, node.inputs[0].producer().inputs[0].producer().inputs[0])
    onnx_ir.save(graph, tmp_path / "model.onnx")
    floats = replace(model, path=tmp_path / "model.onnx")
    found = STATIC.effects(floats, open_session(floats, threads=1).facts())
    assert found == {"products with INT8 weights": (14, 0), "products in integer kernels": (14, 0)}


@pytest.mark.parametrize("scheme", ["static", "dynamic"])
def test_products_that_are_kept_stay_float(built: Built, scheme: Any) -> None:
    parent = built.build("bert", SDPA, E23).model
    names = [node.name for node in qdq.products(graph_of(parent))]
    apply = QuantizeInt8(scheme=scheme, keep_fp32=(names[3], f"{names[-1]}*"))
    model = apply(parent, built.context()).model
    kept = {
        node.name for node in graph_of(model) if node.op_type in ("MatMul", "Gemm") and node.inputs[1].is_initializer()
    }
    # ONNX Runtime's dynamic quantiser makes a Gemm a MatMul, kept or not.
    assert {name.removesuffix("_MatMul") for name in kept} == {names[3], names[-1]}
    found = apply.effects(model, open_session(model, threads=1).facts())
    assert found == {"products with INT8 weights": (12, 12), "products in integer kernels": (12, 12)}
    plain = QuantizeInt8(scheme=scheme).effects(model, RuntimeFacts())
    assert plain["products with INT8 weights"] == (14, 12)


def test_what_keep_fp32_names_must_be_there(built: Built) -> None:
    parent = built.build("bert", SDPA, E23).model
    with pytest.raises(Unsupported, match=r"must name products of the graph, such as .*; got 'layer\.9'"):
        QuantizeInt8(keep_fp32=("layer.9",))(parent, built.context())


@pytest.mark.parametrize("scheme", ["static", "dynamic"])
def test_where_everything_is_kept_nothing_is_found(built: Built, scheme: Any) -> None:
    apply = QuantizeInt8(scheme=scheme, keep_fp32=("*",))
    result = apply(built.build("bert", SDPA, E23).model, built.context())
    assert not any(result.changes.values())
    shown = apply.effects(result.model, open_session(result.model, threads=1).facts())
    assert shown == {"products with INT8 weights": (1, 0)}


# Calibration


def test_it_takes_texts_and_a_tokenizer(built: Built) -> None:
    parent = built.build("bert", SDPA, E23).model
    for ctx in (replace(built.context(), texts=()), replace(built.context(), encode=None)):
        with pytest.raises(Unsupported, match="calibrated on texts; got none"):
            STATIC(parent, ctx)


def test_packed_networks_are_calibrated_on_packed_rows(built: Built) -> None:
    spec = built.build("bert").model.spec
    packed = spec.model_copy(update={"layout": "packed", "row_length": 64, "position_offset": 2})
    for inputs in calibration_inputs.samples(packed, built.context(), 24):
        assert tuple(inputs) == packed.network_inputs
        valid = calibration_inputs.valid_tokens(packed, inputs)[0]
        segments, positions = (inputs[name][0][valid] for name in ("segment_ids", "position_ids"))
        first = inputs["first_tokens"][0, : segments.max()]
        assert (positions[first] >= 2).all() and (segments[first] == np.arange(1, len(first) + 1)).all()
        assert (np.diff(segments) >= 0).all() and (np.diff(positions)[np.diff(segments) == 0] >= 1).all()


@pytest.fixture
def product(tmp_path: Path) -> Path:
    """y = norm(x) · W for x [B, S, 4]: what feeds a product is a normalisation's answer."""
    import onnx_ir as ir

    x = ir.val("x", dtype=ir.DataType.FLOAT, shape=ir.Shape(["B", "S", 4]))
    values = {"weight": np.array([1, 1, 1, 64], np.float32), "bias": np.zeros(4, np.float32)}
    values["matrix"] = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    constants = {name: ir.val(name, const_value=ir.tensor(array, name=name)) for name, array in values.items()}
    norm = ir.node("LayerNormalization", [x, constants["weight"], constants["bias"]], name="norm")
    norm.outputs[0].name = "normed"
    times = ir.node("MatMul", [norm.outputs[0], constants["matrix"]], name="times")
    both = ir.node("Concat", [times.outputs[0], norm.outputs[0]], {"axis": 2}, name="both")
    both.outputs[0].name, both.outputs[0].dtype = "y", ir.DataType.FLOAT
    graph = ir.Graph([x], [both.outputs[0]], nodes=[norm, times, both], initializers=[*constants.values()],
                     opset_imports={"": 23}, name="g")  # fmt: skip
    ir.save(ir.Model(graph, ir_version=10), tmp_path / "product.onnx")
    return tmp_path / "product.onnx"


def seen(rows: int, length: int, seed: int = 0) -> Sample:
    x = np.random.default_rng(seed).normal(size=(rows, length, 4)).astype(np.float32)
    valid = np.ones((rows, length), bool)
    valid[:, length // 2 :] = False
    return Sample({"x": x}, valid)


def normed(x: Any) -> Any:
    scaled = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return scaled * np.array([1, 1, 1, 64])


def test_a_range_is_what_valid_tokens_hold(product: Path) -> None:
    given = [seen(3, 6), seen(2, 40, 1)]
    found = activation_ranges.measure(product, ["normed"], given, "minmax")["normed"]
    wanted = np.concatenate([normed(sample.inputs["x"])[sample.valid] for sample in given])
    assert found.low == pytest.approx(wanted.min(), rel=1e-5)
    assert found.high == pytest.approx(wanted.max(), rel=1e-5)
    assert found.channels == pytest.approx(np.abs(wanted).max(axis=0), rel=1e-5)


def test_percentile_cuts_what_is_rare_and_entropy_what_costs_little(product: Path) -> None:
    given = [seen(200, 600)]
    widths = {}
    for method in ("minmax", "percentile", "entropy"):
        found = activation_ranges.measure(product, ["normed"], given, method)["normed"]
        assert found.low < 0 < found.high
        widths[method] = found.high - found.low
    assert widths["entropy"] <= widths["minmax"] and widths["percentile"] <= widths["minmax"]


def test_what_is_not_finite_has_no_range(product: Path) -> None:
    sample = seen(1, 8)
    sample.inputs["x"][0, 7] = np.inf
    activation_ranges.measure(product, ["normed"], [sample], "minmax")
    sample.inputs["x"][0, 0] = np.inf
    with pytest.raises(Unsupported, match="'normed' is not finite"):
        activation_ranges.measure(product, ["normed"], [sample], "minmax")


# What is written


def run(graph: Any, folder: Path, x: Any) -> Any:
    import onnx_ir
    import onnxruntime as ort

    onnx_ir.save(graph, folder / "run.onnx")
    return ort.InferenceSession(folder / "run.onnx", providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]


def test_smoothing_moves_large_channels_and_changes_no_answer(product: Path, tmp_path: Path) -> None:
    import onnx_ir

    given = [seen(4, 32)]
    before = activation_ranges.measure(product, ["normed"], given, "minmax")
    graph = onnx_ir.load(product)
    x = given[0].inputs["x"]
    wanted = run(graph, tmp_path, x)
    nodes = qdq.products(graph.graph)
    assert qdq.smooth(graph.graph, nodes, before, 0.5) == 1
    assert np.allclose(run(graph, tmp_path, x), wanted, rtol=1e-5, atol=1e-5)
    after = activation_ranges.measure(tmp_path / "run.onnx", ["normed"], given, "minmax")
    spread = [float(np.max(one["normed"].channels) / np.min(one["normed"].channels)) for one in (before, after)]
    assert spread[1] < spread[0] / 4
    errors = []
    for source, ranges in ((onnx_ir.load(product), before), (graph, after)):
        qdq.quantize(source.graph, qdq.products(source.graph), ranges, per_channel=True, reduce_range=False)
        errors.append(np.abs(run(source, tmp_path, x) - wanted)[given[0].valid].mean())
    assert errors[1] < errors[0]


@pytest.mark.parametrize(("reduce_range", "levels"), [(False, 127), (True, 64)])
def test_weights_use_their_whole_range(product: Path, reduce_range: bool, levels: int) -> None:
    import onnx_ir

    graph = onnx_ir.load(product)
    qdq.quantize(graph.graph, qdq.products(graph.graph), {"normed": Range(-1.0, 3.0)}, True, reduce_range)
    constants = {name: value.const_value.numpy() for name, value in graph.graph.initializers.items()}
    (weights,) = (array for array in constants.values() if array.dtype == np.int8 and array.ndim == 2)
    assert weights.shape == (4, 3) and (np.abs(weights).max(axis=0) == levels).all()
    assert constants["normed_scale"] == pytest.approx(4 / 255) and constants["normed_zero_point"] == 64
    assert not any(array.dtype == np.float32 and array.ndim == 2 for array in constants.values())


@pytest.mark.parametrize(
    ("flags", "levels"), [("avx2 avx512f", 64), ("avx2 avx_vnni", 127), ("avx2 avx512f avx512_vnni", 127), ("asimd asimddp", 127), ("asimd", 127)]
)
@pytest.mark.parametrize("scheme", ["static", "dynamic"])
def test_weights_have_seven_bits_where_eight_would_saturate(
    built: Built, monkeypatch: pytest.MonkeyPatch, flags: str, levels: int, scheme: Any
) -> None:
    import onnx_ir

    monkeypatch.setattr(environment, "_cpuinfo", lambda: f"flags : {flags}\n")
    result = QuantizeInt8(scheme=scheme)(built.build("bert", SDPA, E23).model, built.context())
    found = [value.const_value.numpy() for value in onnx_ir.load(result.model.path).graph.initializers.values() if value.const_value is not None]
    weights = [array for array in found if array.dtype == np.int8 and array.ndim == 2]
    assert weights and {int(np.abs(array.astype(int)).max()) for array in weights} == {levels}


# Recipes


def recipe(model: Path, *steps: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    line = [{"pass": "use_sdpa"}, {"pass": "export_onnx"}, *steps]
    return {"schema_version": 1, "model": str(model), "device": device, "inputs": {"shapes": [[2, 8]]}, "steps": line}


INT8 = {"pass": "quantize_int8"}


@pytest.mark.parametrize(
    ("steps", "device", "message"),
    [
        ([INT8 | {"calibration": "minmax"}], "cpu", "calibration goes with scheme: static"),
        ([INT8 | {"smooth_quant": 0.5}], "cpu", "smooth_quant goes with scheme: static"),
        ([INT8, INT8 | {"scheme": "static", "name": "again"}], "cpu", "the graph is quantised already"),
        ([INT8 | {"scheme": "static"}], "cuda", "no static INT8 products for CUDA"),
        ([INT8 | {"scheme": "static", "smooth_quant": 1.0}], "cpu", "smooth_quant must be less than 1"),
    ],
)
def test_refused_before_anything_runs(tiny: Tiny, steps: list[dict[str, Any]], device: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        from_dict(recipe(tiny(), *steps, device=device))


def test_a_run_calibrates_on_its_texts(tiny: Tiny, tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(text or "." for text in TEXTS))
    step = INT8 | {"scheme": "static", "limits": LIMITS.model_dump(exclude_none=True) | {"invariance_max": 1e-5}}
    data = recipe(tiny(), step)
    data["inputs"]["texts"] = str(texts)
    with cheap_workers("pipeline"):
        report = bertopt.run(data, tmp_path / "out")
    assert report.exit_code == 0, report.reason
    row = report.stage("quantize_int8")
    assert row.changes == {"products": 14}
    assert row.effects["products in integer kernels"] == (14, 14)
    manifest = stages.read_manifest(tmp_path / "out" / "artifact")
    assert manifest.precision == "int8" and "isa" in manifest.environment
    assert passes.require("quantize_int8").model_validate(manifest.passes[-1].options) == STATIC
