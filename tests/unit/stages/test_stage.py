"""Stages: commits, the forms that are written and opened, and keys."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from bertopt import stages
from bertopt.core import Compiled, Context, Eager, Engine, Onnx, OpenVino, Profile
from bertopt.modeling import checkpoint
from bertopt.modeling.source import sha256
from bertopt.passes import CastHalf, UseSdpa
from bertopt.system import environment
from tests.support.specs import TWO_LABELS as SPEC
from tests.support.tiny_models import Tiny


def test_commit_is_one_rename(committed: Path) -> None:
    assert [path.name for path in committed.parent.iterdir()] == ["final"]
    manifest = stages.verify(committed)
    assert sorted(manifest.files) == ["config.json", "onnx/model.onnx"]
    assert manifest.size_bytes == 502
    assert stages.open_stage(committed) == Onnx(SPEC, "float32", committed / "onnx" / "model.onnx")


def test_commit_replaces_what_was_there(committed: Path, tmp_path: Path) -> None:
    part = tmp_path / ".part-y"
    part.mkdir()
    (part / "new").write_text("new")
    stages.commit(part, committed)
    assert [path.name for path in committed.iterdir()] == ["new"]


def test_a_crash_before_the_rename_leaves_nothing(committed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = committed.parent / ".part-y"
    part.mkdir()

    def crash(_: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(stages, "sync", crash)
    with pytest.raises(OSError, match="disk full"):
        stages.commit(part, committed)
    stages.verify(committed)


# Forms


def test_files_of_other_forms_come_and_go(committed: Path, tmp_path: Path) -> None:
    made, out = tmp_path / "made", tmp_path / "out"
    (made / "engines" / "tensorrt-10_sm86").mkdir(parents=True)
    (made / "openvino").mkdir()
    for name in ("engines/tensorrt-10_sm86/model.plan", "openvino/openvino_model.xml", "openvino/openvino_model.bin"):
        (made / name).write_text(name)
    profiles = (Profile(opt=(4, 32), max=(8, 64)), Profile(min=(8, 1), opt=(16, 64), max=(32, 64)))
    plan = made / "engines" / "tensorrt-10_sm86" / "model.plan"
    engine = Engine(SPEC, "float16", plan, "tensorrt", "10.8", ("sm86",), profiles, sha256(plan))
    for model in (engine, OpenVino(SPEC, "int8", made / "openvino" / "openvino_model.xml")):
        directory = out / model.form
        directory.mkdir(parents=True)
        stages.inherit(committed, directory)
        assert [path.name for path in directory.iterdir()] == ["config.json"]
        stages.write_form(model, directory)
        stages.write_manifest(directory, stages.describe(model))
        opened = stages.open_stage(directory, stages.verify(directory))
        assert isinstance(opened, Engine | OpenVino)
        assert opened.path.read_text() == str(opened.path.relative_to(directory))
        assert opened.path.parent != model.path.parent
        assert opened.shapes == model.shapes
    assert (out / "openvino" / "openvino" / "openvino_model.bin").read_text() == "openvino/openvino_model.bin"


def test_replayed_rewrites_answer_alike(tiny: Tiny, tmp_path: Path) -> None:
    reference = checkpoint.load(tiny("bert"))
    context = Context(tmp_path)
    model = CastHalf()(UseSdpa()(reference, context).model, context).model
    parent, out = tmp_path / "parent", tmp_path / "out"
    parent.mkdir()
    out.mkdir()
    checkpoint.write_snapshot(reference, parent)
    stages.inherit(parent, out)
    stages.write_form(model, out)
    stages.write_manifest(out, stages.describe(model))
    opened = stages.open_stage(out, stages.verify(out))
    assert isinstance(opened, Eager)
    assert (opened.rewrites, opened.precision, opened.spec) == (model.rewrites, "bfloat16", model.spec)
    example = model.network.example(3, 9)
    with torch.inference_mode():
        given, expected, plain = (m.network(*example)[0] for m in (opened, model, reference))
    assert torch.allclose(given, expected, atol=1e-3)
    assert (given - plain).abs().max() > 2 * (given - expected).abs().max()
    assert not list(out.rglob("*.bin"))


@pytest.mark.parametrize("how", ["links", "copies"])
def test_a_sharded_checkpoint_goes_through_eager_passes(tiny: Tiny, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForSequenceClassification

    if how == "copies":  # where directories lie on different file systems
        monkeypatch.setattr("os.link", Mock(side_effect=OSError("no links")))
    source, parent, out = (tmp_path / name for name in ("source", "parent", "out"))
    shutil.copytree(tiny("bert"), source)
    AutoModelForSequenceClassification.from_pretrained(source).save_pretrained(source, max_shard_size="30KB")
    (source / "model.safetensors").unlink()
    shards = {path.name for path in source.glob("model-*.safetensors")}
    assert len(shards) > 2
    parent.mkdir()
    out.mkdir()
    checkpoint.write_snapshot(checkpoint.load(source), parent)
    model = UseSdpa()(checkpoint.open_directory(parent), Context(out)).model
    stages.inherit(parent, out)
    stages.write_form(model, out)
    stages.write_manifest(out, stages.describe(model))
    opened = stages.open_stage(out, stages.verify(out))
    assert isinstance(opened, Eager) and {path.name for path in out.glob("model-*.safetensors")} == shards
    example = opened.network.example(2, 7)
    with torch.inference_mode():
        assert torch.equal(opened.network(*example)[0], model.network(*example)[0])


def test_a_pass_may_write_the_weights_itself(tiny: Tiny, tmp_path: Path) -> None:
    """`model.safetensors` in the working directory, which is the stage's, returned as its checkpoint."""
    from safetensors.torch import save_file

    reference = checkpoint.load(tiny("bert"))
    parent, out = tmp_path / "parent", tmp_path / "out"
    parent.mkdir()
    out.mkdir()
    checkpoint.write_snapshot(reference, parent)
    weights = {name: tensor.clone() for name, tensor in reference.network.encoder.state_dict().items()}
    weights["classifier.bias"] += 1
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    model = replace(reference, checkpoint=out)
    stages.inherit(parent, out)
    stages.write_form(model, out)
    stages.write_manifest(out, stages.describe(model))
    opened = stages.open_stage(out, stages.verify(out))
    assert isinstance(opened, Eager)
    difference = opened.network.encoder.classifier.bias - reference.network.encoder.classifier.bias
    assert torch.allclose(difference, torch.ones(()))


def test_compiled_form_is_kept(tiny: Tiny, tmp_path: Path) -> None:
    reference = checkpoint.load(tiny("bert"))
    checkpoint.write_snapshot(reference, tmp_path)
    model = Compiled(reference.spec, "float32", reference.checkpoint, reference.network, ())
    stages.write_form(model, tmp_path)
    stages.write_manifest(tmp_path, stages.describe(model))
    assert isinstance(stages.open_stage(tmp_path), Compiled)


# Keys


def test_key_is_that_of_everything_that_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [(1, 16)]
    keys = [
        stages.key("p", CastHalf().record(), "cpu", shapes, "t"),
        stages.key("q", CastHalf().record(), "cpu", shapes, "t"),
        stages.key("p", None, "cpu", shapes, "t"),
        stages.key("p", UseSdpa().record(), "cpu", shapes, "t"),
        stages.key("p", CastHalf(mode="autocast").record(), "cpu", shapes, "t"),
        stages.key("p", CastHalf().record(), "cuda", shapes, "t"),
        stages.key("p", CastHalf().record(), "cpu", [(1, 17)], "t"),
        stages.key("p", CastHalf().record(), "cpu", shapes, "u"),
    ]
    assert stages.key("p", CastHalf(mode="cast").record(), "cpu", [[1, 16]], "t") == keys[0]
    monkeypatch.setattr(environment, "versions", lambda: {"torch": "0.0"})
    keys.append(stages.key("p", CastHalf().record(), "cpu", shapes, "t"))
    monkeypatch.setattr(stages, "_source_hash", lambda _: "edited")
    keys.append(stages.key("p", CastHalf().record(), "cpu", shapes, "t"))
    assert len(set(keys)) == len(keys)
