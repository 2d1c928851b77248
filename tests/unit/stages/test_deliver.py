"""What a delivered copy may become while it is run for the last time: nothing."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from bertopt import stages
from bertopt.errors import IntegrityError, UsageError
from bertopt.stages import artifact
from tests.support.specs import spec
from tests.unit.stages.test_model_card import row

RECIPE = {"model": "org/name", "inputs": {"texts": None}}


def stage(directory: Path) -> Path:
    (directory / "onnx").mkdir(parents=True)
    (directory / "onnx" / "model.onnx").write_bytes(b"weights")
    described = {"form": "onnx", "precision": "int8", "spec": spec("feature-extraction", pooling="mean").model_dump(mode="json"), "path": "onnx/model.onnx"}
    stages.write_manifest(directory, described)
    return directory


def change(part: Path) -> None:
    (part / "onnx" / "model.onnx").write_bytes(b"wEights")


def add(part: Path) -> None:
    (part / "onnx" / "cache.bin").write_bytes(b"compiled")


@pytest.mark.parametrize("write", [change, add])
@pytest.mark.parametrize("answers", [None, [[[1.0]]]])
def test_what_opens_the_copy_may_not_write_into_it(tmp_path: Path, write: Callable[[Path], None], answers: object) -> None:
    """A copy that changed after it was verified was delivered: the manifest was written anew over it."""

    def run(part: Path) -> object:
        write(part)
        return answers

    with pytest.raises(IntegrityError):
        artifact.deliver(row("onnx"), stage(tmp_path / "stage"), RECIPE, tmp_path, run)
    assert not (tmp_path / "artifact").exists() and not (tmp_path / ".artifact.part").exists()


def test_a_copy_that_stays_as_it_is_is_delivered_with_its_answers(tmp_path: Path) -> None:
    delivered = artifact.deliver(row("onnx"), stage(tmp_path / "stage"), RECIPE, tmp_path, lambda part: [[[1.0]]])
    assert stages.verify(delivered).answers == [[[1.0]]]


def as_overlayfs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let directories named `artifact` not be renamed, nor exchanged, as overlayfs has it for those of an image's layer."""
    rename = Path.rename

    def refused(path: Path, target: Path) -> Path:
        if path.name == "artifact":
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refused)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace(renameat2=lambda *_: -1))


def test_an_artefact_of_an_images_layer_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended with exit code 2: Invalid cross-device link."""
    source = stage(tmp_path / "stage")
    artifact.deliver(row("onnx"), source, RECIPE, tmp_path, lambda part: [[[1.0]]])
    as_overlayfs(monkeypatch)
    delivered = artifact.deliver(row("onnx"), source, RECIPE, tmp_path, lambda part: [[[2.0]]])
    assert stages.verify(delivered).answers == [[[2.0]]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["artifact", "stage"]


@pytest.mark.parametrize("step", ["_copy", "rmtree", "part.rename"])
def test_a_kill_while_it_is_replaced_there_keeps_the_old_artefact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    source = stage(tmp_path / "stage")
    artifact.deliver(row("onnx"), source, RECIPE, tmp_path, lambda part: [[[1.0]]])
    part, final, old = tmp_path / ".artifact.part", tmp_path / "artifact", tmp_path / ".artifact.old"
    shutil.copytree(final, part)
    as_overlayfs(monkeypatch)
    copy, remove, rename = artifact._copy, shutil.rmtree, Path.rename

    def killed_in_copy(source: Path, target: Path) -> None:
        copy(source / "onnx", target / "onnx")
        raise SystemExit

    def killed_in_removal(path: Path, ignore_errors: bool = False) -> None:
        if path == final:
            remove(path / "onnx")
            raise SystemExit
        remove(path, ignore_errors=ignore_errors)

    def killed_before_rename(path: Path, target: Path) -> Path:
        if path == part:
            raise SystemExit
        return rename(path, target)

    with monkeypatch.context() as until:
        if step == "_copy":
            until.setattr(artifact, "_copy", killed_in_copy)
        elif step == "rmtree":
            until.setattr(shutil, "rmtree", killed_in_removal)
        else:
            until.setattr(Path, "rename", killed_before_rename)
        with pytest.raises(SystemExit):
            artifact._replace(part, final)
    artifact.recover(tmp_path)
    assert stages.verify(final).answers == [[[1.0]]]
    assert not old.exists() and not part.exists()


def test_somebody_elses_directory_is_not_taken_for_the_rest_of_an_artefact(tmp_path: Path) -> None:
    (tmp_path / "artifact").mkdir()
    (tmp_path / "artifact" / "mine").write_text("keep")
    stage(tmp_path / ".artifact.old")
    with pytest.raises(UsageError, match="is not a bertopt artefact"):
        artifact.recover(tmp_path)
    assert (tmp_path / "artifact" / "mine").read_text() == "keep"
