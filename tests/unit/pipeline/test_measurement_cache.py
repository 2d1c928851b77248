"""What was measured of one stage is not taken for what another does."""

from __future__ import annotations

from pathlib import Path

import pytest

from bertopt import stages
from bertopt.pipeline import measurement_cache
from bertopt.stages import Manifest
from tests.support.specs import TEXT


def identity(monkeypatch: pytest.MonkeyPatch, form: str, sources: dict[str, str] | None) -> str:
    manifest = Manifest(form=form, precision="float32", spec=TEXT, sources=sources, environment={})
    monkeypatch.setattr(stages, "read_manifest", lambda directory: manifest)
    return measurement_cache.identity(Path("touch-0"))


def test_what_a_users_pass_reads_is_part_of_its_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeated run rebuilt the stage, whose own files were the same, and took what was measured with another rule."""
    one, other = ({"pass mine": "0", "file of pass mine: rule.json": content} for content in ("1", "2"))
    assert identity(monkeypatch, "eager", one) == identity(monkeypatch, "eager", dict(reversed(one.items())))
    assert identity(monkeypatch, "eager", one) != identity(monkeypatch, "eager", other)
    # A graph holds all that it does; and modules that are loaded beside bertopt's own passes do nothing.
    assert identity(monkeypatch, "onnx", one) == identity(monkeypatch, "onnx", other)
    assert identity(monkeypatch, "eager", {"module app": "1"}) == identity(monkeypatch, "eager", {"module app": "2"}) == identity(monkeypatch, "eager", None)
