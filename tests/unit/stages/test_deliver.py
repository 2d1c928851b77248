"""What a delivered copy may become while it is run for the last time: nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bertopt import stages
from bertopt.errors import IntegrityError
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
