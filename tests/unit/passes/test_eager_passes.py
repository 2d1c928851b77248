"""Passes over eager networks: what each counts, and that every padding pattern still gets the same answers."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from bertopt import stages
from bertopt.errors import Unsupported
from bertopt.modeling import checkpoint
from bertopt.passes import CastHalf, CompileTorch, UseBetterTransformer, UseSdpa, cast_half
from tests.support.lab import AnyPass, Lab
from tests.support.tiny_models import FAMILIES, Tiny


@dataclass(frozen=True)
class Route:
    """Passes, the precision they end in, and exactly what the last counts."""

    steps: tuple[AnyPass, ...]
    precision: str
    changes: dict[str, int]


SDPA = UseSdpa()
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
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("family", [
    *FAMILIES,
    "ernie",
    "data2vec-text",
])  # fmt: skip
def test_pass(lab: Lab, family: str, route: str) -> None:
    wanted = ROUTES[route]
    result = lab.build(family, *wanted.steps)
    counted = dict(result.changes)
    if "tensors" in counted:
        assert counted["tensors"] == sum(1 for _ in result.model.network.encoder.parameters())
        counted = {"tensors": wanted.changes["tensors"]}
    assert counted == wanted.changes
    assert result.model.precision == wanted.precision
    assert result.model.spec == lab.reference(family).spec
    lab.check(family, result.model)


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
        ("megatron-bert", UseBetterTransformer(), "megatron-bert layers have their norms first, for which torch's encoder has no nested tensors"),
        ("mpnet", SDPA, "MPNetForSequenceClassification has no SDPA implementation"),
        ("rembert", SDPA, "RemBertForSequenceClassification has no SDPA implementation"),
        ("bert", UseSdpa(backend="efficient"), "no 'efficient' attention kernel"),
    ],
)
def test_unsupported(lab: Lab, family: str, step: AnyPass, words: str) -> None:
    with pytest.raises(Unsupported, match=words):
        step(lab.reference(family), lab.context())


@pytest.mark.parametrize("route", ["better", "better_unnested", "bf16_better"])
def test_narrow_embeddings_are_projected_before_the_fast_path(lab: Lab, route: str) -> None:
    lab.check("rembert", lab.build("rembert", *ROUTES[route].steps).model)


@pytest.mark.parametrize("family", ["albert", "mpnet", "rembert"])
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


def test_the_fast_path_needs_an_even_number_of_heads(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    model = lab.reference("bert")
    monkeypatch.setattr(model.network.base.config, "num_attention_heads", 1)
    with pytest.raises(Unsupported, match="needs an even number of heads; the model has 1"):
        UseBetterTransformer()(model, lab.context())
