"""Recipes end to end on a tiny model: what is delivered, and what a second run reuses."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bertopt
from bertopt import stages
from bertopt.errors import Unsupported, UsageError
from bertopt.recipe.parser import load
from bertopt.results import Ratio, Report, Stage
from tests.support.pipeline_runs import TEXTS, Run, reused, stage_names, statuses
from tests.support.tiny_models import Tiny

LADDER = [{"pass": "use_sdpa"}, {"pass": "export_onnx"}, {"pass": "fuse_ort"}, {"pass": "quantize_int8"}]
CHAIN: list[dict[str, Any]] = [{"pass": "touch", "name": name} for name in ("first", "second", "third")]


# The happy run, its artefact and its report.


@pytest.fixture(scope="module")
def happy(run: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Report]:
    out = tmp_path_factory.mktemp("happy")
    return out, run(out, LADDER)


def test_happy_run(happy: tuple[Path, Report]) -> None:
    _, report = happy
    assert report.exit_code == 0, report.reason
    assert [row.status for row in report.stages] == ["ok"] * 5
    assert [row.form for row in report.stages] == ["eager", "eager", "onnx", "onnx", "onnx"]
    assert [row.after for row in report.stages] == [None, "reference", "use_sdpa", "export_onnx", "fuse_ort"]
    assert report.stages[-1].precision == "int8"
    assert report.delivered is not None and report.delivered.stage == "quantize_int8"


def test_report_json_has_the_contract_s_keys(happy: tuple[Path, Report]) -> None:
    out, report = happy
    found = json.loads((out / "report.json").read_text())
    assert set(found) >= {"schema_version", "bertopt_version", "recipe", "environment", "model", "stages", "delivered", "wall_s", "exit_code"}  # fmt: skip
    assert found["schema_version"] == 1 and found["bertopt_version"] == bertopt.__version__
    assert set(found["model"]) >= {"source", "revision", "sha256", "family", "task", "parameters"}
    assert found["delivered"] == {"stage": "quantize_int8", "path": "artifact"}
    for index, row in enumerate(found["stages"]):
        assert set(row) >= {
            "index", "name", "pass", "after", "status", "reason", "form", "precision", "changes", "build_s", "size_bytes",
            "peak_rss_bytes", "peak_gpu_bytes", "path", "parity", "latency", "quality",
        }  # fmt: skip
        assert row["index"] == index and (out / row["path"]).is_dir() and row["quality"] is None
        assert row["size_bytes"] > 0 and row["peak_rss_bytes"] > 0 and row["build_s"] >= 0
        assert [case["kind"] for case in row["latency"]] == ["shape", "shape", "mix"]
    assert found["stages"][0]["parity"] is None and found["stages"][0]["pass"] is None
    parity, timed = found["stages"][2]["parity"], found["stages"][2]["latency"][0]
    assert set(parity) >= {"passed", "worst", "cases", "vs_parent"} and set(parity["worst"]) >= {
        "metric",
        "value",
        "where",
    }
    assert set(parity["cases"][0]) >= {
        "batch", "sequence", "padding", "max_abs", "rel_l2", "cosine_min", "cosine_mean", "label_flips", "compared",
    }  # fmt: skip
    assert set(timed) >= {"kind", "batch", "sequence", "n", "p50_ms", "p90_ms", "p99_ms", "texts_per_s"}
    assert set(timed["vs_reference"]) == set(timed["vs_parent"]) == {"ratio", "low", "high", "verdict"}
    assert Report.model_validate(found).stages[1].name == report.stages[1].name == "use_sdpa"


def test_the_artefact(happy: tuple[Path, Report], tiny: Tiny) -> None:
    out, report = happy
    directory = out / "artifact"
    manifest = stages.verify(directory)
    files = {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}
    assert files == {"manifest.json", "README.md", "sbom.cdx.json", "config.json", "tokenizer.json", "tokenizer_config.json", "onnx/model.onnx"}
    assert set(manifest.files) == files - {"manifest.json"}
    newest = max(directory.rglob("*"), key=lambda path: path.stat().st_mtime_ns * path.is_file())
    assert newest.name == "manifest.json"
    for path in directory.rglob("*"):
        assert not path.is_symlink()
        assert path.is_dir() or path.stat().st_nlink == 1
    assert [entry.name for entry in manifest.passes] == [step["pass"] for step in LADDER]
    assert manifest.gates["parity"]["worst"]["metric"] == report.stages[-1].parity.worst.metric
    assert len(manifest.recipe_sha256) == 64 and manifest.recipe["steps"] == report.recipe["steps"]


def test_the_artefact_names_no_place_on_this_machine(happy: tuple[Path, Report], tiny: Tiny) -> None:
    out, _ = happy
    places = [str(out), str(Path(bertopt.__file__).parents[1]), os.path.expanduser("~") + "/", "/tmp/"]
    for path in (out / "artifact").rglob("*"):
        if path.is_file():
            content = path.read_text("utf-8", "replace")
            assert not [place for place in places if place in content], path


def test_the_report_page(happy: tuple[Path, Report]) -> None:
    page = (happy[0] / "report.html").read_text()
    assert all(name in page for name in ("use_sdpa", "export_onnx", "fuse_ort", "quantize_int8"))
    assert not re.search(r'(?:src|href)="https?:', page)


def test_the_artefact_answers_like_transformers(
    run: Run, happy: tuple[Path, Report], tiny: Tiny, tmp_path: Path
) -> None:
    import transformers

    expected = transformers.pipeline("text-classification", str(tiny()))(TEXTS)
    run(tmp_path, ["use_sdpa"])
    for directory, tolerance in ((tmp_path / "artifact", 1e-5), (happy[0] / "artifact", 0.05)):
        got = bertopt.load(directory)(TEXTS)
        assert [entry["label"] for entry in got] == [entry["label"] for entry in expected]
        np.testing.assert_allclose([e["score"] for e in got], [e["score"] for e in expected], atol=tolerance)


def test_a_second_run_reuses_everything(run: Run, happy: tuple[Path, Report]) -> None:
    out, first = happy
    before = stages.read_manifest(out / "artifact").content_sha256
    report = run(out, LADDER)
    assert reused(report) == [row.name for row in first.stages] and not reused(first)
    assert report.stages[3].latency == first.stages[3].latency
    assert stages.read_manifest(out / "artifact").content_sha256 == before


# Reuse, on a chain of cheap passes.


@pytest.fixture(scope="module")
def chained(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("chained")
    assert run(out, CHAIN).exit_code == 0
    return out


@pytest.fixture
def chain(chained: Path, tmp_path: Path) -> tuple[Path, list[dict[str, Any]]]:
    """An output directory with the stages of three steps, and the steps."""
    shutil.copytree(chained, tmp_path, dirs_exist_ok=True)
    return tmp_path, copy.deepcopy(CHAIN)


def test_an_edited_option_rebuilds_that_stage_and_its_children(
    run: Run, chain: tuple[Path, list[dict[str, Any]]]
) -> None:
    out, steps = chain
    old = set((out / "stages").iterdir())
    steps[1]["amount"] = 2
    report = run(out, steps)
    assert report.exit_code == 0 and reused(report) == ["reference", "first"]
    assert report.stage("second").changes == {"touched": 2}
    assert stage_names(out) == ["first", "reference", "second", "third"]
    assert len(old & set((out / "stages").iterdir())) == 2


@pytest.mark.parametrize("damage", ["change", "remove", "add"])
def test_a_damaged_stage_is_built_again(run: Run, chain: tuple[Path, list[dict[str, Any]]], damage: str) -> None:
    out, steps = chain
    (second,) = (out / "stages").glob("second-*")
    if damage == "change":
        (second / "rewrites.json").write_text("[ ]")
    elif damage == "remove":
        (second / "config.json").unlink()
    else:
        (second / "extra.bin").write_text("what is this?")
    report = run(out, steps)
    assert report.exit_code == 0 and reused(report) == ["reference", "first", "third"]
    assert stages.verify(second).name == "second"


def test_fresh_forgets(run: Run, chain: tuple[Path, list[dict[str, Any]]]) -> None:
    out, steps = chain
    report = run(out, steps, {"fresh": True})
    assert report.exit_code == 0 and not reused(report)


def test_what_cannot_run_here_is_unverified(run: Run, tmp_path: Path, happy: tuple[Path, Report]) -> None:
    # The same first stages as the happy run's: no need to export again.
    shutil.copytree(happy[0] / "stages", tmp_path / "stages")
    steps = ["use_sdpa", "export_onnx", {"pass": "cast_onnx_half", "dtype": "bfloat16"}]
    with pytest.raises(UsageError, match="no bfloat16 kernels for a CPU; use dtype: float16, or say device: auto"):
        run(tmp_path, steps)
    report = run(tmp_path, steps, device="auto")
    assert statuses(report) == {"use_sdpa": "ok", "export_onnx": "ok", "cast_onnx_half": "unverified"}
    assert report.exit_code == 4 and report.delivered is None and "--build-only" in (report.reason or "")
    assert report.stage("cast_onnx_half").parity is None
    report = run(tmp_path, steps, {"build_only": True}, device="auto")
    assert report.exit_code == 0 and report.delivered is not None and report.delivered.stage == "cast_onnx_half"
    with pytest.raises(Unsupported):
        bertopt.load(tmp_path / "artifact")


def test_deliver_fastest(run: Run, begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stages that are equally fast race each other, and that race decides; a second run takes it from its records."""
    overlapping = {"use_sdpa": Ratio(ratio=2.0, low=0.5, high=8.0), "touch": Ratio(ratio=3.0, low=0.5, high=9.0), "reference": None}
    monkeypatch.setattr(Stage, "speed_up", lambda row: overlapping[row.name])
    report = run(begun, ["touch", "use_sdpa"], deliver="fastest")
    (raced,) = report.head_to_head
    assert (raced.stage, raced.other) == ("use_sdpa", "touch")
    assert report.delivered is not None and report.delivered.stage == ("use_sdpa" if raced.ratio.ratio > 1 else "touch")
    assert f"use_sdpa {raced.ratio} against touch" in (begun / "report.html").read_text("utf-8").replace("&gt;", ">").replace("&lt;", "<")
    again = run(begun, ["touch", "use_sdpa"], deliver="fastest")
    assert again.head_to_head == report.head_to_head and again.delivered == report.delivered
    assert run(begun, ["touch", "use_sdpa"]).head_to_head == [], "only `fastest` has a choice"
    overlapping["use_sdpa"] = Ratio(ratio=2.0, low=1.9, high=2.1)
    overlapping["touch"] = Ratio(ratio=3.0, low=2.9, high=3.1)
    clear = run(begun, ["touch", "use_sdpa"], deliver="fastest")
    assert clear.head_to_head == [] and clear.delivered is not None and clear.delivered.stage == "touch"


def test_the_ladder_goes_on_after_a_branch_that_fails() -> None:
    """Every step of the shipped comparison ends only its own branch."""
    path = Path(bertopt.__file__).parent / "recipes" / "ladder.yaml"
    recipe = load(path)
    assert "stop" not in {step.on_fail for step in recipe.steps}
