"""Exports to ONNX and passes over graphs: what each counts, and that every padding pattern still gets the same answers."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from bertopt.checks import parity
from bertopt.checks.parity import DEFAULT_LIMITS
from bertopt.errors import Unsupported
from bertopt.modeling import checkpoint
from bertopt.passes import CastOnnxHalf, ExportOnnx, FuseOrt, QuantizeInt8, UseBetterTransformer, UseSdpa
from bertopt.sessions import open_session
from tests.support.compared import cases
from tests.support.exports import Exports
from tests.support.lab import AnyPass, Lab
from tests.support.rewritten import nodes
from tests.support.tiny_models import FAMILIES, Tiny


@dataclass(frozen=True)
class Route:
    """Passes, the precision they end in, and exactly what the last counts ({family: …} where it depends)."""

    steps: tuple[AnyPass, ...]
    precision: str
    changes: dict[str, int]

    def expected(self, family: str) -> dict[str, int]:
        # RoBERTa adds its position embeddings after the token types, ERNIE its task, where the fusion finds one more sum to normalise.
        return self.changes | ({"SkipLayerNormalization": 5} if self.more_norms(family) else {})

    def more_norms(self, family: str) -> bool:
        return family in ("roberta", "xlm-roberta", "ernie", "data2vec-text") and "SkipLayerNormalization" in self.changes


SDPA, E23, E20 = UseSdpa(), ExportOnnx(), ExportOnnx(opset=20)
FUSED = {"BiasGelu": 2, "SkipLayerNormalization": 4}
ROUTES = {
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


@pytest.mark.parametrize(("family", "route"), [
    *itertools.product(FAMILIES, ROUTES),
    *(("ernie", route) for route in ("fuse23", "half20_fused", "int8_20")),
    *(("data2vec-text", route) for route in ("fuse20", "half23", "int8_23_fused")),
])  # fmt: skip
def test_pass(lab: Lab, family: str, route: str) -> None:
    wanted = ROUTES[route]
    result = lab.build(family, *wanted.steps)
    counted = dict(result.changes)
    if "clipped" in counted:
        assert counted == half_counts(result.model.path) | {"clipped": counted["clipped"]}
        counted = {"clipped": counted["clipped"]}
    elif "nodes" in counted:
        assert counted.pop("nodes") == sum(nodes(result.model).values())
    assert counted == wanted.expected(family)
    assert result.model.precision == wanted.precision
    assert result.model.spec == lab.reference(family).spec
    lab.check(family, result.model)


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

    model = lab.build("bert", SDPA, ExportOnnx(opset=opset)).model
    assert {entry.domain: entry.version for entry in onnx.load(model.path).opset_import}[""] == opset
    assert nodes(model)["Gelu"] == 2


@pytest.mark.parametrize("route", [name for name in ROUTES if name.startswith("int8")])
def test_attention_is_never_quantised(lab: Lab, route: str) -> None:
    found = nodes(lab.build("bert", *ROUTES[route].steps).model)
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
@pytest.mark.parametrize("steps", [(SDPA,), (SDPA, E23)], ids=["sdpa", "onnx23"])
def test_no_session_falls_back_to_the_cpu(lab: Lab, steps: tuple[AnyPass, ...]) -> None:
    with pytest.raises(Unsupported, match="CUDA"):
        open_session(lab.build("bert", *steps).model, "cuda")


def test_better_transformer_is_not_exported_even_without_a_recipe(lab: Lab) -> None:
    with pytest.raises(Unsupported, match="cannot be exported; branch with after:"):
        E23(lab.build("bert", UseBetterTransformer()).model, lab.context())
