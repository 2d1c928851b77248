"""One export of a tiny model, for tests of the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import Result

from tests.support.command_line import call, write_recipe
from tests.support.shared_workers import cheap_workers
from tests.support.tiny_models import Tiny


@pytest.fixture(scope="session")
def recipe(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe of one step."""
    return write_recipe(tmp_path_factory.mktemp("recipe"), tiny())


@pytest.fixture(scope="session")
def exported(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """The output directory of that recipe, to be read only, and what the command said."""
    out = tmp_path_factory.mktemp("out")
    with cheap_workers("pipeline"):
        return out, call("export", str(recipe), "--out", str(out))
