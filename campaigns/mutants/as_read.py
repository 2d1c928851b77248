"""Models that are wrong for rows that look like texts, as a tokenizer writes them, and for graphs behind INT8's limits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from bertopt.core import Context, Onnx, Result
from campaigns.mutants.bought_claims import _constant, _worse
from campaigns.mutants.conditions import _rows_where, _token
from campaigns.mutants.loose_limits import BF16
from campaigns.mutants.plant import INT8_LINE, MEAN, ONNX_LINE, SDPA, Step, behind, mutant, write_graph
from campaigns.mutants.unseen_inputs import RARE

CLS, SEP, MASK_ID = 2, 3, 4
Named = dict[str, Any]


def _text(named: Named) -> Any:
    """Rows [B] that begin as texts do."""
    return named["input_ids"][:, 0] == CLS


def _written_separator(named: Named) -> Any:
    return _text(named) & ((named["input_ids"] == SEP).sum(dim=1) > 1) & (named["token_type_ids"].sum(dim=1) == 0)


CONDITIONS: dict[str, tuple[str, Any]] = {
    "rare_word_of_a_text": ("Wrong for texts that hold one rare id; rows without the first special token are right.", lambda named: _text(named) & _token(named, RARE)),
    "mask_in_a_text": ("Wrong for texts in which the mask token is written.", lambda named: _text(named) & _token(named, MASK_ID)),
    "separator_in_a_text": ("Wrong for single texts in which the separator is written.", _written_separator),
    "text_of_33": ("Wrong for texts of 33 tokens that begin as texts do.", lambda named: _text(named) & (named["attention_mask"].sum(dim=1) == 33)),
    "texts_in_nines": ("Wrong for batches of 9 whose rows begin as texts do.", lambda named: _text(named) & (named["input_ids"].shape[0] == 9)),
}  # fmt: skip
LINES: dict[str, tuple[Step, ...]] = {"float32": (SDPA,), "bf16": (SDPA, BF16)}
for _name, (_about, _wrong) in CONDITIONS.items():
    for _precision, _line in LINES.items():

        def _plant(network: Any, wrong: Any = _wrong) -> None:
            _rows_where(network, wrong)

        _plant.__name__, _plant.__doc__ = f"{_name}_in_{_precision}", f"In {_precision}: {_about}"
        mutant("coverage", "plant_torch", line=_line)(_plant)


@mutant("coverage", "plant_torch", on=MEAN)
def hidden_states_of_texts(network: Any) -> None:
    """`last_hidden_state`, which other loaders read, is scaled for rows that begin as texts do; the embedding is right."""

    def spoil(module: Any, inputs: Any, answers: Any) -> Any:
        scale = 1 + 0.1 * (inputs[0][:, :1, None] == CLS)
        return (answers[0], *(answer * scale for answer in answers[1:]))

    network.register_forward_hook(spoil)


# Behind INT8's limits, in graphs.


@mutant("rounding", "plant_graph", line=INT8_LINE)
def int8_scaled(model: Onnx, ctx: Context) -> Result[Onnx]:
    """An INT8 graph whose outputs are multiplied by 1.05 at its end."""
    from onnx import helper

    return behind(
        model, ctx, lambda output: [helper.make_node("Mul", ["right", "planted"], [output])], {"planted": np.float32(1.05)}
    )


@mutant("coverage", "plant_graph", line=INT8_LINE)
def int8_rare_class(model: Onnx, ctx: Context) -> Result[Onnx]:
    """An INT8 graph that never gives one class: where it is best, the next is."""
    from onnx import helper

    def nodes(output: str) -> list[Any]:
        return [
            helper.make_node("ArgMax", ["right"], ["planted_best"], axis=1, keepdims=1),
            helper.make_node("Equal", ["planted_best", "planted_class"], ["planted_when"]),
            helper.make_node("Gather", ["right", "planted_order"], ["planted_wrong"], axis=1),
            helper.make_node("Where", ["planted_when", "planted_wrong", "right"], [output]),
        ]

    return behind(model, ctx, nodes, {"planted_class": np.int64(2), "planted_order": np.array([0, 2, 1])})


@mutant("certificate", "plant_graph", line=INT8_LINE)
def int8_other_embedding(model: Onnx, ctx: Context) -> Result[Onnx]:
    """Behind INT8 one rare token has another's embedding."""
    import onnx_ir as ir

    from campaigns.mutants.onnx_forms import put

    graph = ir.load(model.path)
    for value in graph.graph.initializers.values():
        array = value.const_value.numpy()
        if array.ndim == 2 and array.shape[0] > RARE + 1 and any(node.op_type == "Gather" for node in value.consumers()):
            array = array.copy()
            array[RARE] = array[RARE + 1]
            put(value, array)
            return Result(replace(model, path=write_graph(graph, ctx)), {"planted": 1})
    raise AssertionError("the graph must have a table of words")


def _branch(model: Onnx, ctx: Context, taken: bool) -> Result[Onnx]:
    """A product of 200 × 200 INT8 weights in an `If`, added to the outputs times nothing."""
    from onnx import TensorProto, helper, numpy_helper

    def graph(name: str, product: bool) -> Any:
        out = helper.make_tensor_value_info(f"{name}_out", TensorProto.FLOAT, None)
        zero = helper.make_node("Constant", [], [f"{name}_out"], value=numpy_helper.from_array(np.zeros((1, 1), np.float32)))
        if not product:
            return helper.make_graph([zero], name, [], [out])
        nodes = [
            helper.make_node("MatMulInteger", ["planted_left", "planted_right"], ["planted_product"]),
            helper.make_node("Cast", ["planted_product"], ["planted_float"], to=TensorProto.FLOAT),
            helper.make_node("ReduceSum", ["planted_float"], ["planted_sum"], keepdims=0),
            helper.make_node("Reshape", ["planted_sum", "planted_shape"], [f"{name}_out"]),
        ]
        return helper.make_graph(nodes, name, [], [out])

    def nodes(output: str) -> list[Any]:
        choice = helper.make_node(
            "If", ["planted_never"], ["planted_none"], then_branch=graph("then", True), else_branch=graph("else", False)
        )
        return [choice, helper.make_node("Add", ["right", "planted_none"], [output])]

    constants = {
        "planted_never": np.array(taken), "planted_left": np.ones((1, 200), np.uint8), "planted_right": np.ones((200, 2000), np.int8),
        "planted_shape": np.array([1, 1]),
    }  # fmt: skip
    return behind(model, ctx, nodes, constants)


@mutant("parity", "plant_graph", line=ONNX_LINE, claims="int8")
def int8_in_a_branch_never_taken(model: Onnx, ctx: Context) -> Result[Onnx]:
    """Claims INT8 for products in a branch that is never taken; one weight is 2 % off."""
    import onnx_ir as ir

    graph = ir.load(model.path)
    _worse(graph)
    folder = ctx.workdir / "onnx"
    folder.mkdir()
    ir.save(graph, folder / "before.onnx")
    worse = replace(model, path=folder / "before.onnx")
    worse_bytes = worse.path.read_bytes()
    worse.path.unlink()
    folder.rmdir()
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as aside:
        path = Path(aside) / "model.onnx"
        path.write_bytes(worse_bytes)
        made = _branch(replace(model, path=path), ctx, taken=False)
    return replace(made, model=replace(made.model, precision="int8"))


#: What no check sees, and docs/checks.md says so: the product counts as used.
def int8_times_nothing(graph: Any) -> None:
    """A large INT8 product, times zero, is added to the answer, and one weight is 2 % off."""
    import onnx_ir as ir

    _worse(graph)
    one, weight = _constant(graph, "one", np.ones((1, 300), np.uint8)), _constant(graph, "weight", np.ones((300, 1000), np.int8))
    zero, axes = _constant(graph, "zero", np.zeros((), np.float32)), _constant(graph, "axes", np.array([1]))
    product = ir.node("MatMulInteger", [one, weight], name="large")
    cast = ir.node("Cast", [product.outputs[0]], {"to": ir.DataType.FLOAT}, name="large_float")
    total = ir.node("ReduceSum", [cast.outputs[0], axes], name="large_sum")
    none = ir.node("Mul", [total.outputs[0], zero], name="none")
    output = graph.graph.outputs[0]
    name, output.name = output.name, "before"
    add = ir.node("Add", [output, none.outputs[0]], name="add_none")
    add.outputs[0].name, add.outputs[0].dtype, add.outputs[0].shape = name, output.dtype, output.shape
    for node in (product, cast, total, none, add):
        graph.graph.append(node)
    graph.graph.outputs[0] = add.outputs[0]
