from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bertopt import stages
from bertopt.core import Compiled, Context, Eager, Engine, Onnx, OpenVino, Profile, Spec
from bertopt.errors import IntegrityError, UsageError
from bertopt.modeling import checkpoint
from bertopt.passes import CastHalf, UseSdpa
from bertopt.recipe import texts
from bertopt.recipe.texts import Texts
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
    stages.write_manifest(part, {"key": "k", **stages.describe(model, part)})
    stages.commit(part, tmp_path / "final")
    return tmp_path / "final"


def edit_manifest(directory: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    path = directory / stages.MANIFEST
    manifest = json.loads(path.read_text())
    edit(manifest)
    path.write_text(json.dumps(manifest))


def test_commit_is_one_rename(committed: Path) -> None:
    assert [path.name for path in committed.parent.iterdir()] == ["final"]
    manifest = stages.verify(committed)
    assert sorted(manifest["files"]) == ["config.json", "onnx/model.onnx"]
    assert stages.size_bytes(manifest) == 502
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
    ],
    ids=["changed", "truncated", "emptied", "missing", "extra", "extra_data", "nested_manifest"],
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
    entry = {"sha256": stages.sha256(committed.parent / "secret"), "size": 1}
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
        lambda m: m.pop("schema_version"),
        lambda m: m.pop("files"),
        lambda m: m.update(files=[]),
        lambda m: m["files"].update({"config.json": None}),
        lambda m: m["files"]["config.json"].pop("sha256"),
        lambda m: m["spec"].update(surprise=1),
    ],
    ids=["spec", "schema_version", "files", "files_list", "entry", "sha256", "unknown_field"],
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


def test_manifest_of_a_newer_bertopt(committed: Path) -> None:
    edit_manifest(committed, lambda manifest: manifest.update(schema_version=2))
    with pytest.raises(IntegrityError, match="schema_version must be 1; got 2; use a newer bertopt"):
        stages.verify(committed)


def test_no_manifest(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no bertopt stage or artefact: it has no manifest\.json"):
        stages.verify(tmp_path)


def test_unknown_form(committed: Path) -> None:
    edit_manifest(committed, lambda manifest: manifest.update(form="pickle"))
    with pytest.raises(IntegrityError, match="unknown form 'pickle'"):
        stages.open_stage(committed)


def test_manifest_is_not_a_file_of_its_own_listing(committed: Path) -> None:
    (committed / "onnx" / stages.MANIFEST).write_text("{}")
    manifest = stages.write_manifest(committed, {"key": "k"})
    assert sorted(manifest["files"]) == ["config.json", "onnx/manifest.json", "onnx/model.onnx"]


# Forms


def test_files_of_other_forms_come_and_go(committed: Path, tmp_path: Path) -> None:
    made, out = tmp_path / "made", tmp_path / "out"
    (made / "engines" / "tensorrt-10_sm86").mkdir(parents=True)
    (made / "openvino").mkdir()
    for name in ("engines/tensorrt-10_sm86/model.plan", "openvino/model.xml", "openvino/model.bin"):
        (made / name).write_text(name)
    profiles = (Profile(opt=(4, 32), max=(8, 64)), Profile(min=(8, 1), opt=(16, 64), max=(32, 64)))
    plan = made / "engines" / "tensorrt-10_sm86" / "model.plan"
    engine = Engine(SPEC, "float16", plan, "tensorrt", "10.8", ("sm86",), profiles)
    for model in (engine, OpenVino(SPEC, "int8", made / "openvino" / "model.xml")):
        directory = out / model.form
        directory.mkdir(parents=True)
        stages.inherit(committed, directory)
        assert [path.name for path in directory.iterdir()] == ["config.json"]
        stages.write_form(model, directory)
        stages.write_manifest(directory, stages.describe(model, directory))
        opened = stages.open_stage(directory, stages.verify(directory))
        assert isinstance(opened, Engine | OpenVino)
        assert opened.path.read_text() == str(opened.path.relative_to(directory))
        assert opened.path.parent != model.path.parent
        assert opened.shapes == model.shapes
    assert (out / "openvino" / "openvino" / "model.bin").read_text() == "openvino/model.bin"


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
    stages.write_manifest(out, stages.describe(model, out))
    opened = stages.open_stage(out, stages.verify(out))
    assert isinstance(opened, Eager)
    assert (opened.rewrites, opened.precision, opened.spec) == (model.rewrites, "bfloat16", model.spec)
    example = model.network.example(3, 9)
    with torch.inference_mode():
        given, expected, plain = (m.network(*example)[0] for m in (opened, model, reference))
    assert torch.allclose(given, expected, atol=1e-3)
    assert (given - plain).abs().max() > 2 * (given - expected).abs().max()
    assert not list(out.rglob("*.bin"))


def test_compiled_form_is_kept(tiny: Tiny, tmp_path: Path) -> None:
    reference = checkpoint.load(tiny("bert"))
    checkpoint.write_snapshot(reference, tmp_path)
    model = Compiled(reference.spec, "float32", reference.checkpoint, reference.network, ())
    stages.write_form(model, tmp_path)
    stages.write_manifest(tmp_path, stages.describe(model, tmp_path))
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
        ("a.jsonl", '{"text": 3}\n{"text": null}', ["a.jsonl:1: expected", "a.jsonl:2: expected"]),
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
