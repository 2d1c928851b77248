"""Weights of two artefacts of one checkpoint beside each other: right ones agree, changed ones do not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from bertopt.core import Context, Model, Native, Onnx, OpenVino, Rewrite
from bertopt.modeling import checkpoint
from bertopt.passes import (
    BuildNative,
    CastHalf,
    CastOnnxHalf,
    ConvertOpenvino,
    ExportOnnx,
    FuseOrt,
    QuantizeInt8,
    UseSdpa,
)
from bertopt.results.fidelity import Certificate
from bertopt.stages import certificates
from bertopt.system import openvino_import
from bertopt.system.openvino_import import runs_bfloat16
from tests.support.built import Built
from tests.support.exports import Exports
from tests.support.tiny_models import Tiny

TEXTS = ("the cat sat on the mat .", "a very good film !", "it was bad") * 4
Make = Callable[..., Model]
Edit = Callable[[Any], None]

SDPA, EXPORT, FUSE = UseSdpa(), ExportOnnx(), FuseOrt()
DYNAMIC, STATIC = QuantizeInt8(), QuantizeInt8(scheme="static")
SMOOTH, SEVEN_BITS = QuantizeInt8(scheme="static", smooth_quant=0.5), QuantizeInt8(reduce_range=True)
INT8, SMOOTHER = ConvertOpenvino(precision="int8"), ConvertOpenvino(precision="int8", smooth_quant=0.7)
NATIVE, NATIVE_BF16 = BuildNative(), BuildNative(precision="bf16")


@pytest.fixture(scope="module")
def make(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory, export: Exports) -> Iterator[Make]:
    """The model after some passes."""
    with Built.opened(tiny, tmp_path_factory.mktemp("between"), export, TEXTS) as built:
        yield lambda *line: built.build("bert", *line).model


def between(mine: Model, theirs: Model, same_build: bool = False) -> Certificate:
    return certificates.between(mine, theirs, same_build)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((EXPORT, DYNAMIC), (EXPORT, DYNAMIC)), ((EXPORT, DYNAMIC), (EXPORT, STATIC)), ((EXPORT, STATIC), (EXPORT, DYNAMIC)),
        ((EXPORT, STATIC), (EXPORT, SMOOTH)), ((EXPORT, SMOOTH), (EXPORT, STATIC)), ((EXPORT, SMOOTH), (EXPORT, DYNAMIC)),
        ((EXPORT, DYNAMIC), (EXPORT, SEVEN_BITS)), ((EXPORT, DYNAMIC), (EXPORT,)), ((EXPORT,), (EXPORT, STATIC)),
        ((EXPORT, CastOnnxHalf()), (EXPORT, DYNAMIC)), ((EXPORT, SMOOTH), (EXPORT, CastOnnxHalf())),
        ((EXPORT, CastOnnxHalf()), (EXPORT,)), ((EXPORT, FUSE, DYNAMIC), (EXPORT, FUSE, STATIC)),
        ((EXPORT, INT8), (EXPORT, INT8)), ((EXPORT, INT8), (EXPORT, SMOOTHER)), ((EXPORT, ConvertOpenvino()), (EXPORT, INT8)),
        ((EXPORT, INT8), (EXPORT, ConvertOpenvino(precision="bf16"))), ((EXPORT, ConvertOpenvino()), (EXPORT, ConvertOpenvino(precision="bf16"))),
        ((NATIVE,), (NATIVE,)), ((NATIVE,), (NATIVE_BF16,)), ((NATIVE_BF16,), (NATIVE,)), ((NATIVE_BF16,), (NATIVE_BF16,)),
    ],
    ids=lambda line: "-".join(step.name() + "".join(f".{v}" for v in step.model_dump(exclude_defaults=True).values()) for step in line),
)  # fmt: skip
def test_right_artefacts_agree(make: Make, first: Any, second: Any) -> None:
    if any(getattr(step, "precision", "") == "bf16" and step.name() == "convert_openvino" for step in second) and not runs_bfloat16():
        pytest.skip("OpenVINO has no bfloat16 kernels for this CPU")
    found = between(make(SDPA, *second), make(SDPA, *first))
    assert found.status == "certified" and found.weights > 10, found
    assert between(make(SDPA, *first), make(SDPA, *first), same_build=True).status == "certified"


def test_what_is_built_otherwise_is_not_compared(make: Make) -> None:
    fused, plain = make(SDPA, EXPORT, FUSE, DYNAMIC), make(SDPA, EXPORT, DYNAMIC)
    found = between(fused, plain)
    assert found.status == "none" and "built otherwise than the baseline's" in found.reason
    assert between(fused, plain, same_build=True).status == "contradicted"
    assert between(make(SDPA, NATIVE), plain).status == "none"


def _onnx(edit: Callable[[Any], None]) -> Callable[[Model, Path], Model]:
    def changed(model: Model, folder: Path) -> Model:
        assert isinstance(model, Onnx)
        graph = ir.load(model.path)
        edit(graph.graph)
        ir.save(graph, folder / "model.onnx")
        return replace(model, path=folder / "model.onnx")

    return changed


def _constant(select: Callable[[str, Any], bool], change: Callable[[np.ndarray], np.ndarray]) -> Edit:
    """Change the middle constant of a graph that `select` chooses."""

    def edit(graph: Any) -> None:
        found = [value for name, value in graph.initializers.items() if select(name, value)]
        value = found[len(found) // 2]
        value.const_value = ir.tensor(np.asarray(change(value.const_value.numpy().copy()), value.const_value.numpy().dtype), dtype=value.dtype, name=value.name)

    return edit


def _scale_of_weights(name: str, value: Any) -> bool:
    return name.endswith("_scale") and value.const_value.size > 1


def _bias(name: str, value: Any) -> bool:
    return (name.endswith("bias") and value.dtype == ir.DataType.FLOAT) or name.endswith("_bias_quantized")


def _zeroed_head(array: np.ndarray) -> np.ndarray:
    array[:, :8] = 0
    return array


def _attribute(operator: str, name: str, value: Any) -> Edit:
    def edit(graph: Any) -> None:
        node = next(node for node in graph if node.op_type == operator)
        node.attributes[name] = ir.AttrString(name, value) if isinstance(value, str) else ir.AttrFloat32(name, value)

    return edit


def _without_add(graph: Any) -> None:
    """One bias is not added any more."""
    node = next(node for node in graph if node.op_type == "Add" and any(v.is_initializer() and v.const_value.size > 16 for v in node.inputs))
    node.outputs[0].replace_all_uses_with(next(v for v in node.inputs if not v.is_initializer()))


def _unlike_scales(graph: Any) -> None:
    """Activations are multiplied by 3 % more than they were divided by."""
    node = next(node for node in graph if node.op_type == "DequantizeLinear" and node.inputs[0].producer() is not None)
    scale = node.inputs[1].const_value.numpy()
    other = ir.val("another_scale", const_value=ir.tensor(np.asarray(scale * 1.03, np.float32), name="another_scale"))
    graph.register_initializer(other)
    node.replace_input_with(1, other)


def _int8(name: str, value: Any) -> bool:
    return bool(value.dtype == ir.DataType.INT8 and len(value.const_value.shape) == 2)


ONNX: dict[str, Edit] = {
    "scales of weights 3 % off": _constant(_scale_of_weights, lambda array: array * 1.03),
    "one matrix scaled": _constant(_scale_of_weights, lambda array: array * 1.05),
    "one head lost": _constant(_int8, _zeroed_head),
    "bias lost": _constant(_bias, lambda array: array * 0),
    "epsilon": _attribute("LayerNormalization", "epsilon", 1e-3),
    "gelu": _attribute("Gelu", "approximate", "tanh"),
    "scales of activations unlike": _unlike_scales,
}


@pytest.mark.parametrize("quantiser", [DYNAMIC, STATIC, SMOOTH], ids=["dynamic", "static", "smooth"])
@pytest.mark.parametrize("name", ONNX)
def test_changed_int8_graphs_contradict(make: Make, tmp_path: Path, name: str, quantiser: Any) -> None:
    if name == "scales of activations unlike" and quantiser is DYNAMIC:
        pytest.skip("a dynamic scale is no constant")
    right = make(SDPA, EXPORT, quantiser)
    wrong = _onnx(ONNX[name])(right, tmp_path)
    for baseline in (right, make(SDPA, EXPORT, DYNAMIC), make(SDPA, EXPORT)):
        found = between(wrong, baseline)
        assert found.status == "contradicted", (found, baseline)


def test_a_node_that_is_gone_contradicts_the_same_build_alone(make: Make, tmp_path: Path) -> None:
    right = make(SDPA, EXPORT, DYNAMIC)
    wrong = _onnx(_without_add)(right, tmp_path)
    assert between(wrong, right).status == "none"
    assert between(wrong, right, same_build=True).status == "contradicted"


def test_layers_that_change_places_contradict(make: Make, tmp_path: Path) -> None:
    def swapped(graph: Any) -> None:
        products = [node for node in graph if node.op_type == "MatMulInteger"]
        like = [node for node in products if node.inputs[1].shape == products[0].inputs[1].shape]
        first, last = like[0], like[-1]
        one, other = first.inputs[1], last.inputs[1]
        first.replace_input_with(1, other)
        last.replace_input_with(1, one)

    right = make(SDPA, EXPORT, DYNAMIC)
    assert between(_onnx(swapped)(right, tmp_path), right).status == "contradicted"


def _openvino(edit: Callable[[Any, Any], None]) -> Callable[[Model, Path], Model]:
    def changed(model: Model, folder: Path) -> Model:
        assert isinstance(model, OpenVino)
        openvino = openvino_import.openvino()
        graph = openvino.Core().read_model(model.path)
        edit(graph, openvino)
        openvino.save_model(graph, folder / "model.xml", compress_to_fp16=False)
        return replace(model, path=folder / "model.xml")

    return changed


def _with_constant(select: Callable[[Any], Any], change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Any, Any], None]:
    """Replace the middle constant that `select` returns for a node."""

    def edit(graph: Any, openvino: Any) -> None:
        import openvino.opset13 as ops

        found = [constant for node in graph.get_ordered_ops() if (constant := select(node)) is not None]
        node = found[len(found) // 2]
        changed = ops.constant(np.asarray(change(node.data.copy()), node.data.dtype))
        for target in list(node.output(0).get_target_inputs()):
            target.replace_source_output(changed.output(0))

    return edit


def _scale_of_product(node: Any) -> Any:
    if node.get_type_name() != "MatMul" or node.input_value(1).get_node().get_type_name() != "Multiply":
        return None
    return node.input_value(1).get_node().input_value(1).get_node()


def _weights_of_product(node: Any) -> Any:
    if node.get_type_name() != "MatMul" or node.input_value(1).get_node().get_type_name() != "Multiply":
        return None
    return node.input_value(1).get_node().input_value(0).get_node().input_value(0).get_node()


def _added(node: Any) -> Any:
    if node.get_type_name() != "Add":
        return None
    constant = node.input_value(1).get_node()
    return constant if constant.get_type_name() == "Constant" and constant.data.size > 16 else None


def _upper_output(node: Any) -> Any:
    return node.input_value(4).get_node() if node.get_type_name() == "FakeQuantize" else None


def _openvino_attribute(operator: str, **attributes: Any) -> Callable[[Any, Any], None]:
    def edit(graph: Any, openvino: Any) -> None:
        import openvino.opset13 as ops

        node = next(node for node in graph.get_ordered_ops() if node.get_type_name() == operator)
        if operator == "Gelu":
            made = ops.gelu(node.input_value(0), attributes["approximation_mode"])
        else:
            made = ops.mvn(node.input_value(0), node.input_value(1), True, attributes["eps"], "inside_sqrt")
        for target in list(node.output(0).get_target_inputs()):
            target.replace_source_output(made.output(0))

    return edit


OPENVINO: dict[str, Callable[[Any, Any], None]] = {
    "scales of weights 3 % off": _with_constant(_scale_of_product, lambda array: array * 1.03),
    "one matrix scaled": _with_constant(_scale_of_product, lambda array: array * 1.05),
    "one head lost": _with_constant(_weights_of_product, _zeroed_head),
    "bias lost": _with_constant(_added, lambda array: array * 0),
    "epsilon": _openvino_attribute("MVN", eps=1e-3),
    "gelu": _openvino_attribute("Gelu", approximation_mode="tanh"),
    "ranges unlike": _with_constant(_upper_output, lambda array: array * 1.03),
}


@pytest.mark.parametrize("name", OPENVINO)
def test_changed_openvino_graphs_contradict(make: Make, tmp_path: Path, name: str) -> None:
    right = make(SDPA, EXPORT, INT8)
    wrong = _openvino(OPENVINO[name])(right, tmp_path)
    for baseline in (right, make(SDPA, EXPORT, SMOOTHER), make(SDPA, EXPORT, ConvertOpenvino())):
        found = between(wrong, baseline)
        assert found.status == "contradicted", (found, baseline)


def _narrower(graph: Any) -> None:
    """One scale of activations is half as large, for what divides by it and what multiplies."""
    node = [node for node in graph if node.op_type == "QuantizeLinear"][2]
    value = node.inputs[1]
    value.const_value = ir.tensor(np.asarray(value.const_value.numpy() * 0.5, np.float32), name=value.name)


def _narrower_range(graph: Any, openvino: Any) -> None:
    import openvino.opset13 as ops

    node = [node for node in graph.get_ordered_ops() if node.get_type_name() == "FakeQuantize"][2]
    for port in range(1, 5):
        node.input(port).replace_source_output(ops.constant(node.input_value(port).get_node().data * np.float32(0.5)).output(0))


@pytest.mark.parametrize("last", [STATIC, INT8], ids=["onnx", "openvino"])
def test_ranges_of_activations_are_those_of_the_same_build_alone(make: Make, tmp_path: Path, last: Any) -> None:
    right = make(SDPA, EXPORT, last)
    wrong = (_onnx(_narrower) if last is STATIC else _openvino(_narrower_range))(right, tmp_path)
    assert between(wrong, right).status == "certified"
    found = between(wrong, right, same_build=True)
    assert found.status == "contradicted" and "of activations of" in found.reason


def _native(fault: Callable[[Any, dict[Any, Any]], Any]) -> Callable[[Model, Path], Model]:
    def changed(model: Model, folder: Path) -> Model:
        from bertopt_native import layout

        assert isinstance(model, Native)
        sizes, stored = layout.read(model.path)
        tensors = {key: replace(tensor, data=np.array(tensor.data)) for key, tensor in stored.items()}
        sizes = fault(sizes, tensors) or sizes
        layout.write(folder / "model.bin", sizes, list(tensors.values()))
        return replace(model, path=folder / "model.bin")

    return changed


def _part(part: str, change: Callable[[np.ndarray], Any]) -> Callable[[Any, dict[Any, Any]], Any]:
    def fault(sizes: Any, tensors: dict[Any, Any]) -> None:
        from bertopt_native.layout import Part, Tensor

        data = tensors[Tensor.FFN_OUT + Part[part], 1].data
        data[:] = change(data.copy())

    return fault


def _swapped_layers(sizes: Any, tensors: dict[Any, Any]) -> None:
    layers = [key for key in tensors if key[1] == 0 and (key[0], 1) in tensors and key[0] >= 8]
    for tensor, _ in layers:
        one, other = tensors[tensor, 0], tensors[tensor, 1]
        tensors[tensor, 0], tensors[tensor, 1] = replace(one, data=other.data), replace(other, data=one.data)


def _swapped_words(sizes: Any, tensors: dict[Any, Any]) -> None:
    table = tensors[0, 0]
    rows = table.data.reshape(table.rows, table.cols)
    rows[[-3, -2]] = rows[[-2, -3]]


NATIVES: dict[str, Callable[[Any, dict[Any, Any]], Any]] = {
    "scales of weights 3 % off": _part("SCALE", lambda data: data * 1.03),
    "one head lost": _part("WEIGHT", lambda data: np.where(np.arange(data.size) < 512, 0, data)),
    "bias lost": _part("BIAS", lambda data: data * 0),
    "sums": _part("SUM", lambda data: data + 1),
    "epsilon": lambda sizes, _: replace(sizes, epsilon=1e-3),
    "gelu": lambda sizes, _: replace(sizes, activation=1),
    "layers swapped": _swapped_layers,
    "words": _swapped_words,
}


@pytest.mark.parametrize("name", NATIVES)
def test_changed_packed_files_contradict(make: Make, tmp_path: Path, name: str) -> None:
    right = make(SDPA, NATIVE)
    wrong = _native(NATIVES[name])(right, tmp_path)
    for baseline in (right, make(SDPA, NATIVE_BF16)):
        found = between(wrong, baseline)
        assert found.status == "contradicted", (found, baseline)


def test_neurons_that_one_file_repeats_are_added_up(tiny: Tiny, tmp_path: Path) -> None:
    """Packing repeats them in INT8 alone, where one of their weights is far beyond the others: in most real models."""
    from bertopt_native import layout
    from safetensors.numpy import load_file, save_file

    source = Path(shutil.copytree(tiny("bert"), tmp_path / "checkpoint"))
    state = load_file(source / "model.safetensors")
    # Of 64 weights of a row one cannot be more than 8 times their root mean square: another model, of 256 neurons.
    wide = np.random.default_rng(0).normal(size=(2, 256, 32)).astype(np.float32) * 0.08
    for layer in range(2):
        prefix = f"bert.encoder.layer.{layer}"
        state[f"{prefix}.intermediate.dense.weight"], state[f"{prefix}.output.dense.weight"] = wide[layer], np.ascontiguousarray(wide[layer].T)
        state[f"{prefix}.intermediate.dense.bias"] = wide[layer, :, 0].copy()
        state[f"{prefix}.output.dense.weight"][5, 9] *= 300
    save_file(state, source / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "intermediate_size": 256}))
    loaded = checkpoint.load(str(source))
    int8, bf16 = (step(loaded, Context(_folder(tmp_path / step.precision))).model for step in (NATIVE, NATIVE_BF16))
    assert layout.read(int8.path)[0].intermediate > layout.read(bf16.path)[0].intermediate
    for mine, theirs in ((int8, bf16), (bf16, int8)):
        assert between(mine, theirs).status == "certified"
    for name, part in (("scales", "SCALE"), ("bias", "BIAS")):
        wrong = _native(_part(part, lambda data: data * np.float32(1.03)))(int8, _folder(tmp_path / name))
        assert between(wrong, bf16).status == "contradicted"


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


def test_a_changed_bf16_weight_contradicts(make: Make, tmp_path: Path) -> None:
    def one_bit(sizes: Any, tensors: dict[Any, Any]) -> None:
        from bertopt_native.layout import Part, Tensor

        tensors[Tensor.FFN_IN + Part.WEIGHT, 0].data[5] ^= 1

    right = make(SDPA, NATIVE_BF16)
    assert between(_native(one_bit)(right, tmp_path), right).status == "contradicted"


def test_a_changed_float_graph_is_for_parity_to_find(make: Make, tmp_path: Path) -> None:
    """Float32 has tight limits; a change of a graph in float32 is no contradiction, of one beside reduced precision it is."""
    right = make(SDPA, EXPORT)
    wrong = _onnx(_attribute("LayerNormalization", "epsilon", 1e-3))(right, tmp_path)
    assert between(wrong, right).status == "none"
    assert between(wrong, make(SDPA, EXPORT, DYNAMIC)).status == "contradicted"


def _manifest(form: str, *passes: Any, checkpoint: str | None = "abc", key: str = "", sources: dict[str, str] | None = None) -> Any:
    records = tuple(step if isinstance(step, Rewrite) else step.record() for step in passes)
    return SimpleNamespace(form=form, passes=records, checkpoint_sha256=checkpoint, key=key, sources=sources)


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        (_manifest("onnx", SDPA, EXPORT), _manifest("onnx", SDPA, EXPORT, DYNAMIC), None),
        (_manifest("onnx", SDPA, EXPORT), _manifest("openvino", SDPA, EXPORT, INT8), None),
        (_manifest("native", SDPA, NATIVE), _manifest("native", NATIVE), None),
        (_manifest("onnx", SDPA, EXPORT, FUSE), _manifest("openvino", SDPA, EXPORT, INT8), "form 'openvino' beside form 'onnx'"),
        (_manifest("native", SDPA, NATIVE), _manifest("onnx", SDPA, EXPORT, DYNAMIC), "form 'onnx' beside form 'native'"),
        (_manifest("onnx", SDPA, EXPORT, DYNAMIC), _manifest("onnx", SDPA, EXPORT, DYNAMIC, checkpoint="def"), "another checkpoint"),
        (_manifest("onnx", SDPA, EXPORT, DYNAMIC, checkpoint=None), _manifest("onnx", SDPA, EXPORT, DYNAMIC), "which checkpoint"),
        (_manifest("native", NATIVE), _manifest("native", Rewrite(name="mine", options={}), NATIVE, sources={"pass mine": "0"}), "pass of your own"),
    ],
)
def test_which_artefacts_can_be_compared(first: Any, second: Any, why: str | None) -> None:
    said = certificates.unlike(second, first)
    assert said is None if why is None else said is not None and why in said


def test_a_line_that_is_one_pass_longer_is_not_a_child() -> None:
    """`compare` took an artefact for another's child where it had one pass more: its weights would have contradicted a fused graph's."""
    parent, fused = _manifest("onnx", SDPA, EXPORT), _manifest("onnx", FUSE, EXPORT)
    child = _manifest("openvino", SDPA, EXPORT, INT8)
    assert certificates.comparable(child, parent) and not certificates.comparable(child, fused)
    assert certificates.comparable(child, _manifest("eager")) and not certificates.comparable(_manifest("eager"), _manifest("eager", SDPA))


def test_a_cast_of_a_torch_network(make: Make) -> None:
    """Both hold the checkpoint itself, with which `compare` compares either."""
    assert between(make(SDPA, CastHalf(dtype="bfloat16")), make(SDPA)).status in ("certified", "none")
