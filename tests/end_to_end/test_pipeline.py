"""Recipes end to end on a tiny model: what is delivered, what is reused, and what every kind of failure leaves."""

from __future__ import annotations

import copy
import datetime
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bertopt
from bertopt import stages
from bertopt.commands.verify import verify
from bertopt.errors import ResourceError, Unsupported, UsageError
from bertopt.recipe.parser import load
from bertopt.results import Report, Stage
from bertopt.system.process_tree import runs as _runs
from tests.support.shared_workers import SharedWorkers, cheap_workers
from tests.support.tiny_models import Tiny

Run = Callable[..., Report]
INT8 = {"int8": {"cosine_min": -1.0, "cosine_mean": -1.0, "rel_l2": 9.0, "label_flips_max": 1.0}}
LADDER = [{"pass": "use_sdpa"}, {"pass": "export_onnx"}, {"pass": "fuse_ort"}, {"pass": "quantize_int8"}]
CHAIN: list[dict[str, Any]] = [{"pass": "touch", "name": name} for name in ("first", "second", "third")]
TEXTS = ["the cat sat on the mat", "a very good film , not bad !"]


@pytest.fixture(scope="module", autouse=True)
def workers() -> Iterator[SharedWorkers]:
    with cheap_workers("pipeline", "commands.verify") as shared:
        yield shared


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "texts.txt"
    path.write_text("\n".join(TEXTS) + "\n")
    return path


@pytest.fixture(scope="module")
def run(tiny: Tiny, texts: Path) -> Run:
    """`run(out, steps, **head)`; a step may be just its pass's name. `how` are bertopt.run's own arguments."""

    def go(out: Path, steps: list[Any], how: dict[str, Any] | None = None, **head: Any) -> Report:
        recipe = {
            "schema_version": 1, "model": str(tiny()), "device": "cpu", "limits": INT8,
            "inputs": {"shapes": [[1, 8], [2, 8]], "texts": str(texts)}, **head,
        }  # fmt: skip
        recipe["steps"] = [{"pass": step} if isinstance(step, str) else step for step in steps]
        return bertopt.run(recipe, out, **(how or {}))

    return go


@pytest.fixture(scope="module")
def touched(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("touched")
    assert run(out, ["touch"]).exit_code == 0
    return out


@pytest.fixture
def begun(touched: Path, tmp_path: Path) -> Path:
    """An output directory in which `touch` was run before, but nothing delivered."""
    for name in ("stages", "checks"):
        shutil.copytree(touched / name, tmp_path / name)
    return tmp_path


def statuses(report: Report) -> dict[str, str]:
    return {row.name: row.status for row in report.stages[1:]}


def reused(report: Report) -> list[str]:
    return [row.name for row in report.stages if row.reused]


def stage_names(out: Path) -> list[str]:
    return sorted(path.name.rpartition("-")[0] for path in (out / "stages").iterdir())


def nothing_left(out: Path, workers: SharedWorkers) -> bool:
    """No worker and no half-written stage remains. The server forks every worker, so they are its children."""
    server = workers._server.pid
    children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    return not children and not list((out / "stages").glob(".part-*"))


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


# Gates.


def test_a_pass_that_did_nothing_is_noop(run: Run, begun: Path) -> None:
    report = run(begun, ["return_input", "touch"])
    assert statuses(report) == {"return_input": "noop", "touch": "skipped"}
    assert report.exit_code == 3 and "return_input" in (report.reason or "") and report.delivered is None
    assert not (begun / "artifact").exists()
    report = run(begun, [{"pass": "return_input", "allow_noop": True}, "touch"])
    assert statuses(report) == {"return_input": "ok", "touch": "ok"} and report.exit_code == 0


def test_a_wrong_model_fails_and_the_old_artefact_stays(run: Run, begun: Path) -> None:
    assert run(begun, ["touch"]).exit_code == 0
    before = {path: path.read_bytes() for path in (begun / "artifact").rglob("*") if path.is_file()}
    report = run(begun, ["touch", "swap_labels", {"pass": "use_sdpa", "after": "touch"}])
    assert statuses(report) == {"touch": "ok", "swap_labels": "failed", "use_sdpa": "skipped"}
    assert report.exit_code == 3 and report.delivered is None
    row = report.stage("swap_labels")
    assert row.parity is not None and not row.parity.passed and row.parity.vs_parent is not None
    assert row.parity.vs_parent.max_abs > 1e-3
    assert re.search(r"label_flips|cosine", row.reason or "") and re.search(r"logits\[\d+, \d\]", row.reason or "")
    assert (report.reason or "").startswith("'swap_labels' failed: ")
    assert {path: path.read_bytes() for path in before} == before
    assert json.loads((begun / "report.json").read_text())["exit_code"] == 3


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


def test_revert_goes_on_from_the_parent(run: Run, begun: Path) -> None:
    bad = {"pass": "swap_labels", "on_fail": "revert"}
    report = run(begun, ["touch", bad, "use_sdpa"])
    assert statuses(report) == {"touch": "ok", "swap_labels": "reverted", "use_sdpa": "ok"}
    assert report.exit_code == 0 and report.delivered is not None and report.delivered.stage == "use_sdpa"
    assert [entry.name for entry in stages.verify(begun / "artifact").passes] == ["touch", "use_sdpa"]
    report = run(begun, ["touch", bad])
    assert report.exit_code == 0 and report.delivered is not None and report.delivered.stage == "touch"


def test_a_skipped_branch_ends_and_the_others_go_on(run: Run, begun: Path) -> None:
    bad = {"pass": "swap_labels", "on_fail": "skip"}
    steps = ["touch", bad, {"pass": "touch", "name": "behind"}, {"pass": "use_sdpa", "after": "touch"}]
    report = run(begun, steps)
    assert statuses(report) == {"touch": "ok", "swap_labels": "skipped", "behind": "skipped", "use_sdpa": "ok"}
    assert report.exit_code == 0 and report.delivered is not None and report.delivered.stage == "use_sdpa"
    row = report.stage("swap_labels")
    assert row.parity is not None and not row.parity.passed and row.failures
    assert (row.reason or "").startswith("on_fail: skip ended the branch here: ")
    assert report.stage("behind").reason == "'swap_labels', which it starts from, is skipped"
    report = run(begun, steps, deliver="fastest")
    assert report.exit_code == 0 and report.delivered is not None
    assert report.delivered.stage in ("reference", "touch", "use_sdpa")
    for wanted in ("swap_labels", "behind"):
        report = run(begun, steps, deliver=wanted)
        assert report.exit_code == 3 and report.delivered is None
        assert (report.reason or "").startswith(f"'{wanted}' is to be delivered, but is skipped: ")
    report = run(begun, ["touch", bad])
    assert report.exit_code == 3 and report.delivered is None and "is to be delivered" in (report.reason or "")


@pytest.mark.parametrize(
    ("step", "code"), [({"pass": "raise_error"}, 3), ({"pass": "return_input"}, 3), ({"pass": "fill_disk"}, 5)], ids=str
)
def test_every_failure_can_be_skipped(run: Run, begun: Path, step: dict[str, Any], code: int) -> None:
    skipped = {**step, "on_fail": "skip"}
    report = run(begun, [skipped, {"pass": "touch", "after": "reference"}])
    assert statuses(report) == {step["pass"]: "skipped", "touch": "ok"} and report.exit_code == 0
    report = run(begun, ["touch", skipped])
    assert report.exit_code == code and report.delivered is None


def test_a_run_that_stops_early_keeps_the_stages_behind(run: Run, begun: Path) -> None:
    steps = [{"pass": "touch", "name": name} for name in ("first", "second")]
    assert run(begun, [*steps, {"pass": "touch", "name": "old", "after": "reference"}]).exit_code == 0
    for bad in ({"limits": {"rel_l2": 0.0, "max_abs": 0.0}, "allow_noop": False}, {"on_fail": "skip"}):
        report = run(begun, [{"pass": "swap_labels", "name": "bad", **bad}, {**steps[0], "after": "bad"}, *steps[1:]])
        assert set(statuses(report).values()) <= {"failed", "skipped"}
        assert {"first", "second"} <= set(stage_names(begun))
        # What no step is called goes once a run was not stopped.
        assert ("old" in stage_names(begun)) == ("on_fail" not in bad)
    assert reused(run(begun, steps)) == ["reference", "first", "second"]
    assert stage_names(begun) == ["first", "reference", "second"]


def test_limits_of_a_step_count(run: Run, begun: Path) -> None:
    report = run(begun, [{"pass": "swap_labels", "limits": WIDE}])
    assert statuses(report) == {"swap_labels": "ok"} and report.exit_code == 0


WIDE = {"rel_l2": 9.0, "max_abs": 99.0, "cosine_min": -1.0, "label_flips_max": 1.0}


def waivers(expires: str, metrics: list[str]) -> list[dict[str, str]]:
    return [{"stage": "swap_labels", "metric": m, "reason": "labels are meant", "expires": expires} for m in metrics]


def test_waivers(run: Run, begun: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(begun, ["swap_labels"]).stage("swap_labels")
    missed = [str(failure.metric) for failure in found.failures]
    assert found.status == "failed" and found.waived == [] and "cosine_min" in missed
    report = run(begun, ["swap_labels"], waivers=waivers("2999-12-31", [*dict.fromkeys(missed), "spearman_min"]))
    row = report.stage("swap_labels")
    # The stage to deliver runs further sweeps, which miss a limit too.
    assert (row.status, report.exit_code) == ("ok", 0) and len(row.waived) >= len(missed)
    assert row.waived[0].endswith(", waived until 2999-12-31: labels are meant")
    assert [w for w in report.model["warnings"] if "waiver" in w] == [
        "the waiver of spearman_min for 'swap_labels' is not needed: the stage keeps the limit; remove the waiver"
    ]
    # The artefact carries them, and is good until they expire.
    gates = stages.verify(begun / "artifact").gates
    assert gates["parity"]["passed"] is False and {f["metric"] for f in gates["waived"]} == set(missed)
    assert verify(begun / "artifact", str(tiny())).exit_code == 0
    assert verify(begun / "artifact").exit_code == 0

    class Later(datetime.date):
        @classmethod
        def today(cls) -> Later:
            return cls(3000, 1, 1)

    monkeypatch.setattr("datetime.date", Later)
    for against in (None, str(tiny())):
        late = verify(begun / "artifact", against)
        assert late.exit_code == 3 and "expired on 2999-12-31" in (late.reason or "")


def test_an_expired_waiver_covers_nothing(run: Run, begun: Path) -> None:
    report = run(begun, ["swap_labels"], waivers=waivers("2020-02-29", ["rel_l2"]))
    row = report.stage("swap_labels")
    assert (row.status, report.exit_code, row.waived) == ("failed", 3, [])
    assert "its waiver expired on 2020-02-29: labels are meant" in (report.reason or "")
    assert report.delivered is None


def test_the_pass_that_introduced_the_error_is_named(run: Run, begun: Path) -> None:
    report = run(begun, [{"pass": "swap_labels", "limits": WIDE}, "use_sdpa", "touch"])
    row = report.stage("use_sdpa")
    assert statuses(report) == {"swap_labels": "ok", "use_sdpa": "failed", "touch": "skipped"}
    assert row.parity is not None and row.parity.blame is not None and row.parity.blame.stage == "swap_labels"
    assert row.parity.blame.total > 1e-3 and ", introduced by 'swap_labels'" in (row.reason or "")
    own = report.stage("swap_labels").parity
    assert own is not None and own.blame is not None and own.blame.stage == "swap_labels"


def test_an_unsupported_branch_ends_alone(run: Run, begun: Path) -> None:
    steps = ["touch", "never_here", {"pass": "touch", "name": "child"}, {"pass": "use_sdpa", "after": "touch"}]
    report = run(begun, steps)
    assert statuses(report) == {"touch": "ok", "never_here": "unsupported", "child": "skipped", "use_sdpa": "ok"}
    assert report.exit_code == 0 and report.delivered is not None and report.delivered.stage == "use_sdpa"
    assert "quantum computer" in (report.stage("never_here").reason or "")
    for wanted in ("never_here", "child"):
        report = run(begun, steps, deliver=wanted)
        assert report.exit_code == 4 and report.delivered is None and wanted in (report.reason or "")


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


def test_deliver_fastest(run: Run, begun: Path) -> None:
    report = run(begun, ["touch", "use_sdpa"], deliver="fastest")
    speeds = {row.name: row.mix().vs_reference.ratio for row in report.stages[1:]} | {"reference": 1.0}  # type: ignore[union-attr]
    assert report.delivered is not None and report.delivered.stage == max(speeds, key=lambda name: speeds[name])


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
    assert not _runs(worker) and not _runs(child) and nothing_left(tmp_path / "out", workers)


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


def labelled(path: Path, labels: list[str]) -> dict[str, Any]:
    lines = [json.dumps({"text": text, "label": label}) for text, label in zip(TEXTS * 4, labels, strict=False)]
    path.write_text("\n".join(lines) + "\n")
    return {"shapes": [[1, 8]], "texts": str(path)}


def test_labelled_texts_measure_quality(run: Run, tmp_path: Path) -> None:
    report = run(tmp_path / "out", ["touch"], inputs=labelled(tmp_path / "t.jsonl", ["good", "bad", "mixed"] * 2))
    for row in report.stages:
        assert row.quality is not None and row.quality.metric == "accuracy" and row.quality.n == 6
        assert 0 <= row.quality.value <= 1 and row.quality.change == 0
    # Three of the swapped model's labels would be wrong if parity let it pass.
    wide = {"rel_l2": 9, "max_abs": 99, "cosine_min": -1, "label_flips_max": 1, "metric_drop_max": 0.0}
    best = [entry["label"] for entry in bertopt.load(tmp_path / "out" / "artifact")((TEXTS * 4)[:6])]
    report = run(
        tmp_path / "out", [{"pass": "swap_labels", "limits": wide}], inputs=labelled(tmp_path / "t.jsonl", best)
    )
    quality = report.stage("swap_labels").quality
    assert quality is not None and quality.reference == 1.0
    assert report.exit_code == (3 if quality.change < 0 else 0)


def test_a_label_the_model_does_not_have(run: Run, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"t\.jsonl:2: label must be one of bad, good, mixed; got 'awful'"):
        run(tmp_path / "out", ["touch"], inputs=labelled(tmp_path / "t.jsonl", ["good", "awful"]))
    assert not (tmp_path / "out").exists(), "config.json tells the labels, before anything is loaded"


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


def test_a_limit_that_nothing_measures_is_refused(run: Run, tmp_path: Path) -> None:
    step = {"pass": "touch", "limits": {"metric_drop_max": 0.01, "top_k_overlap_min": 0.9}}
    with pytest.raises(UsageError) as error:
        run(tmp_path, [step], limits={"int8": {"spearman_min": 0.9}})
    found = "\n".join(error.value.problems)
    for words in (
        "limits.int8: spearman_min needs",
        "'touch': limits: metric_drop_max needs",
        "'touch': limits: top_k_overlap_min needs",
    ):
        assert words in found


def test_the_ladder_goes_on_after_a_branch_that_fails() -> None:
    """Every step of the shipped comparison ends only its own branch."""
    path = Path(bertopt.__file__).parent / "recipes" / "ladder.yaml"
    recipe = load(path)
    assert "stop" not in {step.on_fail for step in recipe.steps}
