"""MobileBERT, ConvBERT and SqueezeBERT in passes: what runs, and what is refused for a stated reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bertopt.core import Context, Eager, Pass, RuntimeFacts
from bertopt.errors import Unsupported
from bertopt.modeling import checkpoint
from bertopt.passes import (
    BuildNative,
    CastHalf,
    ConvertOpenvino,
    ExportOnnx,
    FuseOrt,
    KeepClsOnly,
    MergeQkv,
    PackSequences,
    QuantizeFp8,
    QuantizeInt8,
    UseBetterTransformer,
    UseSdpa,
)
from bertopt.sessions import open_session
from tests.support.tiny_models import CONVOLUTION_FAMILIES, Tiny, write_tiny


def reference(tiny: Tiny, family: str, task: str = "text-classification") -> Eager:
    return checkpoint.load(tiny(family, task))


@pytest.mark.parametrize(
    ("family", "step", "words"),
    [
        *((family, UseBetterTransformer(), "no nn.TransformerEncoderLayer equivalent") for family in CONVOLUTION_FAMILIES),
        *((family, KeepClsOnly(), "does not know the layers of") for family in CONVOLUTION_FAMILIES),
        *((family, BuildNative(), f"got {family}: use convert_openvino") for family in CONVOLUTION_FAMILIES),
        *((family, UseSdpa(), "has no SDPA implementation") for family in ("convbert", "squeezebert")),
        ("mobilebert", MergeQkv(), "another tensor than its query and key"),
        ("convbert", MergeQkv(), "multiplied into its convolutions"),
        ("squeezebert", MergeQkv(), "grouped convolutions"),
        ("mobilebert", PackSequences(), "tokens of mobilebert read those beside them"),
        ("convbert", PackSequences(), "tokens of convbert read those beside them"),
        ("squeezebert", PackSequences(), "families that can be packed"),
    ],
)
def test_what_cannot_work_is_refused(tiny: Tiny, tmp_path: Path, family: str, step: Pass[Any, Any], words: str) -> None:
    with pytest.raises(Unsupported, match=words):
        step(reference(tiny, family), Context(tmp_path))


def test_fp8_has_no_kernel_for_convolutions(tiny: Tiny, tmp_path: Path) -> None:
    half = CastHalf()(reference(tiny, "squeezebert"), Context(tmp_path)).model
    with pytest.raises(Unsupported, match="no fp8 kernel"):
        QuantizeFp8()(half, Context(tmp_path))


@pytest.mark.parametrize("family", ["mobilebert", "convbert"])
def test_fp8_spares_the_last_layer_and_what_stands_beside_the_layers(tiny: Tiny, tmp_path: Path, family: str) -> None:
    from bertopt.modeling.fp8 import Fp8Linear

    half = CastHalf()(reference(tiny, family), Context(tmp_path)).model
    result = QuantizeFp8(keep_last_layers=0)(half, Context(tmp_path))
    names = [name for name, module in result.model.network.base.named_modules() if isinstance(module, Fp8Linear)]
    assert names and all(name.startswith("encoder.layer.") for name in names)
    assert result.changes == {"linear_layers": len(names)}


@pytest.mark.parametrize(
    ("family", "extra", "words"),
    [
        # Six convolutions in each of two layers; the pooler and the classifier are matrix products.
        ("squeezebert", {}, r"12 of 14 products of this squeezebert .*Conv"),
        # Both halves of the feed-forward; six products and a kernel's in each layer, and two of the head and one of the embeddings.
        ("convbert", {"num_groups": 2}, r"4 of 21 products of this convbert .*MatMul"),
    ],
)
def test_int8_of_groups_is_refused(tmp_path: Path, family: str, extra: dict[str, Any], words: str) -> None:
    model = checkpoint.load(write_tiny(tmp_path / "checkpoint", family, extra=extra))
    graph = ExportOnnx()(model, Context(tmp_path)).model
    for step in (QuantizeInt8(), QuantizeInt8(scheme="static"), ConvertOpenvino(precision="int8")):
        with pytest.raises(Unsupported, match=words):
            step(graph, Context(tmp_path))


def test_every_product_of_convbert_is_in_integers_but_its_convolutions_over_tokens(tiny: Tiny, tmp_path: Path) -> None:
    import onnx_ir as ir

    graph = ExportOnnx()(reference(tiny, "convbert"), Context(tmp_path)).model
    convolutions = [node for node in ir.load(graph.path).graph if node.op_type == "Conv"]
    assert len(convolutions) == 2 and all(node.attributes["group"].value == 32 for node in convolutions)
    (tmp_path / "fused").mkdir()
    fused = FuseOrt()(graph, Context(tmp_path / "fused")).model
    for name, model in (("plain", graph), ("behind fusions", fused)):
        (tmp_path / name).mkdir()
        result = QuantizeInt8()(model, Context(tmp_path / name))
        shown = QuantizeInt8().effects(result.model, open_session(result.model, threads=1).facts())
        # Query, key, value, both of each convolution, its kernel, the output and two of the feed-forward; embeddings; the head's two.
        assert shown == {"products with INT8 weights": (21, 21), "products in integer kernels": (21, 21)}


@pytest.mark.parametrize("family", CONVOLUTION_FAMILIES)
@pytest.mark.parametrize("mode", ["cast", "autocast"])
def test_bfloat16_is_near_the_reference(tiny: Tiny, tmp_path: Path, family: str, mode: Any) -> None:
    model = reference(tiny, family)
    step = CastHalf(mode=mode)
    half = step(reference(tiny, family), Context(tmp_path)).model
    assert {expected == found for expected, found in step.effects(half, RuntimeFacts()).values()} == {True}
    inputs = {name: tensor.numpy() for name, tensor in zip(model.spec.inputs, model.network.example(4, 12), strict=True)}
    exact, rounded = (open_session(each, threads=1).run(inputs)["logits"] for each in (model, half))
    far = float(np.abs(exact - rounded).max() / np.abs(exact).max())
    assert 0 < far < 0.05


@pytest.mark.parametrize("family", CONVOLUTION_FAMILIES)
@pytest.mark.parametrize("keep", ["layer*.0.attention*", "*.value", "*.0.intermediate*", "*embeddings*"])
def test_parts_may_stay_in_float32(tiny: Tiny, tmp_path: Path, family: str, keep: str) -> None:
    model = CastHalf(keep_fp32=(keep,))(reference(tiny, family, "fill-mask"), Context(tmp_path)).model
    with torch.inference_mode():
        (logits,) = model.network(*model.network.example(2, 9))
    assert torch.isfinite(logits).all()


def test_float16_of_activations_beyond_its_range_is_not_finite(tmp_path: Path) -> None:
    """MobileBERT does not normalise its activations: published ones exceed float16, which only the checks of answers can see."""
    model = checkpoint.load(write_tiny(tmp_path / "checkpoint", "mobilebert"))
    with torch.no_grad():
        for layer in model.network.base.encoder.layer:
            layer.output.bottleneck.LayerNorm.weight.mul_(400)
    inputs = model.network.example(2, 8)
    with torch.inference_mode():
        hidden = model.network.base(inputs_embeds=model.network.base.get_input_embeddings()(inputs[0]), attention_mask=inputs[1]).last_hidden_state
        assert float(hidden.abs().max()) > torch.finfo(torch.float16).max
        for dtype, finite in ((torch.float16, False), (torch.bfloat16, True)):
            half = checkpoint.load(tmp_path / "checkpoint")
            half.network.load_state_dict(model.network.state_dict())
            (answer,) = half.network.to(dtype)(*inputs)
            assert bool(torch.isfinite(answer).all()) is finite
