"""What tests of several passes share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from bertopt.core import Context
from tests.support.exports import Exports
from tests.support.lab import Lab
from tests.support.tiny_models import Tiny


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """More threads only wait for each other on models this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def context(tmp_path: Path) -> Callable[[], Context]:
    """`context()`: that of one pass, with a folder that no other has."""
    numbers = itertools.count()

    def make() -> Context:
        workdir = tmp_path / f"work-{next(numbers)}"
        workdir.mkdir()
        return Context(workdir, shapes=((2, 8), (3, 16)))

    return make


@pytest.fixture(scope="module")
def lab(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory, export: Exports) -> Iterator[Lab]:
    with Lab.opened(tiny, tmp_path_factory.mktemp("lab"), export) as lab:
        yield lab
