from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from pydantic import ValidationError

import bertopt
from bertopt import stages
from bertopt.core import Compiled, Context, Eager, Engine, Onnx, OpenVino, Profile, Spec
from bertopt.errors import IntegrityError, UsageError
from bertopt.modeling import checkpoint
from bertopt.modeling.source import sha256
from bertopt.passes import CastHalf, UseSdpa
from bertopt.recipe import texts
from bertopt.recipe.texts import Texts
from bertopt.stages import source_hash
from bertopt.system import environment
from tests.support.tiny_models import Tiny

SPEC = Spec(
    family="bert", task="text-classification", inputs=("input_ids", "attention_mask"), outputs=("logits",), layers=2,
    heads=2, hidden=32, vocabulary=85, token_types=0, pad_id=0, max_length=64, text_length=64,
    labels=("bad", "good"), parameters=1,
)  # fmt: skip
Damage = Callable[[Path], object]


@pytest.fixture
def committed(tmp_path: Path) -> Path:
    """An ONNX stage with a tokenizer, committed."""
    part = tmp_path / ".part-x"
    (part / "onnx").mkdir(parents=True)
    (part / "onnx" / "model.onnx").write_bytes(b"graph" * 100)
    (part / "config.json").write_text("{}")
    model = Onnx(SPEC, "float32", part / "onnx" / "model.onnx")
    stages.write_manifest(part, {"key": "k", **stages.describe(model)})
    stages.commit(part, tmp_path / "final")
    return tmp_path / "final"


def edit_manifest(directory: Path, edit: Callable[[dict[str, Any]], object], sealed: bool = True) -> None:
    """Change the manifest; `sealed`, as somebody would who hashes it again."""
    path = directory / stages.MANIFEST
    fields = json.loads(path.read_text())
    edit(fields)
    text = json.dumps(fields, indent=2, ensure_ascii=False) + "\n"
    if sealed:
        with contextlib.suppress(ValidationError):
            text = stages.Manifest.model_validate(fields).sealed().text()
    path.write_text(text)


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


def change(directory: Path) -> None:
    path = directory / "onnx" / "model.onnx"
    path.write_bytes(b"Graph" + path.read_bytes()[5:])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (change, r"'onnx/model\.onnx' .* is not the file that was exported"),
        (lambda d: (d / "onnx" / "model.onnx").write_bytes(b"graph"), r"'onnx/model\.onnx' .* is not the file"),
        (lambda d: (d / "onnx" / "model.onnx").write_bytes(b""), "is not the file"),
        (lambda d: (d / "config.json").unlink(), r"'config\.json' is missing"),
        (lambda d: (d / "extra.py").write_text(""), r"'extra\.py' .* is not listed"),
        (lambda d: (d / "onnx" / "model.onnx_data").write_text(""), "is not listed"),
        (lambda d: (d / "onnx" / "manifest.json").write_text(""), "'onnx/manifest.json' .* is not listed"),
        (lambda d: [(d / name).write_text("") for name in ("b.py", "a.py")], r"^'a\.py', 'b\.py' in .* are not listed .*; remove them"),
    ],
    ids=["changed", "truncated", "emptied", "missing", "extra", "extra_data", "nested_manifest", "two"],
)
def test_damage_is_found(committed: Path, damage: Damage, words: str) -> None:
    damage(committed)
    with pytest.raises(IntegrityError, match=words):
        stages.verify(committed)


def test_symlinks_are_refused(committed: Path, tmp_path: Path) -> None:
    path = committed / "onnx" / "model.onnx"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(IntegrityError, match=r"onnx/model\.onnx"):
        stages.verify(committed)


def test_symlinked_directories_are_refused(committed: Path, tmp_path: Path) -> None:
    (committed / "onnx").rename(tmp_path / "elsewhere")
    (committed / "onnx").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(IntegrityError, match="onnx"):
        stages.verify(committed)


@pytest.mark.parametrize("name", ["../secret", "onnx/../../secret", "/etc/hostname"])
def test_manifest_cannot_name_files_outside(committed: Path, name: str) -> None:
    (committed.parent / "secret").write_text("s")
    entry = {"sha256": sha256(committed.parent / "secret"), "size": 1}
    edit_manifest(committed, lambda manifest: manifest["files"].update({name: entry}))
    with pytest.raises(IntegrityError, match="lies outside the directory"):
        stages.verify(committed)


@pytest.mark.parametrize("path", ["../other.onnx", "/tmp/other.onnx", "onnx/unlisted.onnx"])
def test_manifest_cannot_open_a_model_it_does_not_list(committed: Path, path: str) -> None:
    edit_manifest(committed, lambda manifest: manifest.update(path=path))
    with pytest.raises(IntegrityError, match="path"):
        stages.open_stage(committed, stages.verify(committed))


@pytest.mark.parametrize("keep", [0, 1, 100, -3])
def test_truncated_manifest(committed: Path, keep: int) -> None:
    path = committed / stages.MANIFEST
    path.write_text(path.read_text()[:keep])
    with pytest.raises(IntegrityError, match=r"is damaged .*export again"):
        stages.verify(committed)


@pytest.mark.parametrize(
    "edit",
    [
        lambda m: m.pop("spec"),
        lambda m: m.update(schema_version=None),
        lambda m: m.update(files=[]),
        lambda m: m["files"].update({"config.json": None}),
        lambda m: m["files"]["config.json"].pop("sha256"),
        lambda m: m["spec"].update(surprise=1),
    ],
    ids=["spec", "schema_version", "files_list", "entry", "sha256", "unknown_field"],
)
def test_damaged_manifest(committed: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    edit_manifest(committed, edit)
    with pytest.raises(IntegrityError, match=r"is damaged .*export again"):
        stages.verify(committed)


@pytest.mark.parametrize("text", ["[]", "null", "3", '"x"'])
def test_manifest_that_is_no_object(committed: Path, text: str) -> None:
    (committed / stages.MANIFEST).write_text(text)
    with pytest.raises(IntegrityError, match="is damaged"):
        stages.verify(committed)


@pytest.mark.parametrize(
    ("version", "words"), [(3, "use a newer bertopt"), (1, "written by an older bertopt: export again")]
)
def test_manifest_of_another_bertopt(committed: Path, version: int, words: str) -> None:
    edit_manifest(committed, lambda manifest: manifest.update(schema_version=version))
    with pytest.raises(IntegrityError, match=f"schema_version must be 2; .*{words}"):
        stages.verify(committed)


def test_a_manifest_of_an_older_version_that_knew_fewer_fields_is_whole(committed: Path) -> None:
    """Fields that a later version adds with a default are in no older manifest, nor in its hash."""
    path = committed / stages.MANIFEST
    fields = json.loads(path.read_text())
    del fields["spec"]["one_row"], fields["manifest_sha256"]
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    path.write_text(json.dumps({**fields, "manifest_sha256": digest}, indent=2, ensure_ascii=False) + "\n")
    assert stages.verify(committed).spec.one_row is False


def test_every_flipped_bit_of_a_manifest_is_refused(committed: Path) -> None:
    path = committed / stages.MANIFEST
    whole = path.read_bytes()
    for place in range(len(whole)):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << (place * 5 % 8)
        path.write_bytes(flipped)
        with pytest.raises(IntegrityError):
            stages.read_manifest(committed)
    path.write_bytes(whole)
    stages.verify(committed)


@pytest.mark.parametrize(
    "edit",
    [
        lambda m: m["spec"].update(labels=["good", "bad"]),
        lambda m: m["spec"].update(text_length=6),
        lambda m: m["spec"].update(pad_id=1),
        lambda m: m["spec"].update(multi_label=True),
        lambda m: m.update(precision="int8"),
        lambda m: m.update(gates={"status": "ok"}),
        lambda m: m.pop("files"),
        lambda m: m.update(changes={"more": 3}),
    ],
)
def test_an_edited_manifest_is_refused_although_it_is_valid(committed: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    edit_manifest(committed, edit, sealed=False)
    with pytest.raises(IntegrityError, match="is not as it was written"):
        stages.read_manifest(committed)
    path = committed / stages.MANIFEST
    path.write_text(path.read_text().replace("  ", " "))
    with pytest.raises(IntegrityError):
        stages.read_manifest(committed)


def test_no_manifest(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"not a bertopt stage or artefact: it has no manifest\.json"):
        stages.verify(tmp_path)


def test_unknown_form(committed: Path) -> None:
    edit_manifest(committed, lambda manifest: manifest.update(form="pickle"))
    with pytest.raises(IntegrityError, match="unknown form 'pickle'"):
        stages.open_stage(committed)


def test_manifest_is_not_a_file_of_its_own_listing(committed: Path) -> None:
    (committed / "onnx" / stages.MANIFEST).write_text("{}")
    fields = stages.read_manifest(committed).model_dump(exclude={"files", "manifest_sha256"})
    manifest = stages.write_manifest(committed, fields)
    assert sorted(manifest.files) == ["config.json", "onnx/manifest.json", "onnx/model.onnx"]


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


def test_an_edit_of_anything_that_a_pass_imports_is_another_source(tmp_path: Path) -> None:
    """Of bertopt's modules and of the user's, also where they are imported inside a function; not of what is installed."""
    own = tmp_path / "own_pass.py"
    own.write_text("import os, torch\nfrom own_helper import scale\ndef late():\n    from own_pack import inner\n")
    (tmp_path / "own_helper.py").write_text("scale = 1\n")
    (tmp_path / "own_pack").mkdir()
    (tmp_path / "own_pack" / "__init__.py").write_text("")
    (tmp_path / "own_pack" / "inner.py").write_text("from . import deeper\n")
    (tmp_path / "own_pack" / "deeper.py").write_text("depth = 1\n")
    (tmp_path / "unrelated.py").write_text("")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        seen = [source_hash.of_files([own])]
        for file, text in (("own_helper.py", "scale = 2\n"), ("own_pack/deeper.py", "depth = 2\n"), ("own_pass.py", "import os\n")):
            (tmp_path / file).write_text(text)
            os.utime(tmp_path / file, ns=(len(seen), len(seen)))
            seen.append(source_hash.of_files([own]))
        (tmp_path / "unrelated.py").write_text("more = 1\n")
        assert source_hash.of_files([own]) == seen[-1]
    assert len(set(seen)) == len(seen)


def test_what_another_environment_installed_is_not_followed(tmp_path: Path) -> None:
    installed = tmp_path / "lib" / "site-packages"
    installed.mkdir(parents=True)
    (installed / "heavy_library.py").write_text("size = 1\n")
    (tmp_path / "own.py").write_text("import heavy_library\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(installed)
        before = source_hash.of_files([tmp_path / "own.py"])
        (installed / "heavy_library.py").write_text("size = 2\n")
        os.utime(installed / "heavy_library.py", ns=(2, 2))
        assert source_hash.of_files([tmp_path / "own.py"]) == before


@pytest.mark.parametrize(
    ("of", "helper"),
    [
        ("passes/quantize_int8.py", "quantization/qdq.py"), ("passes/convert_openvino.py", "quantization/openvino_ptq.py"),
        ("passes/quantize_int8.py", "quantization/calibration_inputs.py"), ("passes/keep_cls_only.py", "modeling/encoder_layers.py"),
        ("modeling/checkpoint.py", "modeling/network.py"),
    ],
)  # fmt: skip
def test_bertopts_own_helpers_are_part_of_a_key(of: str, helper: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = Path(bertopt.__file__).parent
    shutil.copytree(package, tmp_path / "bertopt", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(source_hash, "_PACKAGE", tmp_path / "bertopt")
    before = source_hash.of_package(of)
    with (tmp_path / "bertopt" / helper).open("a") as file:
        file.write("\n# edited\n")
    assert source_hash.of_package(of) != before


# Texts


def written(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_plain_texts(tmp_path: Path) -> None:
    found = texts.read(written(tmp_path / "a.txt", "one\n  two \nथ्री\n"))
    assert found.texts == ("one", "  two ", "थ्री")
    assert found.labels is None
    assert found.source == str(tmp_path / "a.txt")


def test_labelled_texts(tmp_path: Path) -> None:
    lines = ['{"text": "one", "label": "good"}', '{"text": "", "label": 0, "other": [1]}']
    found = texts.read(written(tmp_path / "a.jsonl", "\n".join(lines)))
    assert (found.texts, found.labels) == (("one", ""), ("good", "0"))
    assert found.digest == Texts(("one", ""), ("good", "0"), "elsewhere").digest
    assert found.digest != Texts(("one", "")).digest


def test_a_text_may_hold_any_character_but_a_newline(tmp_path: Path) -> None:
    line = "one\u2028two\x0bthree\x85four"
    assert texts.read(written(tmp_path / "a.txt", line + "\n")).texts == (line,)
    entry = json.dumps({"text": line}, ensure_ascii=False)
    assert texts.read(written(tmp_path / "a.jsonl", entry + "\r\n")).texts == (line,)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", "one\n\nthree\n  \n", ["a.txt:2: the line is empty; remove it", "a.txt:4: the line is empty"]),
        ("a.txt", "", ["a.txt: expected at least one text; the file is empty"]),
        ("a.jsonl", '{"text": "a"}\n{"text": \n', ["a.jsonl:2: expected a JSON object; Expecting value at column 10"]),
        ("a.jsonl", '["a"]\n"b"\n{}\n', ["a.jsonl:1: expected", "a.jsonl:2: expected", "a.jsonl:3: expected"]),
        ("a.jsonl", '{"text": 3}\n{"text": null}', ["a.jsonl:1: text must be text in quotes; got 3", "a.jsonl:2: text must be text in quotes; got null"]),
        ("a.jsonl", '{"text": "a", "label": "x"}\n{"text": "b"}', ["a.jsonl:2: no label, but other lines have one"]),
        ("a.jsonl", '{"text": "a"}\n{"text": "b", "label": "x"}', ["a.jsonl:1: no label, but other lines have one"]),
    ],
)
def test_bad_lines_are_all_named(tmp_path: Path, name: str, content: str, words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        texts.read(written(tmp_path / name, content))
    assert len(caught.value.problems) == len(words)
    for problem, expected in zip(caught.value.problems, words, strict=True):
        assert problem.startswith(f"{tmp_path}/{expected}")


def test_ten_bad_lines_are_enough(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        texts.read(written(tmp_path / "a.jsonl", "x\n" * 25))
    assert len(caught.value.problems) == 11
    assert caught.value.problems[-1] == "and 15 more"


@pytest.mark.parametrize("content", [b"caf\xe9\n", None])
def test_unreadable_texts(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "a.txt"
    if content is not None:
        written(path, content)
    with pytest.raises(UsageError, match=r"cannot be read|expected UTF-8"):
        texts.read(path)


def test_labels_must_be_the_models() -> None:
    wrong = Texts(("a", "b", "c"), ("good", "ugly", "Bad"), "t.jsonl")
    with pytest.raises(UsageError) as caught:
        wrong.check_labels(SPEC)
    assert caught.value.problems == (
        "t.jsonl:2: label must be one of bad, good; got 'ugly'",
        "t.jsonl:3: label must be one of bad, good; got 'Bad'",
    )
    Texts(("a",), ("good",)).check_labels(SPEC)
    Texts(("a",)).check_labels(SPEC)
    wrong.check_labels(SPEC.model_copy(update={"task": "feature-extraction"}))
    with pytest.raises(UsageError, match="and 10 more"):
        Texts(("a",) * 20, ("x",) * 20, "t").check_labels(SPEC)
