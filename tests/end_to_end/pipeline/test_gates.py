"""Recipes end to end on a tiny model: what gates, limits and waivers make of a run."""

from __future__ import annotations

import datetime
import json
import re
from pathlib import Path
from typing import Any

import pytest

import bertopt
from bertopt import stages
from bertopt.commands.verify import verify
from bertopt.errors import UsageError
from tests.support.pipeline_runs import TEXTS, Run, reused, stage_names, statuses
from tests.support.tiny_models import Tiny


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
