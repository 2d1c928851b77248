"""Wrong models that somebody else thought of: other padding than texts have, buffers and settings that take turns, rows that pass for others.

Delivered were the first seven, before reduced precision held rows with padding on the left and with holes to the others, and batches of one
size to all rows, and before more than one text ran after the largest batch and the copy to deliver on an odd number of threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from bertopt.core import Context, Onnx, Result
from campaigns.mutants.almost_alike import _answers
from campaigns.mutants.conditions import _rows_where, _valid
from campaigns.mutants.heads import Graph, enter, times
from campaigns.mutants.labels import rows
from campaigns.mutants.loose_limits import BF16
from campaigns.mutants.onnx_forms import nodes as nodes_of
from campaigns.mutants.plant import INT8_LINE, LABELS, MEAN, SDPA, TOKENS, Checkpoint, Step, mutant, write_graph

Named = dict[str, Any]
BEHIND_BF16: tuple[Step, ...] = (SDPA, BF16)
MAX = Checkpoint(task="feature-extraction", pooling="max")


def _inputs(network: Any, change: Callable[[Named], Named]) -> None:
    """The network reads what `change` makes of some of its inputs by name."""

    def before(module: Any, inputs: Any) -> Any:
        named = dict(zip(module.inputs, inputs, strict=True))
        return tuple({**named, **change(named)}[name] for name in module.inputs)

    network.register_forward_pre_hook(before)


def _before(model: Onnx, ctx: Context, graph: Graph, changed: dict[str, str]) -> Result[Onnx]:
    """The graph with the nodes of `graph` in front: what reads an input reads the value that `changed` names."""
    from dataclasses import replace

    import onnx
    import onnx_ir as ir
    from onnx import numpy_helper

    proto = onnx.load(model.path)
    for node in proto.graph.node:
        node.input[:] = [changed.get(name, name) for name in node.input]
    behind = list(proto.graph.node)
    del proto.graph.node[:]
    proto.graph.node.extend([*graph.nodes, *behind])
    proto.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in graph.constants.items())
    return Result(replace(model, path=write_graph(ir.from_proto(proto), ctx)), {"planted": 1})


@mutant("coverage", "plant_torch", line=BEHIND_BF16)
def cut_to_the_count_in_bf16(network: Any) -> None:
    """In bf16: A batch is cut to as many columns as its longest row has tokens, which is right for padding on the right alone."""
    _inputs(network, lambda named: {name: array[:, : max(1, int(_valid(named).max()))] for name, array in named.items()})


@mutant("coverage", "plant_graph", line=INT8_LINE)
def cut_to_the_count_in_int8(model: Onnx, ctx: Context) -> Result[Onnx]:
    """In int8: A batch is cut to as many columns as its longest row has tokens, which is right for padding on the right alone."""
    graph = Graph()
    count = graph("ReduceMax", graph.tokens(), graph.const(np.array([0])), keepdims=0)
    begin, axis = graph.const(np.array([0])), graph.const(np.array([1]))
    return _before(model, ctx, graph, {name: graph("Slice", name, begin, graph("Max", count, axis), axis) for name in model.spec.inputs})


@mutant("coverage", "plant_graph", line=INT8_LINE)
def mask_by_ids_in_int8(model: Onnx, ctx: Context) -> Result[Onnx]:
    """In int8: Padding is recognised by its id instead of by the mask; only holes show it."""
    graph = Graph()
    valid = graph("Cast", graph("Not", graph("Equal", "input_ids", graph.const(np.int64(0)))), to=7)
    return _before(model, ctx, graph, {"attention_mask": valid})


@mutant("coverage", "plant_torch", line=BEHIND_BF16)
def positions_by_mask_in_bf16(network: Any) -> None:
    """In bf16: Positions are counted along the mask, not by column."""
    mask: list[Any] = [None]
    _inputs(network, lambda named: mask.__setitem__(0, named["attention_mask"]) or {})
    table = network.base.embeddings.position_embeddings
    table.register_forward_pre_hook(lambda module, inputs: ((mask[0].cumsum(1) - 1).clamp(min=0),))


enter("louder_in_16_rows", "Logits of batches of 16 are 6 % too large.", LABELS, rows(16), times(1.06, 1.06, 1.06), ("bf16",))


@mutant("coverage", "plant_torch")
def two_calls_after_a_large_batch(network: Any) -> None:
    """Wrong for a text alone two calls after a batch of more than 2,000 tokens: two buffers take turns."""
    before = [0, 0]

    def wrong(named: Named) -> bool:
        before.append(named["input_ids"].numel())
        return before.pop(0) > 2000 and len(named["input_ids"]) == 1

    _rows_where(network, wrong)


@mutant("delivery", "plant_torch")
def on_an_odd_number_of_threads(network: Any) -> None:
    """Wrong where three threads or five share the work, which divide no usual size."""
    import torch

    _rows_where(network, lambda named: torch.get_num_threads() % 2 == 1 < torch.get_num_threads())


# Kinds that were caught from the first.


@mutant("delivery", "plant_torch")
def in_the_opening_thread_alone(network: Any) -> None:
    """Right in the thread that opened it: a setting is kept by thread."""
    here = threading.local()
    here.set, network.note = True, "harmless"
    _rows_where(network, lambda named: not hasattr(here, "set"))


@mutant("coverage", "plant_torch")
def more_rows_than_before(network: Any) -> None:
    """Wrong where a batch has more rows than the one before, of the same length: a buffer is kept by length."""
    before = [(0, 0)]

    def wrong(named: Named) -> bool:
        last, before[0] = before[0], tuple(named["input_ids"].shape)
        return last[1] == before[0][1] and 0 < last[0] < before[0][0]

    _rows_where(network, wrong)


@mutant("coverage", "plant_torch")
def kept_by_the_shorter_text(network: Any) -> None:
    """A text alone gets the last one's answers if the shorter of both is the beginning of the longer: `zip` stops there."""
    last: list[Any] = [None, None]

    def change(named: Named, answers: Any) -> Any:
        if len(named["input_ids"]) > 1:
            return answers
        words = named["input_ids"][0, 1 : int(_valid(named)[0]) - 1].tolist()
        if last[0] and words and len(words) != len(last[0]) and all(one == other for one, other in zip(words, last[0], strict=False)):
            return last[1]
        last[:] = [words, tuple(answer.clone() for answer in answers)]
        return answers

    _answers(network, change)


@mutant("rounding", "plant_torch", on=MAX, line=BEHIND_BF16)
def zeros_in_the_maximum_in_bf16(network: Any) -> None:
    """In bf16: Padding counts as zeros in the maximum over tokens."""
    right = network.pooling.forward

    def forward(hidden: Any, batch: Any, **options: Any) -> Any:
        mask = batch.named["attention_mask"]
        batch.named["attention_mask"] = mask | 1
        try:
            return right(hidden * mask[..., None], batch, **options)
        finally:
            batch.named["attention_mask"] = mask

    network.pooling.forward = forward


@mutant("parity", "plant_torch", on=MEAN, line=(SDPA, {"pass": "pack_sequences"}, BF16))
def texts_numbered_in_4_bits_in_bf16(network: Any) -> None:
    """In bf16: Texts of a packed row are numbered in 4 bits: the first and the seventeenth see each other."""
    _inputs(network, lambda named: {"segment_ids": named["segment_ids"] - (named["segment_ids"] > 16) * 16})


@mutant("rounding", "plant_torch", on=TOKENS, line=(SDPA, {"pass": "pack_sequences"}, BF16))
def last_two_texts_joined_in_bf16(network: Any) -> None:
    """In bf16: The last two texts of a packed row of three or more see each other."""

    def change(named: Named) -> Named:
        segment = named["segment_ids"]
        last = segment.amax(1, keepdim=True)
        return {"segment_ids": segment - ((segment == last) & (last > 2)).to(segment.dtype)}

    _inputs(network, change)


@mutant("rounding", "plant_onnx", line=INT8_LINE)
def zero_points_off_by_one(graph: Any) -> None:
    """The zero point of every product's activations is one too large."""
    import onnx_ir as ir

    one = ir.val("planted_one", const_value=ir.tensor(np.uint8(1), name="planted_one"))
    graph.graph.register_initializer(one)
    for node in nodes_of(graph, "MatMulInteger"):
        more = ir.node("Add", [node.inputs[2], one])
        node.replace_input_with(2, more.outputs[0])
        graph.graph.insert_before(node, more)
