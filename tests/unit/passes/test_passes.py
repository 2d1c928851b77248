"""Every pass on tiny random checkpoints: what it counts, and that every padding pattern still gets the same answers."""

from __future__ import annotations

import functools
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bertopt import stages
from bertopt.checks import parity, probes
from bertopt.checks.parity import DEFAULT_LIMITS, Answers
from bertopt.core import Eager, Model, Pass
from bertopt.errors import Unsupported
from bertopt.modeling import checkpoint
from bertopt.passes import (
    BuildTensorrt,
    CastHalf,
    CastOnnxHalf,
    CompileTorch,
    ExportOnnx,
    FuseOrt,
    QuantizeInt8,
    UseBetterTransformer,
    UseSdpa,
    cast_half,
)
from bertopt.results import Limits
from bertopt.sessions import open_session
from tests.support.built import Built
from tests.support.compared import cases
from tests.support.exports import Exports
from tests.support.tiny_models import FAMILIES, Tiny

AnyPass = Pass[Any, Any]

#: The defaults, but: of 34 texts of a random model with three close labels one flip is 0.029 already, so two may
#: happen; and bf16 vectors of three numbers have been 0.99899 apart.
SMALL = Limits(label_flips_max=0.06)
LIMITS = {
    "float32": DEFAULT_LIMITS["float32"],
    "float16": SMALL.over(DEFAULT_LIMITS["float16"]),
    "bfloat16": Limits(label_flips_max=0.06, cosine_min=0.998).over(DEFAULT_LIMITS["bfloat16"]),
    "int8": SMALL.over(DEFAULT_LIMITS["int8"]),
}


class Lab(Built):
    """Models after some passes, and the answers of the references, each computed once."""

    def reference(self, family: str) -> Eager:
        model: Eager = self.build(family).model
        return model

    def answers(self, model: Model) -> dict[str, Answers]:
        session = open_session(model, threads=1)
        grid = probes.grid(model.spec, [(2, 8), (3, 16)], None)
        return {probe.name: parity.answer(session, probe, model.spec) for probe in grid}

    @functools.cache  # noqa: B019
    def _reference_answers(self, family: str) -> dict[str, Answers]:
        return self.answers(self.reference(family))

    def check(self, family: str, model: Model) -> None:
        mine, theirs = self.answers(model), self._reference_answers(family)
        found = [
            parity.compare(probe, model.spec, mine[probe.name], theirs[probe.name])
            for probe in probes.grid(model.spec, [(2, 8), (3, 16)], None)
        ]
        assert {case.padding for case in found} == set(probes.PADDINGS)
        verdict = parity.judge(found, LIMITS[model.precision], None)
        assert verdict.passed, verdict.worst


@pytest.fixture(scope="module")
def lab(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory, export: Exports) -> Iterator[Lab]:
    with Lab.opened(tiny, tmp_path_factory.mktemp("lab"), export) as lab:
        yield lab


@dataclass(frozen=True)
class Route:
    """Passes, the precision they end in, and exactly what the last counts ({family: …} where it depends)."""

    steps: tuple[AnyPass, ...]
    precision: str
    changes: dict[str, int]

    def expected(self, family: str) -> dict[str, int]:
        # RoBERTa adds its position embeddings after the token types, where the fusion finds one more sum to normalise.
        return self.changes | ({"SkipLayerNormalization": 5} if self.more_norms(family) else {})

    def more_norms(self, family: str) -> bool:
        return family in ("roberta", "xlm-roberta") and "SkipLayerNormalization" in self.changes


SDPA, E23, E20 = UseSdpa(), ExportOnnx(), ExportOnnx(opset=20)
FUSED = {"BiasGelu": 2, "SkipLayerNormalization": 4}
ROUTES = {
    "sdpa": Route((SDPA,), "float32", {"attention_calls": 2}),
    "sdpa_math": Route((UseSdpa(backend="math"),), "float32", {"attention_calls": 2}),
    "better": Route((UseBetterTransformer(),), "float32", {"layers": 2}),
    "better_unnested": Route((UseBetterTransformer(nested_tensors=False),), "float32", {"layers": 2}),
    "better_after_sdpa": Route((SDPA, UseBetterTransformer()), "float32", {"layers": 2}),
    "bf16": Route((CastHalf(),), "bfloat16", {"tensors": 41}),
    "bf16_sdpa": Route((SDPA, CastHalf()), "bfloat16", {"tensors": 41}),
    "bf16_better": Route((UseBetterTransformer(), CastHalf()), "bfloat16", {"tensors": 33}),
    "autocast": Route((CastHalf(mode="autocast"),), "bfloat16", {"linear_layers": 14}),
    "onnx23": Route((SDPA, E23), "float32", {"attention_nodes": 2}),
    "onnx20": Route((SDPA, E20), "float32", {"attention_nodes": 0}),
    "fuse23": Route((SDPA, E23, FuseOrt()), "float32", FUSED),
    "fuse20": Route((SDPA, E20, FuseOrt()), "float32", {"Attention": 2} | FUSED),
    "half23": Route((SDPA, E23, CastOnnxHalf()), "float16", {"clipped": 0}),
    "half20": Route((SDPA, E20, CastOnnxHalf()), "float16", {"clipped": 1}),
    "half23_fused": Route((SDPA, E23, FuseOrt(), CastOnnxHalf()), "float16", {"clipped": 0}),
    "half20_fused": Route((SDPA, E20, FuseOrt(), CastOnnxHalf()), "float16", {"clipped": 1}),
    "int8_23": Route((SDPA, E23, QuantizeInt8()), "int8", {"MatMulInteger": 14}),
    "int8_20": Route((SDPA, E20, QuantizeInt8()), "int8", {"MatMulInteger": 14}),
    "int8_per_tensor": Route((SDPA, E23, QuantizeInt8(per_channel=False)), "int8", {"MatMulInteger": 14}),
    "int8_23_fused": Route((SDPA, E23, FuseOrt(), QuantizeInt8()), "int8", {"MatMulInteger": 14}),
    # ONNX Runtime's quantiser leaves the fused Attention, and the query, key and value products inside, in float.
    "int8_20_fused": Route((SDPA, E20, FuseOrt(), QuantizeInt8()), "int8", {"MatMulInteger": 8}),
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("family", FAMILIES)
def test_pass(lab: Lab, family: str, route: str) -> None:
    wanted = ROUTES[route]
    result = lab.build(family, *wanted.steps)
    counted = dict(result.changes)
    if "clipped" in counted:
        assert counted == half_counts(result.model.path) | {"clipped": counted["clipped"]}
        counted = {"clipped": counted["clipped"]}
    elif "nodes" in counted:
        assert counted.pop("nodes") == sum(nodes(result.model.path).values())
    elif "tensors" in counted:
        assert counted["tensors"] == sum(1 for _ in result.model.network.encoder.parameters())
        counted = {"tensors": wanted.changes["tensors"]}
    assert counted == wanted.expected(family)
    assert result.model.precision == wanted.precision
    assert result.model.spec == lab.reference(family).spec
    lab.check(family, result.model)


def nodes(path: Path) -> Counter[str]:
    import onnx

    return Counter(node.op_type for node in onnx.load(path).graph.node)


def half_counts(path: Path) -> dict[str, int]:
    """Initialisers in half precision, and nodes that give half precision but only cast nothing else."""
    import onnx_ir

    graph = onnx_ir.load(path).graph
    half = onnx_ir.DataType.FLOAT16
    added = sum(n.op_type == "Cast" and (n.name or "").endswith("_to_float16") for n in graph)
    return {
        "initialisers": sum(value.dtype == half for value in graph.initializers.values()),
        "nodes": sum(any(output.dtype == half for output in node.outputs) for node in graph) - added,
    }


# Passes over eager networks


@pytest.mark.parametrize("step", [SDPA, UseBetterTransformer(), CastHalf(), CastHalf(mode="autocast")], ids=repr)
def test_the_original_is_untouched(lab: Lab, tiny: Tiny, step: AnyPass) -> None:
    model = checkpoint.load(tiny("bert"))
    before = {name: tensor.clone() for name, tensor in model.network.state_dict().items()}
    example = model.network.example(3, 9)
    with torch.inference_mode():
        answer = model.network(*example)[0]
        result = step(model, lab.context())
        assert torch.allclose(model.network(*example)[0], answer, atol=1e-6)
    assert result.model.network is not model.network
    assert model.rewrites == ()
    assert [rewrite.name for rewrite in result.model.rewrites] == [step.name()]
    after = model.network.state_dict()
    assert list(after) == list(before)
    assert all(
        torch.equal(after[name], tensor) and after[name].dtype == torch.float32 for name, tensor in before.items()
    )
    assert model.network.base.config._attn_implementation == "eager"


def test_a_second_application_changes_nothing(lab: Lab) -> None:
    assert SDPA(lab.build("bert", SDPA).model, lab.context()).changes == {"attention_calls": 0}
    better = UseBetterTransformer()
    assert better(lab.build("bert", better).model, lab.context()).changes == {"layers": 0}
    assert CastHalf()(lab.build("bert", CastHalf()).model, lab.context()).changes == {"tensors": 0}


@pytest.mark.parametrize(
    ("family", "step", "words"),
    [
        ("albert", UseBetterTransformer(), "albert layers have no nn.TransformerEncoderLayer equivalent"),
        ("mpnet", UseBetterTransformer(), "mpnet layers have no nn.TransformerEncoderLayer equivalent"),
        ("mpnet", SDPA, "MPNetForSequenceClassification has no SDPA implementation"),
        ("bert", UseSdpa(backend="efficient"), "no 'efficient' attention kernel"),
    ],
)
def test_unsupported(lab: Lab, family: str, step: AnyPass, words: str) -> None:
    with pytest.raises(Unsupported, match=words):
        step(lab.reference(family), lab.context())


@pytest.mark.parametrize("family", ["albert", "mpnet"])
def test_other_families_in_half_precision(lab: Lab, family: str) -> None:
    lab.check(family, lab.build(family, CastHalf()).model)


def test_shared_layers_are_counted_once_a_call(lab: Lab) -> None:
    result = lab.build("albert", SDPA)
    assert result.changes == {"attention_calls": 2}
    lab.check("albert", result.model)


def test_fp16_needs_a_cpu_that_has_it(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cast_half, "native_fp16", lambda: False)
    with pytest.raises(Unsupported, match="no native fp16 arithmetic"):
        CastHalf(dtype="float16")(lab.reference("bert"), lab.context())
    monkeypatch.setattr(cast_half, "native_fp16", lambda: True)
    assert CastHalf(dtype="float16")(lab.reference("bert"), lab.context()).model.precision == "float16"


def test_pooling_stays_in_float32(tiny: Tiny, lab: Lab) -> None:
    model = CastHalf()(checkpoint.load(tiny("bert", "feature-extraction", "mean")), lab.context()).model
    with torch.inference_mode():
        (embedding,) = model.network(*model.network.example(3, 9))
    assert embedding.dtype == torch.float32
    assert torch.allclose(embedding.norm(dim=1), torch.ones(3), atol=1e-6)


@pytest.mark.parametrize("route", ["sdpa", "better", "bf16", "bf16_better", "autocast"])
def test_replay_from_a_stage_answers_alike(lab: Lab, tmp_path: Path, route: str) -> None:
    model = lab.build("bert", *ROUTES[route].steps).model
    parent, out = tmp_path / "parent", tmp_path / "out"
    parent.mkdir()
    out.mkdir()
    checkpoint.write_snapshot(lab.reference("bert"), parent)
    stages.inherit(parent, out)
    stages.write_form(model, out)
    stages.write_manifest(out, stages.describe(model))
    opened = stages.open_stage(out, stages.verify(out))
    assert opened.precision == model.precision
    expected, found = lab.answers(model), lab.answers(opened)
    for name, (kept, _) in expected.items():
        assert abs(found[name][0]["logits"] - kept["logits"]).max() < 1e-6


@pytest.mark.slow
def test_compile_torch(lab: Lab) -> None:
    """The grid has a batch of one, for which torch compiles again."""
    context = lab.context()
    result = CompileTorch()(lab.build("bert", SDPA).model, context)
    assert result.changes == {"graphs": 1}
    assert [rewrite.name for rewrite in result.model.rewrites] == ["use_sdpa", "compile_torch"]
    lab.check("bert", result.model)
    torch._dynamo.reset()


def test_compile_torch_needs_a_compiler(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(Unsupported, match=r"install g\+\+"):
        CompileTorch()(lab.reference("bert"), lab.context())


# ONNX graphs


@pytest.mark.parametrize("route", ["onnx23", "onnx20", "fuse23", "fuse20", "half23", "int8_23", "int8_20_fused"])
@pytest.mark.parametrize("family", ["bert", "distilbert"])
def test_graph_keeps_its_names_and_types(lab: Lab, family: str, route: str) -> None:
    import onnx

    model = lab.build(family, *ROUTES[route].steps).model
    assert [path.name for path in model.path.parent.iterdir()] == ["model.onnx"]
    graph = onnx.load(model.path).graph
    assert [value.name for value in graph.input] == list(model.spec.inputs)
    for value in graph.input:
        assert [dim.dim_param for dim in value.type.tensor_type.shape.dim] == ["batch", "sequence"]
        assert value.type.tensor_type.elem_type == onnx.TensorProto.INT64
    assert [value.name for value in graph.output] == ["logits"]
    assert graph.output[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT


@pytest.mark.parametrize("opset", [20, 23])
def test_opset_is_the_one_asked_for(lab: Lab, opset: int) -> None:
    import onnx

    path = lab.build("bert", SDPA, ExportOnnx(opset=opset)).model.path
    assert {entry.domain: entry.version for entry in onnx.load(path).opset_import}[""] == opset
    assert nodes(path)["Gelu"] == 2


@pytest.mark.parametrize("route", [name for name in ROUTES if name.startswith("int8")])
def test_attention_is_never_quantised(lab: Lab, route: str) -> None:
    found = nodes(lab.build("bert", *ROUTES[route].steps).model.path)
    assert found["QAttention"] == 0
    assert found["Attention"] == (0 if route == "int8_20" else 2)


def test_pooled_model_gives_token_vectors_too(tiny: Tiny, lab: Lab, export: Exports) -> None:
    import onnx

    reference = checkpoint.load(tiny("bert", "feature-extraction", "mean"))
    model = export(SDPA(reference, lab.context()).model, lab.context())
    outputs = {value.name: value.type.tensor_type for value in onnx.load(model.path).graph.output}
    assert list(outputs) == ["sentence_embedding", "last_hidden_state"]
    assert [dim.dim_param for dim in outputs["last_hidden_state"].shape.dim][:2] == ["batch", "sequence"]
    half = CastOnnxHalf()(model, lab.context()).model
    for each in (model, half):
        ours, theirs = open_session(each, threads=1), open_session(reference, threads=1)
        found = parity.judge(cases(ours, theirs, reference.spec, [(2, 8), (3, 16)]), DEFAULT_LIMITS[each.precision], None)
        assert found.passed, found.worst


def test_answers_of_a_question_model_keep_their_order(tiny: Tiny, lab: Lab) -> None:
    reference = checkpoint.load(tiny("bert", "question-answering"))
    model = E23(reference, lab.context()).model
    mine, theirs = lab.answers(model), lab.answers(reference)
    for name, (kept, _) in theirs.items():
        for output, expected in kept.items():
            assert abs(mine[name][0][output] - expected).max(initial=0) < 1e-4


def test_fusion_insists_on_attention(lab: Lab) -> None:
    export = lab.build("bert", SDPA, E20).model
    deeper = replace(export, spec=export.spec.model_copy(update={"layers": 3}))
    with pytest.raises(Unsupported, match="expected 3 attention nodes, one a layer; got 2; export after use_sdpa"):
        FuseOrt()(deeper, lab.context())
    assert FuseOrt(attention=False)(deeper, lab.context()).changes == ROUTES["fuse20"].changes


def test_graph_of_eager_attention_is_fused_too(lab: Lab) -> None:
    result = lab.build("bert", E20, FuseOrt())
    assert result.changes == ROUTES["fuse20"].changes
    lab.check("bert", result.model)


def test_half_precision_keeps_what_is_named(lab: Lab) -> None:
    import onnx_ir

    export = lab.build("bert", SDPA, E23).model
    model = CastOnnxHalf(keep_fp32=("LayerNormalization",))(export, lab.context()).model
    kinds = {"LayerNormalization": set(), "Attention": set(), "Gelu": set()}
    for node in onnx_ir.load(model.path).graph:
        if node.op_type in kinds:
            kinds[node.op_type].add(node.outputs[0].dtype.name)
    assert kinds == {"LayerNormalization": {"FLOAT"}, "Attention": {"FLOAT16"}, "Gelu": {"FLOAT16"}}
    lab.check("bert", model)
    with pytest.raises(Unsupported, match="must name operator types or nodes of the graph; got Softmux"):
        CastOnnxHalf(keep_fp32=("Softmux",))(export, lab.context())


def test_bfloat16_graph_is_refused_by_the_cpu(lab: Lab) -> None:
    model = CastOnnxHalf(dtype="bfloat16")(lab.build("bert", SDPA, E23).model, lab.context()).model
    assert model.precision == "bfloat16"
    with pytest.raises(Unsupported, match="CPUExecutionProvider has no kernel for this graph in bfloat16"):
        open_session(model)


@pytest.mark.parametrize("step", [QuantizeInt8(), CastOnnxHalf()], ids=repr)
def test_float32_graphs_only(lab: Lab, step: AnyPass) -> None:
    half = lab.build("bert", SDPA, E23, CastOnnxHalf()).model
    with pytest.raises(Unsupported, match="takes a float32 graph; got float16"):
        step(half, lab.context())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize("route", ["sdpa", "onnx23"])
def test_no_session_falls_back_to_the_cpu(lab: Lab, route: str) -> None:
    with pytest.raises(Unsupported, match="CUDA"):
        open_session(lab.build("bert", *ROUTES[route].steps).model, "cuda")


# What follows what


@pytest.mark.parametrize(
    ("step", "before", "words"),
    [
        (CastHalf(), [CastHalf(mode="autocast")], "half precision already"),
        (E23, [UseBetterTransformer()], "cannot be exported"),
        (E23, [CastHalf(mode="autocast")], "autocast exists only while torch runs"),
        (FuseOrt(), [E23, FuseOrt()], "fused already"),
        (FuseOrt(), [E23, QuantizeInt8()], "fuse before quantize_int8"),
        (FuseOrt(), [E23, CastOnnxHalf()], "fuse before cast_onnx_half"),
        (CastOnnxHalf(), [CastHalf(), E23], "half precision already"),
        (CastOnnxHalf(), [E23, CastOnnxHalf()], "half precision already"),
        (CastOnnxHalf(), [E23, QuantizeInt8()], "cast back and forth"),
        (QuantizeInt8(), [E23, QuantizeInt8()], "quantised already"),
        (QuantizeInt8(), [E23, CastOnnxHalf()], "quantise the float32 graph"),
        (QuantizeInt8(), [CastHalf(), E23], "quantise the float32 graph"),
        (BuildTensorrt(), [E23, FuseOrt()], "branch from export_onnx"),
        (BuildTensorrt(), [E23, QuantizeInt8()], "static INT8 without zero points"),
        (SDPA, [UseSdpa(backend="math")], "scaled_dot_product_attention already"),
        (SDPA, [UseBetterTransformer()], "none is left to switch"),
        (UseBetterTransformer(), [UseBetterTransformer()], "converted already"),
        (UseBetterTransformer(), [CastHalf(mode="autocast")], "autocast does not reach into the fast path"),
        (CastHalf(mode="autocast"), [UseBetterTransformer()], "autocast does not reach into nn.TransformerEncoder"),
        (
            BuildTensorrt(),
            [SDPA, E23],
            "no float32 Attention kernel: put cast_onnx_half before, or export with opset: 22",
        ),
        (BuildTensorrt(), [SDPA, E20], None),
        (BuildTensorrt(), [SDPA, CastHalf(dtype="float16"), E23], None),
        (CastHalf(), [SDPA, UseBetterTransformer()], None),
        (E23, [SDPA, CastHalf()], None),
        (FuseOrt(), [SDPA, E20], None),
        (CastOnnxHalf(), [SDPA, E20, FuseOrt()], None),
        (QuantizeInt8(), [SDPA, E20, FuseOrt()], None),
        (BuildTensorrt(), [SDPA, E23, CastOnnxHalf()], None),
        (CompileTorch(), [SDPA, CastHalf()], None),
    ],
)
def test_conflicts(step: AnyPass, before: list[AnyPass], words: str | None) -> None:
    found = step.conflict(before)
    if words is None:
        assert found is None
    else:
        assert found is not None
        assert words in found


@pytest.mark.parametrize(("step", "before"), [(CastOnnxHalf(dtype="bfloat16"), [SDPA, E23]), (E23, [SDPA, CastHalf()])])
def test_graphs_that_no_cpu_runs(step: AnyPass, before: list[AnyPass]) -> None:
    assert "no bfloat16 kernels for a CPU" in str(step.device_conflict("cpu", before))
    assert step.device_conflict("auto", before) is step.device_conflict("cuda", before) is None
    assert CastOnnxHalf().device_conflict("cpu", before) is E23.device_conflict("cpu", [SDPA]) is None


def test_the_fast_path_needs_an_even_number_of_heads(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    model = lab.reference("bert")
    monkeypatch.setattr(model.network.base.config, "num_attention_heads", 1)
    with pytest.raises(Unsupported, match="needs an even number of heads; the model has 1"):
        UseBetterTransformer()(model, lab.context())


def test_better_transformer_is_not_exported_even_without_a_recipe(lab: Lab) -> None:
    with pytest.raises(Unsupported, match="cannot be exported; branch with after:"):
        E23(lab.build("bert", UseBetterTransformer()).model, lab.context())
