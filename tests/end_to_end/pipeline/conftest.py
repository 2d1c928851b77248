"""Runs of recipes on a tiny model."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import bertopt
from bertopt.results import Report
from tests.support.pipeline_runs import INT8, TEXTS, Run
from tests.support.shared_workers import SharedWorkers, cheap_workers
from tests.support.tiny_models import Tiny


@pytest.fixture(scope="module", autouse=True)
def workers() -> Iterator[SharedWorkers]:
    with cheap_workers("pipeline", "commands.verify") as shared:
        yield shared


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "texts.txt"
    path.write_text("\n".join(TEXTS) + "\n")
    return path


@pytest.fixture(scope="session")
def run(tiny: Tiny, texts: Path) -> Run:
    """`run(out, steps, **head)`; a step may be just its pass's name. `how` are bertopt.run's own arguments."""

    def go(out: Path, steps: list[Any], how: dict[str, Any] | None = None, **head: Any) -> Report:
        recipe = {
            "schema_version": 1, "model": str(tiny()), "device": "cpu", "limits": INT8,
            "inputs": {"shapes": [[1, 8], [2, 8]], "texts": str(texts)}, **head,
        }  # fmt: skip
        recipe["steps"] = [{"pass": step} if isinstance(step, str) else step for step in steps]
        return bertopt.run(recipe, out, **(how or {}))

    return go


@pytest.fixture(scope="session")
def touched(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output directory of a run of `touch`, to be read only."""
    out = tmp_path_factory.mktemp("touched")
    with cheap_workers("pipeline"):
        assert run(out, ["touch"]).exit_code == 0
    return out


@pytest.fixture
def begun(touched: Path, tmp_path: Path) -> Path:
    """An output directory in which `touch` was run before, but nothing delivered."""
    for name in ("stages", "checks"):
        shutil.copytree(touched / name, tmp_path / name)
    return tmp_path
