"""Artefacts to serve, built once, and servers of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.artefacts import Form, write_artefact
from tests.support.serving import InProcess
from tests.support.tiny_models import Tiny

#: `artefact(task, form, family)`: the directory of a tiny artefact.
Artefact = Callable[..., Path]


@pytest.fixture(scope="session")
def artefact(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Artefact:
    made: dict[tuple[str, Form, str], Path] = {}

    def make(task: str = "feature-extraction", form: Form = "onnx", family: str = "bert") -> Path:
        key = (task, form, family)
        if key not in made:
            source = tiny(family, task, "mean" if task == "feature-extraction" else None)
            made[key] = write_artefact(source, tmp_path_factory.mktemp("served") / task, form)
        return made[key]

    return make


@pytest.fixture(scope="session")
def embedder(artefact: Artefact) -> Iterator[InProcess]:
    server = InProcess({"tiny": artefact()})
    yield server
    server.close()


@pytest.fixture(scope="session")
def classifier(artefact: Artefact) -> Iterator[InProcess]:
    server = InProcess({"sentiment": artefact("text-classification")})
    yield server
    server.close()
