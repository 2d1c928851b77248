"""The benchmark of packages: what it writes, and what ends it. The processes that it times are replaced."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import bertopt
from benchmarks import package_aot


def ran(status: str) -> Any:
    """A run of a recipe whose last stage has `status`."""

    def run(recipe: Any, out: Path, build_only: bool) -> Any:
        names = ["use_sdpa", *package_aot.FORMS]
        stages = [SimpleNamespace(name=name, path=f"stages/{name}", status="ok", reason=None) for name in names]
        stages[-1].status, stages[-1].reason = status, "no compiler"
        return SimpleNamespace(stages=stages)

    return run


def test_every_form_is_timed_in_turn_and_written_as_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, bool]] = []

    def timed(stage: Path, compiles: bool) -> dict[str, float]:
        asked.append((stage.name, compiles))
        return {"first_s": float(len(asked)), "one_ms": 2.0, "batch_ms": 3.0}

    monkeypatch.setattr(bertopt, "run", ran("ok"))
    monkeypatch.setattr(package_aot, "timed", timed)
    assert package_aot.main(["--runs", "3", "--out", str(tmp_path / "results" / "found.json")]) == 0
    assert asked == [("bf16", False), ("compiled", True), ("package", False)] * 3
    document = json.loads((tmp_path / "results" / "found.json").read_text())
    assert document["forms"]["package"]["first_s"] == 6.0, "the median of runs 3, 6 and 9"
    table = (tmp_path / "results" / "found.md").read_text()
    assert table == package_aot.table(document) + "\n" and "| package | 6.0 | 2.00 | 3.0 |" in table


def test_a_stage_that_is_not_ok_ends_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bertopt, "run", ran("unsupported"))
    with pytest.raises(SystemExit, match="package is unsupported: no compiler"):
        package_aot.main(["--out", str(tmp_path / "found.json")])
    assert not (tmp_path / "found.json").exists()
