"""Encoder products in fp8: what is quantised, what stays, and what it does to answers; the numbers are a CPU's."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bertopt.core import Context, RuntimeFacts
from bertopt.errors import Unsupported
from bertopt.modeling import checkpoint, fp8
from bertopt.passes import CastHalf, ExportOnnx, MergeQkv, PackSequences, QuantizeFp8, UseBetterTransformer, UseSdpa
from bertopt.sessions import open_session
from bertopt.stages import claims, torch_certificate
from tests.support.built import apply_passes
from tests.support.tiny_models import FAMILIES, NORM_FIRST_FAMILIES, OTHER_FAMILIES, ROTARY_FAMILIES, Tiny, write_tiny

pytestmark = pytest.mark.skipif(fp8.cpu_refusal() is not None, reason=fp8.cpu_refusal() or "")
HALF = CastHalf()


@pytest.mark.parametrize("size", [(1, 16, 16), (7, 64, 32), (300, 32, 48)])
def test_a_layer_is_near_the_one_it_replaces(size: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    tokens, inputs, outputs = size
    old = nn.Linear(inputs, outputs, dtype=torch.bfloat16)
    # Outliers: one token and one output far larger than the others, which scales of their own keep apart.
    given = torch.randn(tokens, inputs, dtype=torch.bfloat16)
    given[0] *= 1000
    old.weight.data[0] *= 100
    with torch.no_grad():
        got, wanted = fp8.Fp8Linear(old)(given).float(), old(given).float()
    assert got.shape == wanted.shape
    # Each factor is rounded by at most 2^-4 of itself.
    most = given.float().norm(dim=1)[:, None] * old.weight.detach().float().norm(dim=1)
    assert float(((got - wanted).abs() / (most + 1)).max()) < 2**-3


def test_extreme_rows_stay_finite() -> None:
    layer = fp8.Fp8Linear(nn.Linear(16, 16, dtype=torch.bfloat16))
    largest = torch.finfo(torch.bfloat16).max
    given = torch.stack([torch.zeros(16), torch.full((16,), 1e-30), torch.full((16,), largest / 1e4)]).bfloat16()
    assert layer(given).isfinite().all()


@pytest.mark.parametrize("shape", [(1, 16), (5, 16), (2, 3, 16), (7, 1, 16)])
def test_operands_lie_as_a_gpus_kernel_asks(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]) -> None:
    """What torch's ScaledBlas.cpp checks on CUDA and a CPU's kernel does not."""
    seen: list[tuple[torch.Tensor, ...]] = []
    product = torch._scaled_mm

    def watched(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, **named: Any) -> torch.Tensor:
        seen.append((a, b, scale_a, scale_b))
        return product(a, b, scale_a, scale_b, **named)

    monkeypatch.setattr(torch, "_scaled_mm", watched)
    layer = copy.deepcopy(fp8.Fp8Linear(nn.Linear(16, 32, dtype=torch.bfloat16)))
    assert layer(torch.randn(shape, dtype=torch.bfloat16)).shape == (*shape[:-1], 32)
    ((a, b, scale_a, scale_b),) = seen
    rows = a.shape[0]
    assert a.stride() == (16, 1) and b.shape == (16, 32) and b.stride() == (1, 16), "rows by columns"
    assert scale_a.shape == (rows, 1) and scale_b.shape == (1, 32) and scale_b.stride(1) == 1
    assert scale_a.dtype == scale_b.dtype == torch.float32


def test_torch_compile_breaks_no_graph_at_it() -> None:
    """torch 2.11 compiles no torch.nn.functional.scaled_mm: on its first GPU the whole model was refused."""
    layer = fp8.Fp8Linear(nn.Linear(32, 16, dtype=torch.bfloat16))
    given = torch.randn(5, 32, dtype=torch.bfloat16)
    calls: list[str] = []
    with torch.inference_mode():
        compiled = torch.compile(layer, fullgraph=True, backend=lambda graph, _: calls.extend(str(n.target) for n in graph.graph.nodes) or graph)  # type: ignore[call-overload]
        torch.testing.assert_close(compiled(given), layer(given))
    assert any("_scaled_mm" in call and "v2" not in call for call in calls)


def test_a_compiled_graph_takes_tokens_and_weights_alone() -> None:
    """Of a float that the module holds torch.compile makes an input, a tensor on the CPU whose number every kernel is passed."""
    inputs: list[torch.dtype] = []

    def seen(graph: Any, given: list[Any]) -> Any:
        inputs.extend(value.dtype for value in given if isinstance(value, torch.Tensor))
        return graph

    layer = fp8.Fp8Linear(nn.Linear(32, 32, dtype=torch.bfloat16))
    with torch.inference_mode():
        torch.compile(layer, backend=seen, dynamic=True)(torch.randn(3, 5, 32, dtype=torch.bfloat16))
    assert sorted(map(str, inputs)) == ["torch.bfloat16", "torch.bfloat16", "torch.float32", "torch.float8_e4m3fn"]


def test_a_torch_that_cannot_on_a_cpu_is_named(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2.11 ends with an internal assertion, which was taken for a fault of bertopt's."""
    half = apply_passes(checkpoint.load(tiny()), HALF, tmp_path=tmp_path)
    model = apply_passes(half, QuantizeFp8(), tmp_path=tmp_path)

    def per_tensor_only(*_: Any, **__: Any) -> Any:
        raise RuntimeError("Now _scaled_mm only supports per-tensor scaling for CPU backend.")

    monkeypatch.setattr(torch, "_scaled_mm", per_tensor_only)
    fp8.cpu_refusal.cache_clear()
    try:
        for refused in (lambda: apply_passes(half, QuantizeFp8(), tmp_path=tmp_path), lambda: open_session(model, "cpu")):
            with pytest.raises(Unsupported, match=r"by a scale for each row on GPUs only; install torch 2\.13, or use device: cuda"):
                refused()
    finally:
        fp8.cpu_refusal.cache_clear()


def test_a_token_depends_on_itself_alone() -> None:
    layer = fp8.Fp8Linear(nn.Linear(32, 16, dtype=torch.bfloat16))
    given = torch.randn(5, 32, dtype=torch.bfloat16)
    other = torch.cat([given[:2], 1000 * given[2:]])
    assert torch.equal(layer(given)[:2], layer(other)[:2])


@pytest.mark.parametrize("family", [*FAMILIES, *OTHER_FAMILIES, *ROTARY_FAMILIES, *NORM_FIRST_FAMILIES])
def test_the_encoders_layers_are_counted_and_shown(tiny: Tiny, tmp_path: Path, family: str) -> None:
    half = apply_passes(checkpoint.load(tiny(family)), HALF, tmp_path=tmp_path)
    result = QuantizeFp8()(half, Context(workdir=tmp_path))
    model = result.model
    assert model.precision == "float8" and result.changes["linear_layers"] > 0
    layers = [name for name, layer in model.network.named_modules() if isinstance(layer, fp8.Fp8Linear)]
    assert not [name for name in layers if "classifier" in name or "pooler" in name]
    shown = QuantizeFp8().effects(model, RuntimeFacts())
    assert shown["linear layers in fp8"] == (len(layers), len(layers))
    assert all(expected == got for expected, got in shown.values())
    assert (claims.proven(model, RuntimeFacts()) or 0) > 0.5
    example = model.network.example(3, 12)
    with torch.inference_mode():
        near = torch.nn.functional.cosine_similarity(model.network(*example)[0], half.network(*example)[0])
    # Random weights, scaled up: a trained network is far nearer.
    assert float(near.min()) > 0.8


@pytest.mark.parametrize(
    "before",
    [(MergeQkv(), HALF), (UseSdpa(), PackSequences(), HALF), (HALF, PackSequences(attention="varlen"))],
    ids=str,
)
def test_it_follows_the_other_rewrites(tiny: Tiny, tmp_path: Path, before: tuple[Any, ...]) -> None:
    reference = checkpoint.load(tiny("bert", "feature-extraction", "mean"))
    model = apply_passes(reference, *before, QuantizeFp8(), tmp_path=tmp_path)
    ids = np.random.default_rng(0).integers(5, 40, (3, 12))
    inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    got, wanted = open_session(model).run(inputs), open_session(reference).run(inputs)
    near = (got["sentence_embedding"] * wanted["sentence_embedding"]).sum(axis=1)
    assert near.min() > 0.95 * np.square(wanted["sentence_embedding"]).sum(axis=1).min()


def test_what_is_kept_stays_in_bfloat16(tiny: Tiny, tmp_path: Path) -> None:
    half = apply_passes(checkpoint.load(tiny()), HALF, tmp_path=tmp_path)
    quantise = QuantizeFp8(keep_bf16=("layer.1.*", "query"))
    result = quantise(half, Context(workdir=tmp_path))
    assert result.changes == {"linear_layers": 5}
    layer = result.model.network.base.encoder.layer
    assert isinstance(layer[1].output.dense, nn.Linear) and isinstance(layer[0].attention.self.query, nn.Linear)
    shown = quantise.effects(result.model, RuntimeFacts())
    assert all(expected == got for expected, got in shown.values())
    # A layer that lost its fp8 is seen.
    layer[0].output.dense = nn.Linear(64, 32, dtype=torch.bfloat16)
    assert quantise.effects(result.model, RuntimeFacts())["linear layers left in bfloat16"] == (0, 1)
    with pytest.raises(Unsupported, match="keep_bf16 must name modules"):
        QuantizeFp8(keep_bf16=("layer.9",))(half, Context(workdir=tmp_path))


@pytest.mark.parametrize("count, keep, quantised", [(2, 1, 2), (3, 1, 2), (6, 1, 5), (6, 0, 6), (6, 2, 4), (6, 9, 4)])
def test_the_last_layers_stay_in_bfloat16(tiny: Tiny, tmp_path: Path, count: int, keep: int, quantised: int) -> None:
    """Their errors reach the outputs as they are. A third of the layers may stay, so that most products are in fp8."""
    half = apply_passes(checkpoint.load(tiny()), HALF, tmp_path=tmp_path)
    stack: Any = half.network.base.encoder
    stack.layer = nn.ModuleList([copy.deepcopy(stack.layer[0]) for _ in range(count)])
    step = QuantizeFp8(keep_last_layers=keep)
    network = copy.deepcopy(half.network)
    assert step.rewrite(network) == {"linear_layers": 6 * quantised}
    kinds = [any(isinstance(module, fp8.Fp8Linear) for module in layer.modules()) for layer in network.base.encoder.layer]
    assert kinds == [True] * quantised + [False] * (count - quantised)


@pytest.mark.parametrize("family", ["deberta", "deberta-v2", "modernbert"])
def test_the_last_layer_of_other_families_stays_too(tmp_path: Path, family: str) -> None:
    """DeBERTa's layers were not found, and all of them multiplied in fp8."""
    fields: dict[str, Any] = {"num_hidden_layers": 3, **({"layer_types": ["full_attention"] * 3} if family == "modernbert" else {})}
    half = apply_passes(checkpoint.load(write_tiny(tmp_path / "checkpoint", family, extra=fields)), HALF, tmp_path=tmp_path)
    network = copy.deepcopy(half.network)
    QuantizeFp8().rewrite(network)
    base: Any = network.base
    layers = base.layers if family == "modernbert" else base.encoder.layer
    assert [any(isinstance(module, fp8.Fp8Linear) for module in layer.modules()) for layer in layers] == [True, True, False]


def test_its_weights_are_certified_as_the_parents_rounded(tiny: Tiny, tmp_path: Path) -> None:
    half = apply_passes(checkpoint.load(tiny()), MergeQkv(), HALF, tmp_path=tmp_path)
    model = apply_passes(half, QuantizeFp8(), tmp_path=tmp_path)
    certificate = torch_certificate.certify(model, half)
    assert certificate.status == "none" and "other names" in certificate.reason
    # A later stage keeps the same bits; a step more, another scale or NaN is not a rounding.
    assert "rounded (" not in torch_certificate.certify(model, model).reason
    layer = model.network.base.encoder.layer[0].output.dense
    assert isinstance(layer, fp8.Fp8Linear)
    bits, scale = layer.weight.data.view(torch.uint8), layer.scale.data
    for harm in (lambda: bits[3, 5:6].add_(1), lambda: scale[2].mul_(1.2), lambda: bits[0, 0:1].fill_(0x7F)):
        before = bits.clone(), scale.clone()
        harm()
        assert "output.dense.weight' is not the parent's, rounded (1 of" in torch_certificate.certify(model, half).reason
        bits.copy_(before[0])
        scale.copy_(before[1])


def test_what_it_does_not_fit_is_refused(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for before in ([], [CastHalf(dtype="float16")], [CastHalf(mode="autocast")]):
        assert "put cast_half with dtype: bfloat16" in (QuantizeFp8().conflict(before) or "")
    assert QuantizeFp8().conflict([HALF]) is None
    assert QuantizeFp8().conflict([HALF, UseBetterTransformer()])
    assert ExportOnnx().conflict([HALF, QuantizeFp8()])
    model = checkpoint.load(tiny())
    with pytest.raises(Unsupported, match="cast_half"):
        QuantizeFp8()(model, Context(workdir=tmp_path))
    half = apply_passes(model, HALF, tmp_path=tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(Unsupported, match="sm89 or later; this one is sm80"):
        QuantizeFp8()(half, Context(workdir=tmp_path, device="cuda"))
    fast = apply_passes(half, QuantizeFp8(), tmp_path=tmp_path)
    with pytest.raises(Unsupported, match="sm89 or later; this one is sm80"):
        open_session(fast, "cuda")
