"""Recorded measurements come back as they were, and only for the stage and the inputs that they were measured with."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from bertopt import stages
from bertopt.checks.measurements import StageMeasurements
from bertopt.pipeline import measurement_cache
from bertopt.pipeline.measurement_cache import Records
from bertopt.results import Comparison, Invariance
from bertopt.stages import Manifest
from tests.support.measured import case
from tests.support.specs import TEXT

NAN = math.nan


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


def found(**fields: Any) -> StageMeasurements:
    zero = Comparison(max_abs=0, rel_l2=0, cosine_min=1, cosine_mean=1, label_flips=None, compared=1)
    given = {
        "cases": [case(max_abs=NAN)], "vs_parent": zero, "invariance": Invariance(max_abs=NAN, cosine_min=-math.inf, texts=1, where="x"),
        "predictions": [[1.0], [NAN]], "effects": {"nodes": (2, 2)}, "changed": True, "facts": {"threads": 1}, "peak_rss_bytes": 5,
    }  # fmt: skip
    return StageMeasurements.model_validate(given | fields)


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    records = Records(tmp_path / "checks", ["reference", 1])
    assert records.read(["a", None]) is None
    records.write(["a", None], found())
    again = records.read(["a", None])
    assert again is not None
    assert again.model_dump_json() == found().model_dump_json()
    assert math.isnan(again.cases[0].max_abs) and again.predictions is not None and math.isnan(again.predictions[1][0])
    assert [path.suffix for path in tmp_path.rglob("*") if path.is_file()] == [".json"]


def test_records_of_other_inputs_or_versions_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Records(tmp_path, ["reference", 1]).write(["a", "b"], found())
    assert Records(tmp_path, ["reference", 1]).read(["a", "b"]) is not None
    assert Records(tmp_path, ["reference", 2]).read(["a", "b"]) is None
    assert Records(tmp_path, ["reference", 1]).read(["a", None]) is None
    monkeypatch.setattr("bertopt.pipeline.measurement_cache.MEASURING", ("checks",))
    assert Records(tmp_path, ["reference", 1]).read(["a", "b"]) is None
