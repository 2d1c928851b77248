"""Families with positions from a table whose norms are of what attention and feed-forward read: nothing normalises the residual stream."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bertopt import stages
from bertopt.core import Context, RuntimeFacts
from bertopt.errors import IntegrityError, Unsupported, UsageError
from bertopt.modeling import checkpoint, encoder_layers
from bertopt.passes import CastHalf, FuseOrt, KeepClsOnly, MergeQkv, PackSequences, UseSdpa
from tests.support.built import apply_passes
from tests.support.forms import assert_answers_of_the_checkpoint, forms
from tests.support.tiny_models import NORM_FIRST_FAMILIES, Tiny, write_tiny

SDPA = UseSdpa()


@pytest.mark.parametrize("task", ["text-classification"])
@pytest.mark.parametrize("family", NORM_FIRST_FAMILIES)
def test_every_form_answers_as_the_checkpoint(tiny: Tiny, tmp_path: Path, family: str, task: str) -> None:
    directory = tiny(family, task)
    (tmp_path / "fused").mkdir()
    faster, onnx, openvino = forms(directory, tmp_path)
    fused = FuseOrt()(onnx, Context(tmp_path / "fused")).model
    packed = [apply_passes(checkpoint.load(directory), *steps, tmp_path=tmp_path) for steps in ((PackSequences(row_length=64),), (PackSequences(attention="varlen"),))]
    assert_answers_of_the_checkpoint([faster, onnx, fused, openvino, *packed], directory)


@pytest.mark.parametrize("family", NORM_FIRST_FAMILIES)
def test_layers_matter_beside_the_embeddings(tiny: Tiny, family: str) -> None:
    """The residual stream is their sum: of a layer that adds little, little of what is wrong with it would show."""
    network: Any = checkpoint.load(tiny(family)).network
    added: list[float] = []
    for layer in encoder_layers.distinct(network.base):
        layer.register_forward_hook(lambda _, given, got: added.append(_size(got) / _size(given)))
    network.run_example(3, 12)
    assert len(added) == 2 and min(added) > 1.2, added


def _size(stream: Any) -> float:
    return float(stream[0].std()) if isinstance(stream, tuple) else float(stream.std())


@pytest.mark.parametrize("steps", [(SDPA,), (KeepClsOnly(), MergeQkv(), SDPA), (SDPA, CastHalf())], ids=str)
def test_attention_of_megatron_runs_through_sdpa(tiny: Tiny, tmp_path: Path, steps: tuple[Any, ...]) -> None:
    """transformers' own cannot be exchanged: bertopt's takes its place, in the stage that is opened again too."""
    reference = checkpoint.load(tiny("megatron-bert"))
    assert not reference.network.encoder._supports_sdpa
    model = apply_passes(reference, *steps, tmp_path=tmp_path)
    assert SDPA.effects(model, RuntimeFacts()) == {"attention calls": (2, 2)}
    parent, out = tmp_path / "parent", tmp_path / "stage"
    parent.mkdir()
    out.mkdir()
    checkpoint.write_snapshot(reference, parent)
    stages.inherit(parent, out)
    stages.write_form(model, out)
    stages.write_manifest(out, {"key": "k", **stages.describe(model)})
    again: Any = stages.open_stage(out)
    assert SDPA.effects(again, RuntimeFacts()) == {"attention calls": (2, 2)}
    inputs = model.network.example(3, 9)
    with torch.inference_mode():
        assert torch.equal(again.network(*inputs)[0], model.network(*inputs)[0])


@pytest.mark.parametrize("family", NORM_FIRST_FAMILIES)
def test_the_norm_behind_all_layers_follows_the_layer_that_is_taken_out(tiny: Tiny, tmp_path: Path, family: str) -> None:
    reference = checkpoint.load(tiny(family, "feature-extraction", "cls"))
    model: Any = apply_passes(reference, KeepClsOnly(), tmp_path=tmp_path)
    norm = getattr(model.network.base, encoder_layers.parts_of(model.network.base.config).stack).last_norm
    calls: list[tuple[int, ...]] = []
    norm.register_forward_hook(lambda _, given, __: calls.append(tuple(given[0].shape)))
    model.network.run_example(2, 6)
    assert calls == [(2, 1, 32)], "once, for one token of each text"


def renamed(directory: Path, out: Path, change: Any, **fields: Any) -> Path:
    """The checkpoint with other names of tensors, or more of them."""
    shutil.copytree(directory, out)
    weights = change(load_file(out / "model.safetensors"))
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, **fields}))
    return out


@pytest.mark.parametrize("task", ["text-classification", "fill-mask"])
@pytest.mark.parametrize("family", NORM_FIRST_FAMILIES)
def test_files_as_older_versions_wrote_them(tiny: Tiny, tmp_path: Path, family: str, task: str) -> None:
    """With positions in a buffer, other heads, and fields of generators."""
    def older(weights: dict[str, Any]) -> dict[str, Any]:
        prefix = next(iter(sorted(name for name in weights if ".embeddings." in name))).partition(".embeddings.")[0]
        more = {f"{prefix}.embeddings.position_ids": torch.arange(64)[None], "cls.seq_relationship.weight": torch.ones(2, 32), f"{prefix}.pooler.dense.bias": torch.ones(32)}
        return {**more, **weights}

    directory = renamed(tiny(family, task), tmp_path / "older", older, position_embedding_type="absolute", use_cache=True, gradient_checkpointing=False, tokenizer_type="BertWordPieceLowerCase")
    model, plain = checkpoint.load(directory), checkpoint.load(tiny(family, task))
    inputs = model.network.example(3, 9)
    with torch.inference_mode():
        assert torch.equal(model.network(*inputs)[0], plain.network(*inputs)[0])


@pytest.mark.parametrize("family", NORM_FIRST_FAMILIES)
def test_what_transformers_would_leave_out_is_refused(tiny: Tiny, tmp_path: Path, family: str) -> None:
    """Relative positions, a decoder, and the checkpoint of a family whose norms follow."""
    def with_distances(weights: dict[str, Any]) -> dict[str, Any]:
        layer = next(name.partition("attention.self.query.weight")[0] for name in weights if name.endswith("attention.self.query.weight"))
        return {**weights, f"{layer}attention.self.distance_embedding.weight": torch.ones(127, 16)}

    with pytest.raises(Unsupported, match=r"relative positions \(position_embedding_type: relative_key\)"):
        checkpoint.load(renamed(tiny(family), tmp_path / "relative", with_distances, position_embedding_type="relative_key"))
    with pytest.raises(UsageError, match="encoders only"):
        checkpoint.load(renamed(tiny(family), tmp_path / "decoder", dict, is_decoder=True))
    other = "bert" if family == "megatron-bert" else "roberta"
    with pytest.raises(IntegrityError, match="is missing from the checkpoint"):
        checkpoint.load(renamed(tiny(other), tmp_path / "other", dict, model_type=family))
    with pytest.raises(IntegrityError, match="is missing from the checkpoint"):
        checkpoint.load(renamed(tiny(family), tmp_path / "last", dict, model_type=other))


@pytest.mark.parametrize("family", NORM_FIRST_FAMILIES)
def test_a_row_without_tokens_is_finite_and_changes_no_other(tmp_path: Path, family: str) -> None:
    model = checkpoint.load(write_tiny(tmp_path / "model", family))
    inputs = dict(zip(model.spec.inputs, model.network.example(3, 9), strict=True))
    with torch.inference_mode():
        (wanted,) = model.network(*inputs.values())
        inputs["attention_mask"][1] = 0
        (got,) = model.network(*inputs.values())
    assert torch.isfinite(got).all() and torch.allclose(got[[0, 2]], wanted[[0, 2]], atol=1e-6)
