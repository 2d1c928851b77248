"""The checkpoint as torch alone runs it: timed beside the reference, on the device that the run is for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bertopt import results
from bertopt.errors import ResourceError
from bertopt.modeling import checkpoint
from bertopt.pipeline import baselines
from bertopt.pipeline.measurement_cache import Records
from bertopt.pipeline.measurement_plan import MeasurementPlan
from bertopt.pipeline.race import Budget
from bertopt.recipe.texts import Texts
from bertopt.report import formatting, html, markdown_summary
from bertopt.workers.client import Workers
from tests.support.shared_workers import SharedWorkers, cheap_workers
from tests.support.tiny_models import Tiny

TEXTS = Texts(("a cat", "the cat sat on the mat"))


@pytest.fixture(scope="module")
def workers() -> Iterator[SharedWorkers]:
    with cheap_workers() as shared:
        yield shared


@pytest.fixture
def reference(tiny: Tiny, tmp_path: Path) -> tuple[Path, MeasurementPlan]:
    from bertopt import stages

    model, stage = checkpoint.load(tiny()), tmp_path / "reference"
    stage.mkdir()
    checkpoint.write_snapshot(model, stage)
    stages.write_form(model, stage)
    stages.write_manifest(stage, stages.describe(model))
    return stage, MeasurementPlan.of(model.spec, [(1, 8), (2, 16)], TEXTS, Budget(0.0, 0.0, min_rounds=3))


def test_both_are_timed_against_the_reference_and_kept(
    workers: Workers, reference: tuple[Path, MeasurementPlan], tmp_path: Path
) -> None:
    stage, plan = reference
    said: list[str] = []
    asked: Any = (workers, stage, "cpu", plan, Records(tmp_path / "checks", ["test"]), said.append)
    found, warnings = baselines.measure(*asked)
    assert not warnings and list(found) == ["tf32", "bfloat16"] and len(said) == 2
    for cases in found.values():
        assert [case.what for case in cases] == ["1 × 8", "2 × 16", "end to end"]
        assert all(case.vs_reference is not None for case in cases)
    again, _ = baselines.measure(*asked)
    assert again == found and len(said) == 2, "read from its record"
    report = results.Report(bertopt_version="0", recipe={}, environment={}, model={}, baselines=found)
    assert results.Report.model_validate_json(report.model_dump_json()).baselines.keys() == found.keys()
    words = formatting.baselines(report)
    assert "tf32 " in words and "bfloat16 " in words and words.count("end to end") == 2
    assert "Baselines: the checkpoint as torch alone runs it" in markdown_summary.render(report)
    assert "Baselines: the checkpoint as torch alone runs it" in html.page(report)


def test_bfloat16_answers_differ_from_the_reference(workers: Workers, reference: tuple[Path, MeasurementPlan]) -> None:
    stage, _ = reference
    with workers.start() as worker:
        worker.open(stage, "cpu")
        exact = worker.exchange("logits", texts=list(TEXTS.texts))[1]["logits"]
        worker.call("reduce", kind="bfloat16")
        rounded = worker.exchange("logits", texts=list(TEXTS.texts))[1]["logits"]
    assert 0 < abs(exact - rounded).max() < 0.1


def test_one_that_cannot_run_is_a_warning(
    workers: Workers, reference: tuple[Path, MeasurementPlan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, plan = reference

    def full(*_: Any) -> Any:
        raise ResourceError("no GPU memory")

    monkeypatch.setattr(baselines, "race", full)
    found, warnings = baselines.measure(workers, stage, "cpu", plan, Records(tmp_path / "checks", []), lambda _: None)
    assert not found and len(warnings) == 2 and "in tf32 was not timed: no GPU memory" in warnings[0]
