"""Fixtures that every test may ask for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.exports import FOLDER, Exports
from tests.support.tiny_models import Tiny, write_tiny

#: Tests that import ONNX Runtime themselves report nothing to anybody either.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """`tiny(family, task, pooling)`: the directory of a tiny checkpoint, written once a session. Treat it as read-only."""
    made: dict[tuple[object, ...], Path] = {}

    def make(
        family: str = "bert", task: str = "text-classification", pooling: str | None = None, seed: int = 0
    ) -> Path:
        key = (family, task, pooling, seed)
        if key not in made:
            made[key] = write_tiny(tmp_path_factory.mktemp("tiny"), family, task, pooling, seed)
        return made[key]

    return make


@pytest.fixture(scope="session", autouse=True)
def exports_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the exports that all processes of this run share. Workers of tests find it by a variable."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "exports"
    folder.mkdir(exist_ok=True)
    os.environ[FOLDER] = str(folder)
    return folder


@pytest.fixture(scope="session")
def export(exports_folder: Path) -> Exports:
    """`export(model, context, opset)`: what `ExportOnnx` makes of an eager model, exported once for all processes of this run."""
    return Exports(exports_folder)
