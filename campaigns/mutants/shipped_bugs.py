"""Bugs that engineers ship: what a packer reads otherwise than the network, ranges and attributes of graphs, positions far from the beginning,
ids in one place alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bertopt.core import Context, Onnx, OpenVino, Result
from campaigns.mutants.almost_alike import _answers
from campaigns.mutants.as_read import CLS
from campaigns.mutants.conditions import _rows_where, _valid, plant_each
from campaigns.mutants.heads import Graph
from campaigns.mutants.labels import EVERY  # noqa: F401
from campaigns.mutants.loose_limits import BF16
from campaigns.mutants.newer_families import MODERNBERT, NOMIC
from campaigns.mutants.onnx_forms import nodes as nodes_of
from campaigns.mutants.onnx_forms import put
from campaigns.mutants.outsiders import BEHIND_BF16, _before, _inputs
from campaigns.mutants.own_passes import OPENVINO_LINE, _saved
from campaigns.mutants.plant import INT8_LINE, LABELS, MEAN, ONNX_LINE, ROBERTA, SDPA, SPAN, Checkpoint, Step, behind, mutant
from campaigns.mutants.torch_forms import swap
from campaigns.mutants.unseen_inputs import RARE

Named = dict[str, Any]
NATIVE_BF16: Step = {"pass": "build_native", "precision": "bf16"}
NATIVE_INT8: Step = {"pass": "build_native", "precision": "int8"}
OV_INT8: tuple[Step, ...] = (*ONNX_LINE, {"pass": "convert_openvino", "precision": "int8"})
OV_BF16: tuple[Step, ...] = (*ONNX_LINE, {"pass": "convert_openvino", "precision": "bf16"})
MPNET = Checkpoint("mpnet")


# What the native encoder reads.


def _native(name: str, about: str, fault: Callable[[Any], None], on: Checkpoint = LABELS) -> None:
    for step, kind in (("plant_native", "int8"), ("plant_native_bf16", "bf16")):

        def plant(network: Any) -> None:
            fault(network)

        plant.__name__, plant.__doc__ = f"{name}_in_native_{kind}", f"{about} Committed by what packs {kind}."
        mutant("certificate", step, on, (SDPA,))(plant)


def _config(**fields: Any) -> Callable[[Any], None]:
    def fault(network: Any) -> None:
        for name, change in fields.items():
            assert hasattr(network.encoder.config, name)
            setattr(network.encoder.config, name, change(getattr(network.encoder.config, name)))

    return fault


_native("epsilon_of_torch", "The norms' epsilon is torch's 1e-5.", _config(layer_norm_eps=lambda _: 1e-5))
_native("large_epsilon", "The norms' epsilon is 1e-3.", _config(layer_norm_eps=lambda _: 1e-3))
_native("half_the_heads", "Attention has half the heads.", _config(num_attention_heads=lambda n: n // 2))
_native("tanh_gelu", "The activation is GELU's tanh approximation.", _config(hidden_act=lambda _: "gelu_new"))
_native("cls_padding", "RoBERTa's positions begin one later.", _config(pad_token_id=lambda n: n + 1), ROBERTA)


def _renumbered_positions(network: Any, one: int, other: int) -> None:
    embeddings = network.base.embeddings
    swap(embeddings.position_embeddings.weight, one, other)
    embeddings.position_ids = embeddings.position_ids.clone()
    embeddings.position_ids[0, [one, other]] = embeddings.position_ids[0, [other, one]]


for _step, _kind in ((NATIVE_BF16, "bf16"), (NATIVE_INT8, "int8")):

    def _late(network: Any) -> None:
        _renumbered_positions(network, 77, 78)

    def _early(network: Any) -> None:
        _renumbered_positions(network, 5, 6)

    _late.__name__, _late.__doc__ = f"renumbered_late_positions_{_kind}", f"A pass of one's own stores positions 77 and 78 in another order, and numbers them so; what packs {_kind} numbers them itself."
    _early.__name__, _early.__doc__ = f"renumbered_early_positions_{_kind}", f"The same of positions 5 and 6 before {_kind}."
    mutant("unsupported", "plant_torch", line=(SDPA,), steps=(_step,))(_late)
    mutant("unsupported", "plant_torch", line=(SDPA,), steps=(_step,))(_early)


@mutant("rounding", "plant_torch", line=BEHIND_BF16)
def swapped_late_positions_behind_bf16(network: Any) -> None:
    """Positions 77 and 78 stand in each other's place, behind bf16."""
    swap(network.base.embeddings.position_embeddings.weight, 77, 78)


# Positions.


@mutant("rounding", "plant_torch", MPNET, (BF16,))
def half_the_distances_of_mpnet_in_bf16(network: Any) -> None:
    """In bf16: Far distances fall into buckets of half the largest distance; near ones are right. In mpnet."""
    encoder = network.base.encoder
    whole = encoder.relative_position_bucket
    encoder.relative_position_bucket = lambda n, num_buckets=32, max_distance=128: whole(n, num_buckets, 64)


@mutant("parity", "plant_torch", MPNET, (SDPA,))
def half_the_distances_of_mpnet(network: Any) -> None:
    """Far distances fall into buckets of half the largest distance; near ones are right. In mpnet."""
    encoder = network.base.encoder
    whole = encoder.relative_position_bucket
    encoder.relative_position_bucket = lambda n, num_buckets=32, max_distance=128: whole(n, num_buckets, 64)


def _rotary_beyond(network: Any, last: int, how: str) -> None:
    for module in network.base.modules():
        if any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False)):
            right = module.forward

            def forward(x: Any, position_ids: Any, *more: Any, right: Any = right, **named: Any) -> Any:
                changed = position_ids.clamp(max=last) if how == "clamped" else position_ids % (last + 1)
                return right(x, changed, *more, **named)

            module.forward = forward


for _on, _short in ((MODERNBERT, "modernbert"), (NOMIC, "nomic")):
    for _how in ("clamped", "wrapped"):

        def _rotary(network: Any, how: str = _how) -> None:
            _rotary_beyond(network, 63, how)

        _rotary.__name__, _rotary.__doc__ = f"rotary_{_how}_at_64_of_{_short}_in_bf16", f"In bf16: Rotary positions from 64 on are {_how} to a table of 64. In {_short}."
        mutant("rounding", "plant_torch", _on, (BF16,))(_rotary)


@mutant("rounding", "plant_torch", ROBERTA, (BF16,))
def positions_by_mask_of_roberta_in_bf16(network: Any) -> None:
    """In bf16: RoBERTa's positions count the mask, not the ids: where the padding token is written, others follow."""
    mask: list[Any] = [None]
    _inputs(network, lambda named: mask.__setitem__(0, named["attention_mask"]) or {})
    table = network.base.embeddings.position_embeddings
    padding = network.base.embeddings.padding_idx
    table.register_forward_pre_hook(lambda module, inputs: (mask[0].cumsum(1) * mask[0] + padding,))


# Inputs.


def _second_id(named: Named) -> Any:
    return ((named["input_ids"] == RARE) & (named["token_type_ids"] == 1) & (named["attention_mask"] == 1)).any(dim=1)


def _all_in(low: int, high: int) -> Callable[[Named], Any]:
    def wrong(named: Named) -> Any:
        ids, mask = named["input_ids"], named["attention_mask"] == 1
        inner = mask & (ids > CLS + 2)
        found = (ids >= low) & (ids < high)
        return (found | ~inner).all(dim=1) & inner.any(dim=1)

    return wrong


def _unknown(named: Named) -> Any:
    ids, mask = named["input_ids"], named["attention_mask"] == 1
    inner = mask & (ids != 2) & (ids != 3)
    return ((ids == 1) | ~inner).all(dim=1) & (inner.sum(dim=1) > 1)


def _odd(named: Named) -> Any:
    import torch

    return torch.as_tensor([len(named["input_ids"]) > 2]) & (torch.arange(len(named["input_ids"])) % 2 == 1)


CONDITIONS: dict[str, tuple[str, Callable[[Named], Any]]] = {
    "rare_id_in_second_text": ("Wrong for pairs whose second text holds one rare id.", _second_id),
    "digits_alone": ("Wrong for texts of digits and their marks alone.", _all_in(24, 33)),
    "unknown_alone": ("Wrong for texts of unknown tokens alone.", _unknown),
    "length_by_sevens": ("Wrong for texts whose length is 3 more than a multiple of 7.", lambda named: _valid(named) % 7 == 3),
    "length_by_31": ("Wrong for texts whose length is a multiple of 31.", lambda named: _valid(named) % 31 == 0),
    "sum_by_seven": ("Wrong for rows whose ids add up to a multiple of 7.", lambda named: (named["input_ids"] * named["attention_mask"]).sum(dim=1) % 7 == 0),
    "sum_by_sixtyfour": ("Wrong for rows whose ids add up to a multiple of 64.", lambda named: (named["input_ids"] * named["attention_mask"]).sum(dim=1) % 64 == 0),
    "odd_rows": ("Wrong for every second row of batches of more than two.", _odd),
    "one_character": ("Wrong for texts of one token.", lambda named: _valid(named) == 3),
    "next_to_a_short_row": ("Wrong for rows beside one of two tokens.", lambda named: bool((_valid(named) == 2).any()) & (_valid(named) > 2)),
    "second_longer_than_limit": ("Wrong for cut pairs, whose second text is longer than the first.", lambda named: (_valid(named) == 64) & ((named["token_type_ids"] == 1).sum(dim=1) > 32)),
    "types_in_first_place": ("Wrong where the second text begins in the first 4 columns.", lambda named: named["token_type_ids"][:, :4].any(dim=1)),
}  # fmt: skip
plant_each(CONDITIONS, __name__)


# State.


@mutant("coverage", "plant_torch")
def first_call_of_a_process(network: Any) -> None:
    """Wrong in the first call of a process."""
    seen = [0]

    def wrong(named: Named) -> bool:
        seen[0] += 1
        return seen[0] == 1

    _rows_where(network, wrong)


@mutant("coverage", "plant_torch")
def after_the_longest_text(network: Any) -> None:
    """Wrong for the call after one of the model's longest row."""
    last = [0]

    def wrong(named: Named) -> bool:
        before, last[0] = last[0], named["input_ids"].shape[1]
        return before >= 64 and named["input_ids"].shape[0] == 1 and last[0] > 64

    _rows_where(network, wrong)


@mutant("coverage", "plant_torch")
def text_after_its_neighbour(network: Any) -> None:
    """A text alone that was called two calls before gets the answers of the call between: two places of a cache change."""
    calls: list[Any] = [None, None]

    def change(named: Named, answers: Any) -> Any:
        if len(named["input_ids"]) > 1:
            return answers
        key = tuple(named["input_ids"][0].tolist())
        wrong = calls[0] is not None and calls[0][0] == key and calls[1][0] != key
        given = calls[1][1] if wrong else answers
        calls[:] = [calls[1], (key, tuple(answer.clone() for answer in answers))]
        return given

    _answers(network, change)


def _hashed(network: Any, bits: int) -> None:
    import zlib

    kept: dict[Any, Any] = {}

    def change(named: Named, answers: Any) -> Any:
        if len(named["input_ids"]) > 1:
            return answers
        key = zlib.crc32(named["input_ids"].numpy().tobytes() + named["token_type_ids"].numpy().tobytes()) % (1 << bits)
        found = kept.setdefault(key, tuple(answer.clone() for answer in answers))
        return tuple(answer.clone() for answer in found)

    _answers(network, change)


@mutant("coverage", "plant_torch")
def kept_by_hash_of_10_bits(network: Any) -> None:
    """Answers of texts alone are kept by a hash of 10 bits of their tokens."""
    _hashed(network, 10)


@mutant("coverage", "plant_torch")
def kept_by_hash_of_14_bits(network: Any) -> None:
    """Answers of texts alone are kept by a hash of 14 bits of their tokens."""
    _hashed(network, 14)


@mutant("coverage", "plant_torch")
def batch_kept_by_shape_and_ends(network: Any) -> None:
    """A batch of several rows gets the last one's answers if it has its shape and first row."""
    last: list[Any] = [None, None]

    def change(named: Named, answers: Any) -> Any:
        ids = named["input_ids"]
        if len(ids) == 1:
            return answers
        key = (tuple(ids.shape), tuple(ids[0].tolist()))
        if last[0] != key:
            last[:] = [key, tuple(answer.clone() for answer in answers)]
        return tuple(answer.clone() for answer in last[1])

    _answers(network, change)


# Graphs.


@mutant("parity", "plant_onnx", line=ONNX_LINE)
def older_opset(graph: Any) -> None:
    """The graph says an older opset than its nodes are of."""
    graph.graph.opset_imports[""] = 21


@mutant("parity", "plant_onnx", line=ONNX_LINE)
def norm_over_another_axis(graph: Any) -> None:
    """Layer norms are over the last two axes."""
    import onnx_ir as ir

    for node in nodes_of(graph, "LayerNormalization"):
        node.attributes["axis"] = ir.AttrInt64("axis", 1)


FUSED: tuple[Step, ...] = (*ONNX_LINE, {"pass": "fuse_ort"})


@mutant("parity", "plant_onnx", line=FUSED)
def epsilon_of_a_fused_norm(graph: Any) -> None:
    """Fused norms lost their epsilon: the operator's own is 1e-5... here 1e-12 becomes that."""
    for node in nodes_of(graph, "SkipLayerNormalization"):
        node.attributes.pop("epsilon")


@mutant("parity", "plant_onnx", line=FUSED)
def fast_gelu(graph: Any) -> None:
    """Fused GELU is the fast one, by tanh."""
    for node in nodes_of(graph, "BiasGelu"):
        node.op_type = "FastGelu"


for _line, _name in ((INT8_LINE, "int8"), ((*ONNX_LINE, {"pass": "cast_onnx_half"}), "fp16")):

    def _tanh(graph: Any) -> None:
        import onnx_ir as ir

        for node in nodes_of(graph, "Gelu"):
            node.attributes["approximate"] = ir.AttrString("approximate", "tanh")

    def _eps(graph: Any) -> None:
        import onnx_ir as ir

        for node in nodes_of(graph, "LayerNormalization"):
            node.attributes["epsilon"] = ir.AttrFloat32("epsilon", 1e-3)

    def _scale(graph: Any) -> None:
        import onnx_ir as ir

        nodes_of(graph, "Attention")[-1].attributes["scale"] = ir.AttrFloat32("scale", 0.9 / 4)

    def _causal(graph: Any) -> None:
        import onnx_ir as ir

        nodes_of(graph, "Attention")[-1].attributes["is_causal"] = ir.AttrInt64("is_causal", 1)

    for _fault, _what in ((_tanh, "tanh_gelu: GELU by tanh."), (_eps, "epsilon: Norms have an epsilon of 1e-3."), (_scale, "scale: One layer's attention scales a tenth less."), (_causal, "causal: The last layer's attention is causal.")):
        _fault.__name__, _fault.__doc__ = f"{_what.split(':')[0]}_behind_{_name}", f"Behind {_name}: {_what.split(': ')[1]}"
        mutant("rounding", "plant_onnx", line=_line)(_fault)


def _weak(model: Onnx, ctx: Context, by: float) -> Result[Onnx]:
    """Padding is subtracted `by` from scores."""
    import onnx_ir as ir
    from dataclasses import replace
    from campaigns.mutants.plant import write_graph

    graph = ir.load(model.path)
    value = ir.val("planted_by", const_value=ir.tensor(np.float32(-by), name="planted_by"))
    none = ir.val("planted_no", const_value=ir.tensor(np.float32(0), name="planted_no"))
    for one in (value, none):
        graph.graph.register_initializer(one)
    for node in nodes_of(graph, "Attention"):
        where = ir.node("Where", [node.inputs[3], none, value])
        graph.graph.insert_before(node, where)
        node.replace_input_with(3, where.outputs[0])
    return Result(replace(model, path=write_graph(graph, ctx)), {"planted": 1})


for _by in (8.0, 12.0):

    def _weakly(model: Onnx, ctx: Context, by: float = _by) -> Result[Onnx]:
        return _weak(model, ctx, by)

    _weakly.__name__, _weakly.__doc__ = f"padding_minus_{int(_by)}_behind_int8", f"Behind INT8: padding has {_by:g} less in scores, not infinity."
    mutant("rounding", "plant_graph", line=INT8_LINE)(_weakly)


# OpenVINO.


def _ir(name: str, about: str, change: Callable[[Any], None], line: tuple[Step, ...], gate: Any = "rounding") -> None:
    def plant(model: OpenVino, ctx: Context) -> Result[OpenVino]:
        return _saved(model, ctx, change, compress_to_fp16=False)

    plant.__name__, plant.__doc__ = name, about
    mutant(gate, "plant_ir", line=line)(plant)


def _ops(graph: Any, kind: str) -> list[Any]:
    found = [node for node in graph.get_ordered_ops() if node.get_type_name() == kind]
    assert found, f"no {kind}: {sorted({n.get_type_name() for n in graph.get_ordered_ops()})}"
    return found


def _epsilons(value: float) -> Callable[[Any], None]:
    def change(graph: Any) -> None:
        for node in _ops(graph, "MVN"):
            node.set_attribute("eps", value)

    return change


def _halved(graph: Any) -> None:
    import openvino.opset13 as ops

    node = _ops(graph, "FakeQuantize")[-1]
    for port in range(1, 5):
        array = node.input_value(port).get_node().data * np.float32(0.5)
        node.input(port).replace_source_output(ops.constant(array).output(0))


def _static(graph: Any) -> None:
    graph.reshape({one.get_any_name(): [1, 64] for one in graph.inputs})


def _gelu_tanh(graph: Any) -> None:
    for node in _ops(graph, "Gelu"):
        node.set_attribute("approximation_mode", "TANH")


def _hint(graph: Any) -> None:
    graph.set_rt_info("f16", ["runtime_options", "INFERENCE_PRECISION_HINT"])
    graph.set_rt_info("32", ["runtime_options", "DYNAMIC_QUANTIZATION_GROUP_SIZE"])
    _ops(graph, "MatMul")[0].set_friendly_name("hinted")


for _l, _n in ((OPENVINO_LINE, "f32"), (OV_BF16, "bf16"), (OV_INT8, "int8")):
    _ir(f"epsilons_in_openvino_{_n}", f"All norms of OpenVINO {_n} have an epsilon of 1e-3.", _epsilons(1e-3), _l)
    _ir(f"gelu_by_tanh_in_openvino_{_n}", f"GELU by tanh in OpenVINO {_n}.", _gelu_tanh, _l)
_ir("half_a_range_in_openvino", "One range of activations is half as wide.", _halved, OV_INT8)
_ir("static_shape_in_openvino", "The graph takes one text of 64 tokens.", _static, OPENVINO_LINE, "load")
_ir("hints_in_openvino", "The graph asks for f16 inference in its runtime options.", _hint, OPENVINO_LINE, "noop")
