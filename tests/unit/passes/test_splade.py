"""SPLADE checkpoints: weights for the ids of the vocabulary, as sentence-transformers computes them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bertopt.core import Context, Eager, Model, Pass
from bertopt.errors import CheckpointWarning, Unsupported
from bertopt.modeling import checkpoint
from bertopt.modeling.float_head import FloatHead
from bertopt.passes import (
    CastHalf,
    ConvertOpenvino,
    ExportOnnx,
    FuseOrt,
    PackSequences,
    QuantizeInt8,
    UseSdpa,
)
from bertopt.sessions import open_session, shipped
from tests.support.exports import Exports
from tests.support.tiny_models import Tiny

KINDS = ("splade", "splade_log1p", "splade_sum", "splade_sum_log1p")
FAMILIES = ("bert", "distilbert", "roberta", "albert", "electra", "mpnet", "modernbert", "deberta-v2", "eurobert", "deberta", "megatron-bert")
NEWER = {
    "transformer_task": "fill-mask", "module_output_name": "token_embeddings",
    "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
}  # fmt: skip


@pytest.fixture
def folder(tiny: Tiny, tmp_path: Path) -> Path:
    """A checkpoint of one's own."""
    return of_kind(tiny, tmp_path, "splade")


def of_kind(tiny: Tiny, tmp_path: Path, kind: str) -> Path:
    return Path(shutil.copytree(tiny("bert", "feature-extraction", kind), tmp_path / "model"))


def edited(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps((json.loads(path.read_text()) if path.is_file() else {}) | fields))


def inputs(model: Model) -> dict[str, np.ndarray]:
    """Rows of 9, 4 and no tokens, and one with a hole."""
    ids = np.random.default_rng(7).integers(5, model.spec.vocabulary, (4, 9))
    mask = np.ones_like(ids)
    mask[1, 4:], mask[2], mask[3, 3:6] = 0, 0, 0
    return model.spec.padded_inputs(ids, mask)


def by_hand(model: Eager, named: dict[str, np.ndarray]) -> np.ndarray:
    """The maximum or the sum over a text's tokens of log(1 + relu(logits)), or of the logarithm of 1 + that, in that order, as
    sentence-transformers' SpladePooling computes it."""
    network: Any = model.network
    tensors = {name: torch.from_numpy(value) for name, value in named.items()}
    with torch.inference_mode():
        logits = network.encoder(**tensors).logits
    weights = torch.log1p(torch.relu(logits * tensors["attention_mask"].unsqueeze(-1)))
    return pooled(weights.numpy(), str(model.spec.pooling))


def pooled(weights: np.ndarray, kind: str) -> np.ndarray:
    weights = np.log1p(weights) if "log1p" in kind else weights
    return weights.sum(axis=1) if "sum" in kind else weights.max(axis=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_of_the_largest_logits(tiny: Tiny, family: str) -> None:
    model = checkpoint.load(tiny(family, "feature-extraction", "splade"))
    assert (model.spec.task, model.spec.pooling, model.spec.sparse) == ("feature-extraction", "splade", True)
    assert model.spec.embedding_size == model.spec.output_size == model.spec.vocabulary
    named = inputs(model)
    got, expected = open_session(model, threads=1).run(named)["sentence_embedding"], by_hand(model, named)
    assert np.abs(got - expected)[[0, 1, 3]].max() < 1e-6
    assert not got[2].any()
    assert 0.05 < float((expected[:2] > 0).mean()) < 0.95, "the floor of relu is never reached, or always"


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_other_kinds_add_tokens_up_or_take_the_logarithm_twice(tiny: Tiny, family: str, kind: str) -> None:
    model = checkpoint.load(tiny(family, "feature-extraction", kind))
    assert (model.spec.task, model.spec.pooling, model.spec.sparse) == ("feature-extraction", kind, True)
    named = inputs(model)
    got, expected = open_session(model, threads=1).run(named)["sentence_embedding"], by_hand(model, named)
    assert np.abs(got - expected)[[0, 1, 3]].max() < 1e-5 and not got[2].any()
    other = by_hand(checkpoint.load(tiny(family, "feature-extraction", "splade")), named)
    assert np.abs(expected - other).max() > 0.1, "the kinds differ"


@pytest.mark.parametrize("kind", ["splade", "splade_sum_log1p"])
@pytest.mark.parametrize(
    ("steps", "error"),
    [
        ([UseSdpa()], 1e-5), ([UseSdpa(), CastHalf(dtype="bfloat16")], 0.05), ([UseSdpa(), ExportOnnx()], 1e-5),
        ([UseSdpa(), ExportOnnx(opset=18), FuseOrt()], 1e-5), ([UseSdpa(), ExportOnnx(), QuantizeInt8()], 0.3),
        ([UseSdpa(), ExportOnnx(), ConvertOpenvino()], 1e-5),
    ],
    ids=["sdpa", "bf16", "onnx", "fused", "int8", "openvino"],
)  # fmt: skip
def test_every_form_gives_the_weights_and_ships_the_logits(
    tiny: Tiny, tmp_path: Path, context: Callable[..., Context], export: Exports, steps: list[Pass[Any, Any]], error: float, kind: str
) -> None:
    reference = checkpoint.load(of_kind(tiny, tmp_path, kind))
    error = error * 5 if "sum" in kind else error  # of nine tokens
    model: Any = reference
    for step in steps:
        model = export.apply(step, model, context()).model
    named = inputs(model)
    session, expected = open_session(model, threads=1), by_hand(reference, named)
    assert np.abs(session.run(named)["sentence_embedding"] - expected).max() < error
    everything = shipped.runner(session, model)(named)
    weights = pooled(np.log1p(np.maximum(everything["logits"] * named["attention_mask"][..., None], 0)), kind)
    assert np.abs(weights - expected).max() < error


def test_a_snapshot_opens_as_the_checkpoint(folder: Path, tmp_path: Path) -> None:
    model, out = checkpoint.load(folder), tmp_path / "out"
    out.mkdir()
    checkpoint.write_snapshot(model, out)
    assert checkpoint.load(out).spec == model.spec == checkpoint.reopen(out, model.spec).spec


def test_what_newer_versions_of_sentence_transformers_write_opens(folder: Path) -> None:
    spec = checkpoint.load(folder).spec
    modules = json.loads((folder / "modules.json").read_text())
    modules[0]["type"] = "sentence_transformers.base.modules.transformer.Transformer"
    modules[1]["type"] = "sentence_transformers.sparse_encoder.modules.splade_pooling.SpladePooling"
    (folder / "modules.json").write_text(json.dumps(modules))
    edited(folder / "sentence_bert_config.json", **NEWER)
    (folder / "1_SpladePooling" / "config.json").write_text(
        json.dumps({"pooling_strategy": "max", "activation_function": "relu", "embedding_dimension": None})
    )
    assert checkpoint.load(folder).spec == spec


def test_without_its_modules_it_is_a_masked_language_model(folder: Path) -> None:
    assert checkpoint.load(folder, "fill-mask").spec.pooling is None
    (folder / "modules.json").unlink()
    spec = checkpoint.load(folder).spec
    assert (spec.task, spec.pooling, spec.sparse) == ("fill-mask", None, False)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("pooling_strategy", "mean", "1_SpladePooling: pooling_strategy must be max or sum; got 'mean'"),
        ("activation_function", "gelu", "1_SpladePooling: activation_function must be relu or log1p_relu; got 'gelu'"),
        ("activation_function", ["relu"], r"1_SpladePooling: activation_function must be relu or log1p_relu; got \['relu'\]"),
    ],
)
def test_other_kinds_are_refused(folder: Path, key: str, value: object, words: str) -> None:
    edited(folder / "1_SpladePooling" / "config.json", **{key: value})
    with pytest.raises(Unsupported, match=words):
        checkpoint.load(folder)


def test_other_modules_beside_it_are_refused(folder: Path, tiny: Tiny) -> None:
    modules = json.loads((folder / "modules.json").read_text())
    several = [
        [*modules, {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}], modules[:1],
        [modules[0], {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}], modules[1:],
    ]  # fmt: skip
    for other in several:
        (folder / "modules.json").write_text(json.dumps(other))
        with pytest.raises(Unsupported, match=r"the order must be Transformer, one Pooling, any Dense, Normalize, or Transformer, SpladePooling; got"):
            checkpoint.load(folder)


def test_a_transformer_that_gives_no_logits_is_refused(folder: Path) -> None:
    modules = json.loads((folder / "modules.json").read_text())
    modules[0]["type"] = "sentence_transformers.models.Transformer"
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(Unsupported, match="transformer_task must be fill-mask; got 'feature-extraction'"):
        checkpoint.load(folder)
    edited(folder / "sentence_bert_config.json", **NEWER | {"modality_config": {"text": {"method": "forward", "method_output_name": "hidden"}}})
    with pytest.raises(Unsupported, match="method_output_name must be logits; got 'hidden'"):
        checkpoint.load(folder)


def test_a_limit_of_active_dimensions_is_named(folder: Path) -> None:
    edited(folder / "config_sentence_transformers.json", max_active_dims=64)
    with pytest.warns(CheckpointWarning, match="dropped max_active_dims 64: an artefact gives all weights"):
        checkpoint.load(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_run_it_says_so(tiny: Tiny, context: Callable[..., Context], kind: str) -> None:
    model = checkpoint.load(tiny("bert", "feature-extraction", kind))
    with pytest.raises(Unsupported, match=f"{kind} pooling of packed rows"):
        PackSequences()(model, context())
    if "sum" in kind:
        with pytest.raises(Unsupported, match=f"the native encoder has no {kind} pooling, only the largest weights; use convert_openvino"):
            FloatHead.of(model.spec, {}, {})
