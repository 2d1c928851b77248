"""Recipes end to end on a tiny model: what every kind of failure leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bertopt import stages
from bertopt.errors import ResourceError, Unsupported, UsageError
from bertopt.results import Stage
from bertopt.system.process_tree import runs
from tests.support.pipeline_runs import Run, nothing_left, reused, statuses
from tests.support.shared_workers import SharedWorkers


def test_the_report_of_an_interrupted_run_does_not_read_as_passed(run: Run, begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("bertopt.pipeline.job.Job.deliver", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(begun, ["touch"])
    left = json.loads((begun / "report.json").read_text())
    assert left["exit_code"] == 130 and "has not ended, or was interrupted" in left["reason"]
    assert [row["status"] for row in left["stages"]] == ["ok", "ok"]
    monkeypatch.undo()
    assert run(begun, ["touch"]).exit_code == 0
    assert json.loads((begun / "report.json").read_text())["exit_code"] == 0


# Failures of every kind. The next run in the same directory must be none the worse.


@pytest.mark.parametrize(
    ("step", "code", "words"),
    [
        ({"pass": "raise_error"}, 3, "ValueError: a bug in the pass"),
        ({"pass": "kill_itself", "how": "SIGSEGV"}, 1, "signal SIGSEGV"),
        ({"pass": "kill_itself", "how": "SIGKILL"}, 5, "memory runs out"),
        ({"pass": "fill_disk"}, 5, "no space left on the disk"),
        ({"pass": "fail_when_timed", "how": "die"}, 1, "signal SIGSEGV during 'time"),
        ({"pass": "fail_when_timed", "how": "hang", "timeout": 1.5}, 7, "longer than 1.5 s"),
    ],
    ids=lambda value: value["pass"] + value.get("how", "") if isinstance(value, dict) else None,
)
def test_failures(
    run: Run, workers: SharedWorkers, begun: Path, step: dict[str, Any], code: int, words: str
) -> None:  # fmt: skip
    report = run(begun, ["touch", step, "use_sdpa"])
    assert statuses(report) == {"touch": "ok", step["pass"]: "failed", "use_sdpa": "skipped"}
    assert report.exit_code == code and words in (report.stage(step["pass"]).reason or "")
    assert nothing_left(begun, workers) and not (begun / "artifact").exists()
    report = run(begun, ["touch", {**step, "on_fail": "revert"}, "use_sdpa"])
    assert statuses(report) == {"touch": "ok", step["pass"]: "reverted", "use_sdpa": "ok"} and report.exit_code == 0
    assert "touch" in reused(report) and nothing_left(begun, workers)


@pytest.mark.parametrize(("how", "code"), [("SIGSEGV", 1), ("SIGKILL", 5), ("hang", 7)])
def test_a_worker_s_last_words_are_kept(run: Run, workers: SharedWorkers, begun: Path, how: str, code: int) -> None:
    report = run(begun, [{"pass": "last_words", "how": how, "timeout": 5 if how == "hang" else 600}])
    assert report.exit_code == code and "my last words" in report.stage("last_words").facts["log"]
    assert nothing_left(begun, workers)
    after = run(begun, ["touch"])
    assert after.exit_code == 0 and after.stage("touch").reused and after.delivered is not None


def test_the_report_warns_of_few_calibration_texts(run: Run, begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def warned(steps: Any, rows: list[Stage], texts: int) -> list[str]:
        return [f"{steps[0].name}, {rows[-1].name}: {texts} texts"]

    monkeypatch.setattr("bertopt.pipeline.calibration_texts.warnings", warned)
    assert run(begun, ["touch"]).model["warnings"] == ["touch, touch: 2 texts"]


def test_a_worker_s_traceback_is_kept(run: Run, begun: Path) -> None:
    row = run(begun, ["raise_error"]).stage("raise_error")
    assert "raised ValueError: a bug in the pass" in (row.reason or "")
    assert row.facts["log"].startswith("Traceback") and "example_passes.py" in row.facts["log"]


def test_a_pass_that_never_ends(run: Run, workers: SharedWorkers, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    report = run(tmp_path / "out", [{"pass": "hang", "timeout": 5, "pids": str(pids)}])
    assert statuses(report) == {"hang": "failed"} and report.exit_code == 7
    assert "longer than 5 s" in (report.reason or "")
    worker, child = map(int, pids.read_text().split())
    assert not runs(worker) and not runs(child) and nothing_left(tmp_path / "out", workers)


def test_no_cuda_here(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: SharedWorkers) -> None:
    with workers.start() as worker:
        if worker.call("device")["cuda"]:
            pytest.skip("there is a GPU")
    with pytest.raises(Unsupported, match="device: cuda") as error:
        run(tmp_path, ["touch"], device="cuda")
    assert error.value.exit_code == 4


def test_sequences_the_model_has_no_positions_for(run: Run, tmp_path: Path, texts: Path) -> None:
    with pytest.raises(UsageError, match=r"at most the model's 64 usable positions; got \[1, 65\]"):
        run(tmp_path, ["touch"], inputs={"shapes": [[1, 8], [1, 65]], "texts": str(texts)})
    assert not (tmp_path / "stages").exists()


def test_a_full_disk_leaves_the_old_artefact(run: Run, begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Workers write stages, here both before the disk is full; what fails is the delivery.
    steps = ["touch", "use_sdpa"]
    assert run(begun, steps, deliver="touch").exit_code == 0
    before = stages.verify(begun / "artifact")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device", "model.safetensors")

    for place in ("shutil.copyfile", "bertopt.stages.write_manifest", "bertopt.stages.sync"):
        with monkeypatch.context() as patch:
            patch.setattr(place, full)
            with pytest.raises(ResourceError, match=r"no space left on the disk \(model.safetensors\)"):
                run(begun, steps)
        assert stages.verify(begun / "artifact") == before
        assert not (begun / ".artifact.part").exists()
    assert run(begun, steps).delivered is not None


def test_somebody_else_s_directory_is_not_overwritten(run: Run, begun: Path) -> None:
    (begun / "artifact").mkdir()
    (begun / "artifact" / "thesis.txt").write_text("years of work")
    built = sorted((begun / "stages").iterdir())
    with pytest.raises(UsageError, match="is not a bertopt artefact; move it away"):
        run(begun, ["touch", "use_sdpa"])
    assert [path.name for path in (begun / "artifact").iterdir()] == ["thesis.txt"]
    assert sorted((begun / "stages").iterdir()) == built, "refused before anything is built"


def test_an_interrupted_delivery_is_cleared_up(run: Run, begun: Path) -> None:
    assert run(begun, ["touch"]).exit_code == 0
    (begun / "artifact").rename(begun / ".artifact.old")
    (begun / ".artifact.part").mkdir()
    (begun / "stages" / ".part-touch-1").mkdir()
    assert run(begun, ["return_input"]).exit_code == 3
    assert stages.verify(begun / "artifact").stage == "touch"
    assert not list(begun.glob(".artifact.*")) and not list((begun / "stages").glob(".part-*"))


def test_out_is_a_file(run: Run, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        run(tmp_path / "out", ["touch"])
