"""A model whose tokenizer does not know the built-in texts is run on sequences of tokens from its vocabulary, and the report says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bertopt.pipeline.measurement_plan import MeasurementPlan
from bertopt.pipeline.own_texts import OWN_WORDS
from tests.support.pipeline_runs import Run
from tests.support.proteins import write_protein


def test_a_model_of_proteins(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples: list[list[str]] = []
    sample = MeasurementPlan.sample
    monkeypatch.setattr(MeasurementPlan, "sample", lambda plan: (samples.append(sample(plan)[0]), sample(plan))[1])
    model = write_protein(tmp_path / "checkpoint", "token-classification")
    report = run(tmp_path / "out", ["use_sdpa"], model=str(model), inputs={"shapes": [[1, 8]]})
    assert report.exit_code == 0 and OWN_WORDS in report.model["warnings"]
    assert any("<mask>" in text for text in samples[0]) and sum(set(text) <= set("LAGVSERTIDPKQNFYMHWCXBUZO.-") for text in samples[0]) > 20


def test_other_models_keep_the_built_in_texts(touched: Path) -> None:
    assert OWN_WORDS not in json.loads((touched / "report.json").read_text())["model"]["warnings"]
