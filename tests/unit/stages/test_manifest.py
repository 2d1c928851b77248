"""Manifests: what is damaged, edited or of another version is refused before anything is opened."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from bertopt import stages
from bertopt.errors import IntegrityError, UsageError
from bertopt.modeling.source import sha256

Damage = Callable[[Path], object]


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


def test_a_manifest_that_is_no_file_is_named(committed: Path) -> None:
    """The directory was taken for a checkpoint, of which to make an artefact."""
    (committed / "manifest.json").unlink()
    (committed / "manifest.json").symlink_to("elsewhere")
    with pytest.raises(UsageError, match=r"manifest\.json' must be a file; got a link to nothing: copy the files themselves, as `cp -rL` does"):
        stages.read_manifest(committed)
    (committed / "manifest.json").unlink()
    (committed / "manifest.json").mkdir()
    with pytest.raises(UsageError, match=r"manifest\.json' must be a file; got a directory: export again"):
        stages.read_manifest(committed)


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


def test_a_path_that_may_not_be_looked_up_is_not_called_missing(tmp_path: Path) -> None:
    """As one without permission is: Python 3.14's pathlib says that nothing is there."""
    with pytest.raises(OSError, match="File name too long"):
        stages.read_manifest(tmp_path / ("x" * 300))


def test_unknown_form(committed: Path) -> None:
    edit_manifest(committed, lambda manifest: manifest.update(form="pickle"))
    with pytest.raises(IntegrityError, match="unknown form 'pickle'"):
        stages.open_stage(committed)


def test_manifest_is_not_a_file_of_its_own_listing(committed: Path) -> None:
    (committed / "onnx" / stages.MANIFEST).write_text("{}")
    fields = stages.read_manifest(committed).model_dump(exclude={"files", "manifest_sha256"})
    manifest = stages.write_manifest(committed, fields)
    assert sorted(manifest.files) == ["config.json", "onnx/manifest.json", "onnx/model.onnx"]
