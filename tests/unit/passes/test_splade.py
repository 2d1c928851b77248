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
from tests.support.tiny_models import Tiny

FAMILIES = ("bert", "distilbert", "roberta", "albert", "electra", "mpnet", "modernbert", "deberta-v2", "eurobert")
NEWER = {
    "transformer_task": "fill-mask", "module_output_name": "token_embeddings",
    "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
}  # fmt: skip


@pytest.fixture
def folder(tiny: Tiny, tmp_path: Path) -> Path:
    """A checkpoint of one's own."""
    return Path(shutil.copytree(tiny("bert", "feature-extraction", "splade"), tmp_path / "model"))


def edited(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps((json.loads(path.read_text()) if path.is_file() else {}) | fields))


def inputs(model: Model) -> dict[str, np.ndarray]:
    """Rows of 9, 4 and no tokens, and one with a hole."""
    ids = np.random.default_rng(7).integers(5, model.spec.vocabulary, (4, 9))
    mask = np.ones_like(ids)
    mask[1, 4:], mask[2], mask[3, 3:6] = 0, 0, 0
    return model.spec.padded_inputs(ids, mask)


def by_hand(model: Eager, named: dict[str, np.ndarray]) -> np.ndarray:
    """The maximum over a text's tokens of log(1 + relu(logits)), in that order, as sentence-transformers' SpladePooling computes it."""
    network: Any = model.network
    tensors = {name: torch.from_numpy(value) for name, value in named.items()}
    with torch.inference_mode():
        logits = network.encoder(**tensors).logits
    weights = torch.log1p(torch.relu(logits * tensors["attention_mask"].unsqueeze(-1)))
    return weights.max(dim=1).values.numpy()


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
    folder: Path, context: Callable[..., Context], steps: list[Pass[Any, Any]], error: float
) -> None:
    reference = checkpoint.load(folder)
    model: Any = reference
    for step in steps:
        model = step(model, context()).model
    named = inputs(model)
    session, expected = open_session(model, threads=1), by_hand(reference, named)
    assert np.abs(session.run(named)["sentence_embedding"] - expected).max() < error
    everything = shipped.runner(session, model)(named)
    weights = np.log1p(np.maximum(everything["logits"] * named["attention_mask"][..., None], 0)).max(axis=1)
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
        ("pooling_strategy", "sum", "1_SpladePooling: pooling_strategy must be max; got 'sum'"),
        ("activation_function", "log1p_relu", "1_SpladePooling: activation_function must be relu; got 'log1p_relu'"),
    ],
)
def test_other_kinds_are_refused(folder: Path, key: str, value: str, words: str) -> None:
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


def test_what_cannot_run_it_says_so(folder: Path, context: Callable[..., Context]) -> None:
    with pytest.raises(Unsupported, match="splade pooling of packed rows"):
        PackSequences()(checkpoint.load(folder), context())
