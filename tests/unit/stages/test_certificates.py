"""Weights on disk beside the parent's: what is certified, what contradicts, and which claims of precision are proven."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import helper

from bertopt.core import Context, Eager, Engine, Model, Onnx, OpenVino, RuntimeFacts
from bertopt.modeling import checkpoint
from bertopt.passes import (
    CastHalf,
    CastOnnxHalf,
    ConvertOpenvino,
    ExportOnnx,
    FuseOrt,
    KeepClsOnly,
    MergeQkv,
    PackSequences,
    QuantizeInt8,
    UseBetterTransformer,
    UseSdpa,
)  # fmt: skip
from bertopt.recipe.texts import Texts
from bertopt.runtime.tokenization import Tokenizer
from bertopt.stages import certificates, claims, openvino_certificate, torch_certificate
from bertopt.stages.manifest import Manifest
from bertopt.stages.onnx_certificate import coarse
from bertopt.system.openvino_import import runs_bfloat16
from tests.support.built import Built
from tests.support.exports import Exports
from tests.support.tiny_models import Tiny

TEXTS = Texts(("the cat sat on the mat .", "a very good film !", "it was bad") * 4).texts
Make = Callable[..., Model]


@pytest.fixture(scope="module")
def make(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory, export: Exports) -> Iterator[Make]:
    """The model after some passes."""
    with Built.opened(tiny, tmp_path_factory.mktemp("certificates"), export, TEXTS) as built:
        yield lambda *line: built.build("bert", *line).model


SDPA, EXPORT, FUSE = UseSdpa(), ExportOnnx(), FuseOrt()
BF16 = CastHalf(dtype="bfloat16")
SMOOTH = QuantizeInt8(scheme="static", smooth_quant=0.5)


@pytest.mark.parametrize(
    "line",
    [
        (SDPA, BF16), (SDPA, CastHalf(mode="autocast")), (SDPA, EXPORT), (SDPA, EXPORT, CastOnnxHalf()),
        (SDPA, EXPORT, FUSE, QuantizeInt8()), (SDPA, EXPORT, FUSE, QuantizeInt8(scheme="static")),
        (SDPA, EXPORT, QuantizeInt8(per_channel=False)), (SDPA, EXPORT, ConvertOpenvino()),
        (SDPA, EXPORT, SMOOTH), (SDPA, EXPORT, FUSE, SMOOTH),
        (SDPA, EXPORT, ConvertOpenvino(precision="int8")), (SDPA, EXPORT, ConvertOpenvino(precision="int8", smooth_quant=None, preset="performance")),
    ],
    ids=lambda line: "-".join(step.name() for step in line),
)  # fmt: skip
def test_what_the_passes_write_is_certified(make: Make, line: Any) -> None:
    found = certificates.certify(make(*line), make(*line[:-1]))
    assert found.status == "certified" and found.weights > 10, found


def test_functions_that_a_graph_calls_are_compared(make: Make, tmp_path: Path) -> None:
    """A function of another body was certified: a node calls it by name alone."""
    parent = make(SDPA, EXPORT)
    assert isinstance(parent, Onnx)

    def called(name: str, **attributes: Any) -> Onnx:
        graph = onnx.load(parent.path)
        for node in graph.graph.node:
            if node.op_type == "Gelu":
                node.op_type, node.domain = "Activation", "com.acme"
                del node.attribute[:]
        body = [helper.make_node("Gelu", ["x"], ["y"], **attributes)]
        graph.functions.append(helper.make_function("com.acme", "Activation", ["x"], ["y"], body, [helper.make_opsetid("", 23)]))
        graph.opset_import.append(helper.make_opsetid("com.acme", 1))
        onnx.save(graph, tmp_path / name)
        return replace(parent, path=tmp_path / name)

    exact, tanh = called("exact.onnx"), called("tanh.onnx", approximate="tanh")
    assert certificates.certify(called("again.onnx"), exact).status == "certified"
    found = certificates.certify(tanh, exact)
    assert found.status == "none" and "functions that its nodes call" in found.reason


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ((SDPA,), "other modules, code or hooks"), ((SDPA, BF16, CastHalf(keep_fp32=("layer.0",))), "other modules"),
        ((SDPA, EXPORT, FUSE), "built otherwise"),
    ],
    ids=["sdpa", "hooks", "fused"],
)  # fmt: skip
def test_what_cannot_be_certified_says_why(make: Make, line: Any, why: str) -> None:
    if line[-1].name() == "cast_half":
        line = (SDPA, line[-1])
    found = certificates.certify(make(*line), make(*line[:-1]))
    assert found.status == "none" and why in found.reason


def test_a_bias_in_integers_is_compared(make: Make, tmp_path: Path) -> None:
    """ONNX Runtime's integer products add an int32 bias. A real classifier, whose head has one, had no certificate."""

    def edit(graph: Any) -> None:
        value = next(v for n, v in graph.initializers.items() if v.dtype == ir.DataType.INT32 and n.endswith("_bias_quantized"))
        value.const_value = ir.tensor(value.const_value.numpy() + np.int32(2), name=value.name)

    parent = make(SDPA, EXPORT)
    found = certificates.certify(_edited(make(SDPA, EXPORT, QuantizeInt8(scheme="static")), edit, tmp_path), parent)
    assert found.status == "contradicted" and "bias" in found.reason


def test_one_wrong_bit_of_a_cast_contradicts(make: Make, tiny: Tiny) -> None:
    parent = make(SDPA)
    assert isinstance(parent, Eager)
    cast = BF16(parent, Context(Path("unused"))).model
    weight = cast.network.encoder.classifier.weight.data
    weight[1, 3] *= 1 + 2**-7
    found = certificates.certify(cast, parent)
    assert found.status == "contradicted" and "classifier.weight" in found.reason


class OnAnotherDevice:
    """A tensor that can be brought to the CPU and nothing else, as one of a GPU cannot be compared with one of the CPU."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def detach(self) -> OnAnotherDevice:
        return self

    def cpu(self) -> torch.Tensor:
        return self.tensor


def test_weights_on_two_devices_are_compared() -> None:
    """The first recipe on a GPU stopped at its first step: a session had moved the stage's network, the parent's was on the CPU."""
    weight, step = torch.linspace(-3, 3, 64).reshape(8, 8), torch.full((8, 1), 3 / 448)
    stored = (weight / step).to(torch.float8_e4m3fn)
    for right, scale in ((weight, None), (weight.bfloat16(), None), (stored, OnAnotherDevice(step))):
        assert torch_certificate._rounds(OnAnotherDevice(weight), OnAnotherDevice(right), scale)
        assert not torch_certificate._rounds(OnAnotherDevice(weight * 1.2), OnAnotherDevice(right), scale)


def test_what_keeps_its_precision_keeps_its_weights(make: Make) -> None:
    parent = make(SDPA, BF16)
    assert isinstance(parent, Eager)
    child = BF16(make(SDPA), Context(Path("unused"))).model
    assert certificates.certify(child, parent).status == "certified"
    child.network.encoder.classifier.bias.data[0] += 0.1
    assert certificates.certify(child, parent).status == "contradicted"


def _edited(model: Model, edit: Callable[[Any], None], folder: Path) -> Model:
    assert isinstance(model, Onnx)
    graph = ir.load(model.path)
    edit(graph.graph)
    ir.save(graph, folder / "model.onnx")
    return replace(model, path=folder / "model.onnx")


def _stored(graph: Any, kind: Any) -> Any:
    """The largest constant of a type."""
    return max((v for v in graph.initializers.values() if v.dtype == kind), key=lambda v: v.const_value.size)


def _swap_rows(kind: Any) -> Callable[[Any], None]:
    def edit(graph: Any) -> None:
        value = _stored(graph, kind)
        array = value.const_value.numpy().copy()
        array[[0, 1]] = array[[1, 0]]
        value.const_value = ir.tensor(array, dtype=kind, name=value.name)

    return edit


def _halve_scale(graph: Any) -> None:
    scale = next(v for n, v in graph.initializers.items() if n.endswith("_scale"))
    scale.const_value = ir.tensor(scale.const_value.numpy() * 0.5, name=scale.name)


def _other_operator(graph: Any) -> None:
    node = next(node for node in graph if node.op_type in ("Gelu", "Tanh"))
    made = ir.node("Sigmoid", [node.inputs[0]])
    node.outputs[0].replace_all_uses_with(made.outputs[0])
    node.prepend(made)


def _larger(ending: str) -> Callable[[Any], None]:
    """One channel of the last constant of that name is larger."""

    def edit(graph: Any) -> None:
        value = [v for n, v in graph.initializers.items() if n.endswith(ending)][-1]
        array = value.const_value.numpy().copy()
        array[np.abs(array).argmax()] += 0.3
        value.const_value = ir.tensor(array, name=value.name)

    return edit


def _without_going_back(graph: Any) -> None:
    """The residual sum reads the divided answer."""
    node = next(node for node in graph if (node.name or "").endswith("_unsmoothed"))
    node.outputs[0].replace_all_uses_with(node.inputs[0])


@pytest.mark.parametrize(
    ("last", "edit", "status"),
    [
        (CastOnnxHalf(), _swap_rows(ir.DataType.FLOAT16), "contradicted"),
        (QuantizeInt8(), _swap_rows(ir.DataType.INT8), "contradicted"),
        (QuantizeInt8(), _halve_scale, "contradicted"),
        (QuantizeInt8(scheme="static"), _swap_rows(ir.DataType.INT8), "contradicted"),
        (CastOnnxHalf(), _other_operator, "none"),
        (SMOOTH, _swap_rows(ir.DataType.INT8), "contradicted"), (SMOOTH, _larger("_smoothed_1"), "contradicted"),
        (SMOOTH, _larger("_smoothed_2"), "contradicted"), (SMOOTH, _larger("_smoothing"), "contradicted"),
        (SMOOTH, _without_going_back, "contradicted"),
    ],
    ids=["half rows", "int8 rows", "scale", "static rows", "operator", "smooth rows", "smooth weight", "smooth bias", "smooth back", "not back"],
)
def test_a_changed_graph_is_not_certified(make: Make, tmp_path: Path, last: Any, edit: Any, status: str) -> None:
    wrong = _edited(make(SDPA, EXPORT, last), edit, tmp_path)
    found = certificates.certify(wrong, make(SDPA, EXPORT))
    assert found.status == status, found


def test_a_foreign_weight_of_an_export_is_not_certified(make: Make, tmp_path: Path) -> None:
    wrong = _edited(make(SDPA, EXPORT), _swap_rows(ir.DataType.FLOAT), tmp_path)
    assert certificates.certify(wrong, make(SDPA)).status == "none"


@pytest.mark.parametrize("last", [QuantizeInt8(), CastOnnxHalf(), SMOOTH], ids=["int8", "half", "smooth"])
def test_a_table_of_words_is_held_to_the_checkpoint_too(make: Make, tmp_path: Path, last: Any) -> None:
    """`verify --against` has no parent but the checkpoint: an INT8 artefact of another one, in which one rare word differs, was the same model."""

    def other_word(graph: Any) -> None:
        value = next(v for n, v in graph.initializers.items() if "word_embeddings.weight" in n)
        array = value.const_value.numpy().copy()
        array[-3] = array[-2]
        value.const_value = ir.tensor(array, dtype=value.dtype, name=value.name)

    def folded(graph: Any) -> None:
        value = next(v for n, v in graph.initializers.items() if "word_embeddings.weight" in n)
        value.const_value = ir.tensor(value.const_value.numpy() + value.const_value.numpy().std(), dtype=value.dtype, name=value.name)

    right = make(SDPA, EXPORT, last)
    for same in (right, _edited(right, folded, tmp_path)):
        assert certificates.certify(same, make(SDPA)).status == "none"
    found = certificates.certify(_edited(right, other_word, tmp_path), make(SDPA))
    assert found.status == "contradicted" and "word_embeddings.weight" in found.reason


def _unused(graph: Any) -> None:
    graph.register_initializer(ir.val("unused", const_value=ir.tensor(np.ones((2, 2), np.int8), name="unused")))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_torchs_own_int8_layers_prove_a_claim(make: Make) -> None:
    """A pass that quantised layers so was refused: no weight was seen to be INT8."""
    parent = make(SDPA)
    assert isinstance(parent, Eager)
    network: Any = copy.deepcopy(parent.network)
    torch.ao.quantization.quantize_dynamic(network.base.encoder, {torch.nn.Linear}, inplace=True)
    found = claims.proven(replace(parent, precision="int8", network=network), RuntimeFacts())
    assert found is not None and 0.5 < found <= 1.0


def test_weights_that_are_used_prove_a_claim_and_others_do_not(make: Make, tmp_path: Path) -> None:
    facts = RuntimeFacts()
    for line in ((SDPA, BF16), (SDPA, CastHalf(mode="autocast")), (SDPA, EXPORT, CastOnnxHalf()), (SDPA, EXPORT, QuantizeInt8())):
        assert claims.proven(make(*line), facts) == 1.0
    assert claims.proven(make(SDPA, EXPORT), facts) is None
    graph = replace(_edited(make(SDPA, EXPORT), _unused, tmp_path), precision="int8")
    assert claims.proven(graph, facts) == 0.0
    network: Any = checkpoint.load(str(make().checkpoint), "text-classification", None)  # type: ignore[attr-defined]
    network.network.extra = torch.nn.Linear(2, 2).to(torch.bfloat16)
    assert claims.proven(replace(network, precision="bfloat16"), facts) == 0.0


def test_openvino_and_engines_are_asked_what_they_run(make: Make) -> None:
    spec, path = make().spec, Path("x")
    ov = OpenVino(spec, "int8", path)
    assert claims.proven(ov, RuntimeFacts(products={"u8": 3, "f32": 1})) == 0.75
    assert claims.proven(ov, RuntimeFacts(products={"f32": 4})) == 0.0
    assert claims.proven(ov, RuntimeFacts()) is None
    engine = Engine(spec, "float16", path, "tensorrt", "10", ("sm90",), (), "0" * 64)
    shown = {"Row major linear FP16 format": 9, "Row major linear FP32 format": 1, "Row major INT64 format": 50}
    assert claims.proven(engine, RuntimeFacts(output_formats=shown)) == 0.9


@pytest.mark.parametrize("name", ["word_embeddings", "val_"])
@pytest.mark.parametrize("smooth", [None, 0.7])
def test_weights_of_openvinos_int8_that_are_not_the_graphs_contradict(make: Make, tmp_path: Path, name: str, smooth: float | None) -> None:
    """Two rows that change places: a rare token's embedding, or two inputs of a product, which outputs in INT8 hardly show."""
    right, wrong = make(SDPA, EXPORT), ir.load(make(SDPA, EXPORT).path)  # type: ignore[attr-defined]
    value = next(value for key, value in wrong.graph.initializers.items() if name in key and len(value.shape) == 2)
    array = value.const_value.numpy().copy()
    array[[-2, -3]] = array[[-3, -2]]
    value.const_value = ir.tensor(array, name=value.name)
    ir.save(wrong, tmp_path / "wrong.onnx")
    assert isinstance(right, Onnx)
    tokenizer = Tokenizer(Path(str(make().checkpoint)), right.spec)  # type: ignore[attr-defined]
    context = Context(tmp_path, texts=TEXTS, encode=lambda t: tokenizer.batch(tokenizer.encode(t)))
    build = ConvertOpenvino(precision="int8", smooth_quant=smooth)
    made = build(replace(right, path=tmp_path / "wrong.onnx"), context).model
    found = certificates.certify(made, right)
    assert found.status == "contradicted" and "further than half a step" in found.reason, found
    # As `verify --against` has it, of an artefact that was changed since.
    found = certificates.certify(made, make())
    assert found.status == "contradicted" and "rows of the weights" in found.reason, found


@pytest.mark.parametrize("options", [{"precision": "bf16"}, {"precision": "int8"}, {"precision": "int8", "smooth_quant": None, "preset": "performance"}])
@pytest.mark.parametrize("fuse", [(), (FUSE,)])
def test_a_right_openvino_graph_does_not_contradict_the_checkpoint(make: Make, options: dict[str, Any], fuse: Any) -> None:
    if options["precision"] == "bf16" and not runs_bfloat16():
        pytest.skip("OpenVINO has no bfloat16 kernels for this CPU")
    found = certificates.certify(make(SDPA, EXPORT, *fuse, ConvertOpenvino(**options)), make())
    assert found.status == "none" and found.weights > 8 and "some rows alone" in found.reason, found


@pytest.mark.parametrize("passes", [(SDPA,), (SDPA, MergeQkv()), (SDPA, PackSequences()), (KeepClsOnly(),), (UseBetterTransformer(),)])
def test_no_pass_of_torch_contradicts_the_checkpoint_before_a_cast(make: Make, passes: Any) -> None:
    assert certificates.certify(make(*passes, BF16), make()).status == "none"


def test_a_word_changed_behind_a_cast_contradicts_the_checkpoint(make: Make) -> None:
    """As `verify --against` has it, of an artefact that was changed since."""
    sdpa = make(SDPA)
    assert isinstance(sdpa, Eager)
    cast = BF16(sdpa, Context(Path("unused"))).model
    cast.network.base.embeddings.word_embeddings.weight.data[-3] *= 2
    found = certificates.certify(cast, make())
    assert found.status == "contradicted" and "word_embeddings" in found.reason


@pytest.mark.parametrize(("form", "line", "parent", "expected"), [
    ("native", "use_sdpa build_native", "use_sdpa", True), ("native", "use_sdpa build_native", "", True), ("native", "build_native", "", True),
    ("native", "prune build_native", "", False), ("openvino", "use_sdpa export_onnx convert_openvino", "", True),
    ("openvino", "use_sdpa export_onnx convert_openvino", "use_sdpa", False), ("onnx", "use_sdpa export_onnx fuse_ort", "", True),
    ("eager", "use_sdpa cast_half", "", True), ("compiled", "use_sdpa cast_half compile_torch", "", True), ("eager", "pass_prune cast_half", "", False),
    ("engine", "use_sdpa export_onnx build_tensorrt", "", False),
])  # fmt: skip
def test_which_stages_are_compared_with_the_checkpoint(make: Make, form: str, line: str, parent: str, expected: bool) -> None:
    def manifest(form: str, line: str) -> Manifest:
        passes = [{"name": name, "options": {}} for name in line.split()]
        sources = {"pass prune": "0" * 64} if "pass_prune" in line else {}
        return Manifest.model_validate({"form": form, "precision": "float32", "spec": make().spec, "passes": passes, "sources": sources})

    assert certificates.comparable(manifest(form, line), manifest("eager", parent)) is expected


def test_a_step_that_is_too_large_hides_no_weight() -> None:
    """Zeros with the scale 1 are within half a step of every small weight."""
    weights = np.linspace(-0.3, 0.4, 96, dtype=np.float32).reshape(8, 12)
    largest = np.abs(weights).max(axis=0, keepdims=True)
    assert not coarse(weights, largest / 127) and not coarse(weights, largest / 63) and not coarse(weights, 0.4 / 127)
    assert coarse(weights, np.where(np.arange(12) == 7, 1.0, largest / 127)) and coarse(weights, 1.0)
    assert not coarse(weights * (np.arange(12) != 7), np.where(np.arange(12) == 7, 1.0, largest / 127)), "a channel of zeros"


def test_integers_that_are_no_weights_have_no_certificate_and_stop_nothing() -> None:
    """A constant of 8 bits may be a mask, which several operators read or none converts."""
    ov = pytest.importorskip("openvino")
    ops = ov.opset13
    read, flags = ops.parameter([4], np.uint8), ops.constant(np.ones(4, np.uint8))
    for graph in (ov.Model([ops.add(read, flags), ops.multiply(read, flags)], [read]), ov.Model([ops.add(read, flags)], [read])):
        (node,) = [each for each in graph.get_ops() if each.get_type_name() == "Constant"]
        assert openvino_certificate._stored(node, None)[1] is None  # type: ignore[arg-type]
