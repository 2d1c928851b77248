"""What was hashed is what is read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bertopt
from bertopt import stages
from bertopt.core import Context
from bertopt.errors import IntegrityError, UsageError
from bertopt.modeling import checkpoint
from bertopt.passes import ConvertOpenvino
from bertopt.runtime import load as loading
from bertopt.stages import opening
from tests.support.exports import Exports
from tests.support.tiny_models import Tiny

TEXTS = ["the cat sat", "a very good film", "not bad !"]
FILES = {
    "eager": ("model.safetensors", "tokenizer.json", "config.json"),
    "onnx": ("onnx/model.onnx", "tokenizer.json"),
    "openvino": ("openvino/openvino_model.bin", "tokenizer.json"),
}
Make = Callable[[str, int], Path]


@pytest.fixture(scope="module")
def artifacts(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory, export: Exports) -> Make:
    """The artefact of a form, of one of two checkpoints that differ in their weights."""
    folder = tmp_path_factory.mktemp("artifacts")

    def make(form: str, seed: int) -> Path:
        out = folder / f"{form}-{seed}"
        if out.is_dir():
            return out
        if form == "openvino":
            pytest.importorskip("openvino")
        with checkpoint.quiet():
            model: Any = checkpoint.load(tiny("bert", "feature-extraction", "mean", seed=seed))
            (folder / f"work-{form}-{seed}" / "ir").mkdir(parents=True)
            out.mkdir()
            checkpoint.write_snapshot(model, out)
            if form != "eager":
                model = export(model, Context(folder / f"work-{form}-{seed}"))
            if form == "openvino":
                model = ConvertOpenvino()(model, Context(folder / f"work-{form}-{seed}" / "ir")).model
        stages.write_form(model, out)
        stages.write_manifest(out, {"device": "cpu", "passes": [], **stages.describe(model)})
        return out

    return make


@pytest.mark.parametrize("form", list(FILES))
def test_a_path_that_is_not_utf8(form: str, artifacts: Make, tmp_path: Path) -> None:
    """Some libraries open such a path; what others raised for it was a traceback, or said that the file was damaged."""
    place = shutil.copytree(artifacts(form, 0), tmp_path / os.fsdecode(b"caf\xe9"))
    with pytest.raises(UsageError, match=r"must be a path in UTF-8, .*; got b'.*caf\\xe9': rename it"), opening.opening(place):
        pass


def swapping(artifact: Path, other: Path, name: str, back: bool) -> Callable[..., Any]:
    """`open_stage`, but the file is another one from the moment before; `back`: the old one returns after the load."""
    real = stages.open_stage

    def swapped(directory: Path, manifest: Any) -> Any:
        aside = artifact.parent / "aside"
        (artifact / name).rename(aside)
        shutil.copyfile(other / name, artifact / name)
        if name == "tokenizer.json":
            text = (artifact / name).read_text()
            (artifact / name).write_text(text.replace('"cat"', '"dig"'))
        try:
            return real(directory, manifest)
        finally:
            if back:
                aside.rename(artifact / name)

    return swapped


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize(("form", "name"), [(form, name) for form, names in FILES.items() for name in names])
def test_a_file_swapped_between_hash_and_open_is_refused(
    artifacts: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, name: str, back: bool
) -> None:
    artifact = tmp_path / "artifact"
    shutil.copytree(artifacts(form, 0), artifact)
    monkeypatch.setattr(opening, "_others_may_write", lambda _: False)
    monkeypatch.setattr(loading.stages, "open_stage", swapping(artifact, artifacts(form, 1), name, back))
    with pytest.raises(IntegrityError, match="was changed while"):
        bertopt.load(artifact)


@pytest.mark.parametrize(("form", "name"), [(form, name) for form, names in FILES.items() for name in names])
def test_where_others_may_write_a_copy_is_read(
    artifacts: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, name: str
) -> None:
    expected = bertopt.load(artifacts(form, 0))(TEXTS)
    artifact = tmp_path / "artifact"
    shutil.copytree(artifacts(form, 0), artifact)
    artifact.chmod(0o777)
    monkeypatch.setattr(loading.stages, "open_stage", swapping(artifact, artifacts(form, 1), name, False))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    predictor = bertopt.load(artifact)
    assert np.array_equal(predictor(TEXTS), expected)
    assert len(list(tmp_path.glob("bertopt-*"))) == 1
    assert np.array_equal(predictor(TEXTS[:1]), bertopt.load(artifacts(form, 0))(TEXTS[:1]))  # a model compiled later
    del predictor
    assert not list(tmp_path.glob("bertopt-*"))


def test_what_is_refused_leaves_no_copy(artifacts: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = tmp_path / "artifact"
    shutil.copytree(artifacts("onnx", 0), artifact)
    (artifact / "config.json").write_text("{}")
    artifact.chmod(0o777)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(IntegrityError, match="is not the file that was exported"):
        bertopt.load(artifact)
    assert not list(tmp_path.glob("bertopt-*"))


@pytest.mark.parametrize(
    ("place", "mode", "expected"),
    [("artifact", 0o755, False), ("artifact", 0o777, True), ("artifact/f", 0o666, True), ("artifact/f", 0o644, False),
     (".", 0o777, True), (".", 0o1777, False)],
)  # fmt: skip
def test_who_may_write(tmp_path: Path, place: str, mode: int, expected: bool) -> None:
    home = tmp_path / "home"
    (home / "artifact").mkdir(parents=True)
    (home / "artifact" / "f").write_text("x")
    for path in (home, home / "artifact"):
        path.chmod(0o755)
    (home / "artifact" / "f").chmod(0o644)
    (home / place).chmod(mode)
    assert opening._others_may_write(home / "artifact") is expected


@pytest.mark.parametrize("path", ["nowhere", "a\0b", "x" * 5000])
def test_a_path_that_cannot_be_opened_is_a_usage_error_of_a_fair_length(path: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot be opened .*; give the directory of a stage or artefact") as raised, opening.opening(tmp_path / path):
        pass
    assert len(str(raised.value)) < 1000


def test_a_file_removed_while_files_are_listed_is_a_change(artifacts: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy, real = shutil.copytree(artifacts("eager", 0), tmp_path / "copy"), Path.rglob
    with pytest.raises(IntegrityError, match="was changed while"), opening.opening(copy):

        def listed(self: Path, pattern: str) -> list[Path]:
            found = list(real(self, pattern))
            (copy / "tokenizer.json").unlink(missing_ok=True)
            return found

        monkeypatch.setattr(Path, "rglob", listed)


def test_a_directory_that_is_gone_has_no_stamps(tmp_path: Path) -> None:
    assert opening._stamps(tmp_path / "gone") == {}


def test_a_directory_that_is_replaced_is_named(artifacts: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, other = (shutil.copytree(artifacts("eager", 0), tmp_path / name) for name in ("there", "other"))
    monkeypatch.setattr(opening, "_others_may_write", lambda _: False)
    with pytest.raises(IntegrityError, match=r"^'[^']*/there(/[^.']+[^']*)?' was changed while the artefact was loaded"), opening.opening(there):
        there.rename(tmp_path / "gone")
        other.rename(there)
