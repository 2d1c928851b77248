"""Artefacts whose weights somebody changed and hashed anew, behind the rounding of INT8 and bfloat16; `verify --against`, and `compare` with the
artefact as it was.

Left out is what outputs show: layers or heads that change places, another checkpoint's weights. Of ONNX graphs `verify --against` has only
tables of embeddings to go by.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bertopt.commands.compare import compare
from bertopt.commands.verify import verify
from bertopt.report.diff import Tolerances
from bertopt.system import openvino_import
from campaigns.mutants.loose_limits import BF16
from campaigns.mutants.own_passes import OPENVINO_LINE
from campaigns.mutants.plant import EXPORT, LABELS, ROBERTA, SDPA, SPLADE, Checkpoint, Step, mutant
from campaigns.mutants.shipped_graphs import OPENVINO_INT8
from campaigns.mutants.tampered import Caught, fresh, resealed, rewritten, tried

Edit = Callable[[Path], None]
Change = Callable[[Any], Any]


def _swapped(first: int, second: int) -> Change:
    def change(array: Any) -> Any:
        array[[first, second]] = array[[second, first]]
        return array

    return change


def _scaled(rows: Any, factor: float) -> Change:
    def change(array: Any) -> Any:
        array[rows] = array[rows] * factor
        return array

    return change


#: What is wrong, and how of which weights: a table of words or positions, or channels of a product [N, K].
WEIGHTS: Mapping[str, tuple[str, str, Change]] = {
    "rare_words": ("Two rare words have each other's embedding.", "words", _swapped(-3, -2)),
    "scaled_words": ("Three words are 15 % too large.", "words", _scaled(slice(20, 23), 1.15)),
    "positions": ("Positions 77 and 78 stand in each other's place.", "positions", _swapped(77, 78)),
    "channel": ("One channel of a product is a fifth too large.", "product", _scaled(5, 1.2)),
}


def _packed(fault: Callable[[Any, dict[Any, Any]], Any]) -> Edit:
    """Change a packed file: `fault` gives its numbers, and may change the data of its tensors in place."""

    def edit(artefact: Path) -> None:
        from bertopt_native import layout

        path = artefact / "native" / "model.bin"
        sizes, stored = layout.read(path)
        tensors = {key: replace(tensor, data=np.array(tensor.data)) for key, tensor in stored.items()}
        sizes = fault(sizes, tensors)
        path.unlink()
        layout.write(path, sizes, list(tensors.values()))

    return edit


def _packed_weights(which: str, change: Change) -> Edit:
    def fault(sizes: Any, tensors: dict[Any, Any]) -> Any:
        from bertopt_native import layout, quantize
        from bertopt_native.layout import Part, Tensor, Type

        if which != "product":
            table = tensors[Tensor.WORD if which == "words" else Tensor.POSITION, 0]
            table.data[:] = change(table.data.reshape(table.rows, table.cols)).ravel()
        elif (scale := tensors.get((Tensor.FFN_OUT + Part.SCALE, 0))) is not None:
            change(scale.data)
        else:
            weight = tensors[Tensor.FFN_OUT + Part.WEIGHT, 0]
            assert weight.type is Type.BF16
            bits = layout.from_panels(weight.data, weight.rows, weight.cols, 2)
            weight.data[:] = layout.panels(quantize.to_bf16(change((bits.astype(np.uint32) << 16).view(np.float32))), 2)
        return sizes

    return _packed(fault)


def _no_bias(sizes: Any, tensors: dict[Any, Any]) -> Any:
    from bertopt_native.layout import Part, Tensor

    tensors[Tensor.QKV + Part.BIAS, 0].data[:] = 0
    return sizes


def _swapped_biases(sizes: Any, tensors: dict[Any, Any]) -> Any:
    from bertopt_native.layout import Part, Tensor

    _swapped(20, 21)(tensors[Tensor.DECODER + Part.BIAS, 0].data)
    return sizes


def _smaller_shifts(sizes: Any, tensors: dict[Any, Any]) -> Any:
    from bertopt_native.layout import Tensor

    tensors[Tensor.HEAD_SHIFT, 0].data[:8] *= 0.9
    return sizes


def _repeated_row(sizes: Any, tensors: dict[Any, Any]) -> Any:
    """Scales and sums too, so that the file does not contradict itself."""
    from bertopt_native import layout
    from bertopt_native.layout import Part, Tensor, Type

    weight = tensors[Tensor.DECODER + Part.WEIGHT, 0]
    step = 2 if weight.type is Type.BF16 else 4
    rows = layout.from_panels(weight.data, weight.rows, weight.cols, step)
    rows[20] = rows[21]
    weight.data[:] = layout.panels(rows, step)
    for part in (Part.SCALE, Part.SUM):
        if (vector := tensors.get((Tensor.DECODER + part, 0))) is not None:
            vector.data[20] = vector.data[21]
    return sizes


#: Of packed files alone: their numbers.
NUMBERS: Mapping[str, tuple[str, Callable[[Any, dict[Any, Any]], Any]]] = {
    "epsilon": ("The norms' epsilon is 1e-3.", lambda sizes, _: replace(sizes, epsilon=1e-3)),
    "tanh": ("GELU is the one by tanh.", lambda sizes, _: replace(sizes, activation=1)),
    "no_bias": ("A layer's queries, keys and values have no bias.", _no_bias),
}


def _openvino_weights(which: str, change: Change) -> Edit:
    def edit(artefact: Path) -> None:
        openvino = openvino_import.openvino()
        path = artefact / "openvino" / "openvino_model.xml"
        graph = openvino.Core().read_model(path)
        node = _constant(graph, which)
        import openvino.opset13 as ops

        # Scales lie in a row or in a column.
        array = node.data if min(node.data.shape) > 1 else node.data.ravel()
        changed = ops.constant(change(array.copy()).reshape(node.data.shape))
        for target in list(node.output(0).get_target_inputs()):
            target.replace_source_output(changed.output(0))
        for file in path.parent.iterdir():
            file.unlink()
        openvino.save_model(graph, path, compress_to_fp16=False)

    return edit


def _constant(graph: Any, which: str) -> Any:
    """Return a table of embeddings, or the scales (in floats the weights) of a product."""
    read: dict[str, list[Any]] = {"Gather": [], "MatMul": []}
    for node in graph.get_ordered_ops():
        if (kind := node.get_type_name()) in read:
            source, scale = node.input_value(kind == "MatMul").get_node(), None
            while source.get_type_name() in ("Convert", "Multiply", "Subtract"):
                scale = source.input_value(1).get_node() if source.get_type_name() == "Multiply" else scale
                source = source.input_value(0).get_node()
            if source.get_type_name() == "Constant" and len(source.get_output_shape(0)) == 2:
                read[kind].append((source, scale))
    if which == "product":
        weights, scale = read["MatMul"][3]
        return scale or weights
    tables = sorted((source for source, _ in read["Gather"]), key=lambda source: source.get_output_shape(0)[0])
    # A tiny model has fewer words than positions.
    return tables[-1 if which == "positions" else -2]


def _torch_weights(which: str, change: Change) -> Edit:
    names = {"words": "word_embeddings.weight", "positions": "position_embeddings.weight", "product": "layer.0.output.dense.weight"}

    def edit(artefact: Path) -> None:
        from safetensors.numpy import load_file, save

        path = artefact / "model.safetensors"
        weights = load_file(path)
        name = next(name for name in weights if name.endswith(names[which]))
        weights[name] = change(weights[name].copy())
        rewritten(path, save(weights, {"format": "pt"}))

    return edit


def _planted(name: str, about: str, line: tuple[Step, ...], on: Checkpoint, edit: Edit, beside: bool = False) -> None:
    """Enter the fault into the table; `beside`: the wrong artefact is compared with the right one, else with the checkpoint."""

    def deed(bench: Any) -> Caught:
        out = bench.scratch / "tampered" / f"weights-{name.rpartition('_in_')[2]}"
        if not (out / "artifact").exists():
            _, run = fresh(bench, out.name, on, *line)
            report = run()
            assert report.exit_code == 0, report.reason
        wrong = out / "changed"
        shutil.rmtree(wrong, ignore_errors=True)
        shutil.copytree(out / "artifact", wrong)
        edit(wrong)
        resealed(wrong)
        if not beside:
            return tried(lambda: verify(wrong, str(bench.checkpoint(on))))
        found = compare(out / "artifact", wrong, Tolerances(slower=1e9, bigger=9, memory=9))
        return list(dict.fromkeys(change.gate for change in found.regressions())), found.reason

    deed.__name__, deed.__doc__ = name, about
    mutant("certificate", "")(deed)


def _entered(kind: str, form: str, about: str, line: tuple[Step, ...], on: Checkpoint, edit: Edit) -> None:
    for what, beside in (("resealed", False), ("compared", True)):
        _planted(f"{what}_{kind}_in_{form}", f"In {form}: {about}", line, on, edit, beside)


_NATIVE: Mapping[str, tuple[Checkpoint, Step]] = {
    "native_int8": (LABELS, {"pass": "build_native"}), "native_bf16": (LABELS, {"pass": "build_native", "precision": "bf16"}),
    "roberta_native_int8": (ROBERTA, {"pass": "build_native"}), "modernbert_native_bf16": (Checkpoint("modernbert"), {"pass": "build_native", "precision": "bf16"}),
}  # fmt: skip
for _form, (_on, _step) in _NATIVE.items():
    for _kind, (_about, _which, _change) in WEIGHTS.items():
        if _form != "modernbert_native_bf16" or _which != "positions":
            _entered(_kind, _form, _about, (SDPA, _step), _on, _packed_weights(_which, _change))
    for _kind, (_about, _fault) in NUMBERS.items():
        if _form != "modernbert_native_bf16" or _kind != "no_bias":
            _entered(_kind, _form, _about, (SDPA, _step), _on, _packed(_fault))
#: Of the head over the vocabulary in packed files.
HEAD: Mapping[str, tuple[str, Callable[[Any, dict[Any, Any]], Any]]] = {
    "head_gelu": ("The head's GELU is the one by tanh.", lambda sizes, _: replace(sizes, head_activation=1)),
    "head_bias": ("Two ids have each other's bias.", _swapped_biases),
    "head_norm": ("A few of the head's norm's shifts are a tenth too small.", _smaller_shifts),
    "head_row": ("One id's row of the decoder is another's.", _repeated_row),
}
for _form, _precision in (("splade_native_int8", "int8"), ("splade_native_bf16", "bf16")):
    for _kind, (_about, _fault) in HEAD.items():
        _entered(_kind, _form, _about, (SDPA, {"pass": "build_native", "precision": _precision}), SPLADE, _packed(_fault))
_OTHERS: Mapping[str, tuple[tuple[Step, ...], Callable[[str, Change], Edit]]] = {
    "openvino_int8": (OPENVINO_INT8, _openvino_weights),
    "openvino_bf16": ((*OPENVINO_LINE[:-1], {"pass": "convert_openvino", "precision": "bf16"}), _openvino_weights),
    "torch_bf16": ((SDPA, BF16), _torch_weights),
}  # fmt: skip
for _form, (_line, _edit) in _OTHERS.items():
    for _kind, (_about, _which, _change) in WEIGHTS.items():
        if (_form, _kind) != ("openvino_int8", "scaled_words"):  # beyond the range of INT8
            _entered(_kind, _form, _about, _line, LABELS, _edit(_which, _change))


def _graph(change: Callable[[Any], None]) -> Edit:
    def edit(artefact: Path) -> None:
        import onnx_ir as ir

        path = artefact / "onnx" / "model.onnx"
        model = ir.load(path)
        change(model.graph)
        path.unlink()
        ir.save(model, path)

    return edit


def _constant_of(graph: Any, ending: str, change: Change) -> None:
    """Change the second last constant whose name ends so and that has more than one element."""
    import onnx_ir as ir

    value = [value for name, value in graph.initializers.items() if name.endswith(ending) and value.const_value.size > 1][-2]
    value.const_value = ir.tensor(np.ascontiguousarray(change(value.const_value.numpy().copy())), dtype=value.dtype, name=value.name)


def _attribute(graph: Any, operator: str, name: str, value: Any) -> None:
    import onnx_ir as ir

    node = next(node for node in graph if node.op_type == operator)
    node.attributes[name] = ir.AttrString(name, value) if isinstance(value, str) else ir.AttrFloat32(name, value)


#: Of INT8 graphs in ONNX: what is wrong, and how.
GRAPHS: Mapping[str, tuple[str, Callable[[Any], None]]] = {
    "matrix": ("A matrix is 5 % too large.", lambda graph: _constant_of(graph, "_scale", lambda array: array * np.float32(1.05))),
    "scales": ("The scales of a matrix are 3 % off.", lambda graph: _constant_of(graph, "_scale", lambda array: array * np.float32(1.03))),
    "inputs": ("Eight inputs of a product are lost.", lambda graph: _constant_of(graph, "_quantized", _scaled(slice(0, 8), 0))),
    "no_bias": ("A bias is lost.", lambda graph: _constant_of(graph, "bias", lambda array: array * 0)),
    "epsilon": ("The epsilon of a norm is 1e-3.", lambda graph: _attribute(graph, "LayerNormalization", "epsilon", 1e-3)),
    "tanh": ("One GELU is the one by tanh.", lambda graph: _attribute(graph, "Gelu", "approximate", "tanh")),
}
for _kind, (_about, _wrong) in GRAPHS.items():
    _planted(f"compared_{_kind}_in_onnx_int8", f"In ONNX's INT8: {_about}", (SDPA, EXPORT, {"pass": "quantize_int8"}), LABELS, _graph(_wrong), beside=True)
