"""The wheel: what a user who has no checkout gets."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.version import Version

from tests.support.tiny_models import Tiny

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    setuptools = pytest.importorskip("setuptools")
    if Version(setuptools.__version__) < Version("77"):
        pytest.skip("building needs setuptools 77, as pyproject.toml says")
    folder = tmp_path_factory.mktemp("wheel")
    # Built from a copy, so that build/ and the egg-info do not appear in the checkout.
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "bertopt", source / "bertopt", ignore=shutil.ignore_patterns("__pycache__"))
    build = "from setuptools import build_meta; print(build_meta.build_wheel('..'))"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("bertopt/")}
    there = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "bertopt").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packed == there


def test_recipes_work_from_the_wheel(wheel: Path, tiny: Tiny, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    (tmp_path / "elsewhere").mkdir()

    def call(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *arguments], cwd=tmp_path / "elsewhere", capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    rows = json.loads(call("bertopt", "recipes", "--json"))
    assert {row["name"] for row in rows} >= {"cpu_exact", "cpu_fastest", "cpu_near_lossless", "ladder", "trt_fp16"}
    assert all(Path(row["path"]).is_relative_to(tmp_path / "site") for row in rows)
    # The tiny model has 64 positions, fewer than the recipes' own shapes.
    edits = ("--set", f"model={tiny()}", "--set", "inputs.shapes=[[1, 32]]", "--dry-run")
    assert "deliver: fastest" in call("bertopt", "export", "cpu_fastest", *edits)
    assert "build_tensorrt" in call("bertopt.export", "recipes/trt_fp16.yaml", *edits)
