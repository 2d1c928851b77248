"""`bertopt push`: only verified, delivered artefacts go to the hub, and refusals say what to do."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bertopt import stages
from bertopt.commands.push import push
from bertopt.core import Onnx
from bertopt.errors import IntegrityError, Unsupported, UsageError
from tests.support.specs import spec


class Hub:
    """Takes what is uploaded, or refuses."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.calls = error, list[tuple[str, dict[str, Any]]]()

    def __call__(self, **_: Any) -> Hub:
        return self

    def create_repo(self, repository: str, **fields: Any) -> None:
        if self.error:
            raise self.error
        self.calls.append((repository, fields))

    def upload_folder(self, **fields: Any) -> Any:
        self.calls.append(("upload", fields))
        return SimpleNamespace(commit_url="https://hub/org/name/commit/1")


def artefact(directory: Path, stage: str | None = "int8") -> Path:
    (directory / "onnx").mkdir(parents=True)
    (directory / "onnx" / "model.onnx").write_bytes(b"graph")
    described = stages.describe(Onnx(spec(), "int8", directory / "onnx" / "model.onnx"))
    stages.write_manifest(directory, {**described, "stage": stage})
    return directory


def test_a_verified_artefact_is_uploaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub()
    monkeypatch.setattr("huggingface_hub.HfApi", hub)
    assert push(artefact(tmp_path / "a"), "org/name", private=True) == "https://hub/org/name/commit/1"
    (repository, created), (_, uploaded) = hub.calls
    assert repository == "org/name" and created["private"] is True
    assert uploaded["folder_path"] == str(tmp_path / "a") and uploaded["commit_message"] == "int8: onnx, int8"


def test_what_may_not_be_pushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub()
    monkeypatch.setattr("huggingface_hub.HfApi", hub)
    with pytest.raises(UsageError, match="must be org/name; got 'name'"):
        push(tmp_path, "name")
    with pytest.raises(UsageError, match="is a stage that was not delivered"):
        push(artefact(tmp_path / "stage", None), "org/name")
    changed = artefact(tmp_path / "changed")
    (changed / "onnx" / "model.onnx").write_bytes(b"other")
    with pytest.raises(IntegrityError):
        push(changed, "org/name")
    assert not hub.calls


class Unreachable(Exception):
    """As the hub's client raises: no OSError."""


@pytest.mark.parametrize("error", [ConnectionError("no route\nmore"), Unreachable("no route")])
def test_a_hub_that_refuses_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi", Hub(error))
    with pytest.raises(Unsupported, match=r"'org/name' could not be written \(\w+: no route\); check the network"):
        push(artefact(tmp_path / "a"), "org/name")
