"""Baselines: two reports, two artefacts, what counts as a regression, and the files for continuous integration."""

from __future__ import annotations

import datetime
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args
from xml.etree import ElementTree

import pytest

import bertopt
from bertopt.checks import gates
from bertopt.commands import compare
from bertopt.errors import IntegrityError, UsageError
from bertopt.pipeline import rows
from bertopt.pipeline.rows import StageBuild
from bertopt.report import diff, diff_table, junit, markdown_summary
from bertopt.report.diff import Change, Tolerances
from bertopt.results import (
    Delivered,
    Failure,
    Gate,
    Invariance,
    Latency,
    Limits,
    Quality,
    Ranking,
    Ratio,
    Report,
    Stage,
    Waiver,
)
from tests.support.artefacts import write_artefact
from tests.support.measured import measured
from tests.support.shared_workers import SharedWorkers, cheap_workers
from tests.support.tiny_models import Tiny

BF16 = Limits(rel_l2=0.06, cosine_min=0.999, label_flips_max=0.02)
TODAY = datetime.date(2026, 6, 1)
HERE = {"cpu": "a CPU", "cores": 2, "isa": ["avx2"], "packages": {"torch": "2.13"}, "python": "3.12"}


def row(
    name: str = "bf16", limits: Limits | None = None, parent: float = 1e-3, waivers: Sequence[Waiver] = (),
    ancestors: Mapping[str, float] | None = None, **changed: Any,
) -> Stage:  # fmt: skip
    """A measured and judged stage; `changed` are figures of its one parity case, or measurements."""
    quality = Quality(metric="accuracy", value=0.9, reference=0.9, change=0.0, n=100)
    fields = {"latency": [timed(2.0), timed(2.0, None)], "quality": quality, "peak_rss_bytes": 2**30, **changed}
    measurements = measured(parent, **fields)
    outcome = gates.judge(
        name, measurements, limits or BF16, changes={"tensors": 1}, today=TODAY,
        waivers=waivers, ancestors=ancestors,
    )  # fmt: skip
    build = StageBuild("eager", "bfloat16", {}, 1.0, 100 * 2**20)
    return rows.make(1, name, outcome, build, measurements, after="reference")


def timed(ratio: float, batch: int | None = 8, spread: float = 0.02, ms: float = 10.0) -> Latency:
    versus = Ratio(ratio=ratio, low=ratio - spread, high=ratio + spread)
    return Latency(kind="shape" if batch else "mix", batch=batch, sequence=batch and 128, n=9, p50_ms=ms, p90_ms=ms,
                   p99_ms=None, texts_per_s=1.0, vs_reference=versus)  # fmt: skip


def report(*rows: Stage, **changed: Any) -> Report:
    first = Stage(index=0, name="reference", status="ok", form="eager", precision="float32", size_bytes=200 * 2**20)
    fields: dict[str, Any] = {
        "bertopt_version": "1", "recipe": {"model": "org/name"}, "environment": HERE,
        "model": {"source": "org/name", "sha256": "0", "family": "bert", "task": "text-classification", "warnings": []},
    }  # fmt: skip
    return Report(**{**fields, **changed}, stages=[first, *rows])


def regressions(before: Stage, after: Stage, **stated: Any) -> list[tuple[str, str]]:
    changes = diff.reports(report(before), report(after), Tolerances(**stated))
    return [(change.gate, change.what) for change in changes if change.regression]


# Reports against reports.


def test_a_report_against_itself() -> None:
    found = diff.conclude(("a", "b"), [], Tolerances(), diff.reports(report(row()), report(row()), Tolerances()))
    assert found.exit_code == 0 and not found.regressions() and "no regression" in found.reason
    assert {change.gate for change in found.changes} == {"status", "parity", "quality", "latency", "size", "memory"}


@pytest.mark.parametrize(
    ("change", "gate", "what"),
    [
        ({"latency": [timed(1.85), timed(2.0, None)]}, "latency", "8 × 128"),
        ({"latency": [timed(2.0), timed(1.0, None)]}, "latency", "end to end"),
        ({"latency": [timed(2.0)]}, "latency", "end to end"),
        ({"latency": [timed(math.nan), timed(2.0, None)]}, "latency", "8 × 128"),
        ({"size_bytes": 111 * 2**20}, "size", "size_bytes"),
        ({"peak_rss_bytes": 2**30 * 2}, "memory", "peak_rss_bytes"),
        ({"quality": Quality(metric="accuracy", value=0.89, reference=0.9, change=-0.01, n=100)}, "quality", "accuracy"),
        ({"quality": Quality(metric="accuracy", value=math.nan, reference=1, change=0, n=100)}, "quality", "accuracy"),
        ({"quality": Quality(metric="accuracy", value=0.9, reference=0.9, change=0, n=50)}, "quality", "accuracy"),
        ({"quality": None}, "quality", "accuracy"),
        ({"status": "failed", "reason": "it broke"}, "status", "failed"),
        ({"status": "unverified", "reason": "no GPU"}, "status", "unverified"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_a_regression(change: dict[str, Any], gate: str, what: str) -> None:
    after = row().model_copy(update=change)
    assert regressions(row(), after) == [(gate, what)]
    if gate != "status":
        assert regressions(after, row()) == [] or gate == "quality" or "nan" in str(change)


@pytest.mark.parametrize(
    "change",
    [
        {"latency": [timed(1.92), timed(2.0, None)]},  # 4 % slower, intervals apart
        {"latency": [timed(1.8, spread=0.3), timed(2.0, None)]},  # 10 % slower, intervals overlap
        {"size_bytes": 109 * 2**20},
        {"quality": Quality(metric="accuracy", value=0.896, reference=0.9, change=-0.004, n=100)},
    ],
    ids=["within 5 %", "overlap", "size", "quality"],
)
def test_what_is_tolerated(change: dict[str, Any]) -> None:
    after = row().model_copy(update=change)
    assert regressions(row(), after) == []
    strict = regressions(row(), after, slower=0.0, bigger=0.0, quality_drop=0.0)
    assert len(strict) == (
        0 if "spread" in str(change) or change.get("latency", [timed(1)])[0].vs_reference.high > 2 else 1
    )


@pytest.mark.parametrize("value", [0.07, math.nan], ids=str)
def test_parity_is_held_to_the_baseline_s_limits(value: float) -> None:
    """A candidate whose recipe allows more than the baseline's did is found, though it calls itself ok."""
    loose = Limits(rel_l2=9.0, cosine_min=0.9)
    after = row(limits=loose, rel_l2=value).model_copy(update={"status": "ok"})
    assert regressions(row(), after) == [("parity", "rel_l2")]
    assert regressions(row(), row(rel_l2=0.05)) == []
    assert regressions(row(), row(rel_l2=0.05), limits=Limits(rel_l2=0.04)) == [("parity", "rel_l2")]
    # What the baseline missed too is one only where it got worse.
    assert regressions(row(rel_l2=0.08), row(rel_l2=0.07)) == []
    assert regressions(row(rel_l2=0.08), row(rel_l2=0.09)) == [("parity", "rel_l2")]


def test_invariance_and_ranking_count_where_they_have_limits() -> None:
    limits = Limits(rel_l2=1.0, invariance_max=1e-3, spearman_min=0.99)
    good, bad = row(limits=limits), row(limits=limits)
    for found, (far, rank) in ((good, (1e-4, 0.999)), (bad, (1e-2, 0.9))):
        found.invariance = Invariance(max_abs=far, cosine_min=1, texts=3, where="text 1")
        found.ranking = Ranking(spearman=rank, top_k_overlap=rank, k=3, n=9)
    assert regressions(good, good) == []
    assert regressions(good, bad) == [("invariance", "invariance_max"), ("ranking", "spearman_min")]
    bad.invariance = None
    assert regressions(good, bad) == [("invariance", "invariance_max"), ("ranking", "spearman_min")]


def test_a_waived_miss_is_no_regression_unless_stated() -> None:
    known = Waiver(stage="bf16", metric="rel_l2", reason="issue 12", expires=datetime.date(2026, 7, 1))
    after = row(limits=Limits(rel_l2=0.06), rel_l2=0.07, waivers=[known])
    assert after.status == "ok"
    assert regressions(row(), after) == []
    (change,) = (c for c in diff.reports(report(row()), report(after), Tolerances()) if c.what == "rel_l2")
    assert change.note == "limit 0.06, waived until 2026-07-01: issue 12"
    assert regressions(row(), after, limits=Limits(rel_l2=0.06)) == [("parity", "rel_l2")]


def test_stages_that_come_and_go() -> None:
    changes = diff.reports(report(row("a"), row("b")), report(row("b"), row("c")), Tolerances())
    assert [(c.stage, c.regression) for c in changes if c.regression] == [("a", "the stage is missing; the baseline has it")]  # fmt: skip
    assert [c.note for c in changes if c.stage == "c"] == ["new: the baseline does not have it"]


def test_milliseconds_of_other_hardware_are_not_comparable(tmp_path: Path) -> None:
    there = {**HERE, "cpu": "another", "packages": {"torch": "2.14", "onnx": "1"}}
    slow = row().model_copy(update={"latency": [timed(2.0, ms=99.0), timed(2.0, None)]})
    (tmp_path / "a.json").write_text(report(row()).model_dump_json(by_alias=True))
    (tmp_path / "b.json").write_text(report(slow, environment=there).model_dump_json(by_alias=True))
    found = compare.compare(tmp_path / "a.json", tmp_path / "b.json", Tolerances())
    assert found.exit_code == 0
    assert found.environment == ["cpu: a CPU → another", "onnx: none → 1", "torch: 2.13 → 2.14"]
    assert {change.note for change in found.changes if change.unit == "ms"} == {"other hardware: not comparable"}


def test_reports_of_other_shapes(tmp_path: Path) -> None:
    """What only one of them was timed on is named, and no regression; with no shape in common the two do not go together."""

    def written(name: str, *batches: int) -> Path:
        timings = [*(timed(2.0, batch) for batch in batches), timed(2.0, None)]
        (tmp_path / name).write_text(report(row(latency=timings)).model_dump_json(by_alias=True))
        return tmp_path / name

    first, second, other = written("a.json", 1, 8), written("b.json", 8, 32), written("c.json", 2)
    found = compare.compare(first, second, Tolerances())
    assert found.exit_code == 0, found.reason
    assert found.environment == ["shapes: 1 × 128 only in the baseline, 32 × 128 only in the candidate; they are not compared"]
    assert {change.what for change in found.changes if change.gate == "latency"} == {"8 × 128", "end to end"}
    with pytest.raises(UsageError, match=r"timed shapes in common; got 1 × 128, 8 × 128 in .*a.json', 2 × 128 in .*c.json'; .* same inputs.shapes"):
        compare.compare(first, other, Tolerances())
    # Nothing timed is another matter: a stage that failed has no figures.
    (tmp_path / "d.json").write_text(report(row().model_copy(update={"status": "failed", "latency": None})).model_dump_json(by_alias=True))
    assert compare.compare(first, tmp_path / "d.json", Tolerances()).exit_code == 3


def test_an_interval_that_says_nothing_is_no_result() -> None:
    nothing = "no result (the interval is too wide)"
    noisy = Ratio(ratio=1.4, low=1e-9, high=2012723481.63)
    unsure = row(latency=[timed(2.0).model_copy(update={"vs_reference": noisy}), timed(2.0, None)])
    for before, after, note in ((row(), unsure, f"[1.98, 2.02] → {nothing}"), (unsure, row(), f"{nothing} → [1.98, 2.02]")):
        changes = diff.reports(report(before), report(after), Tolerances())
        (shape,) = (change for change in changes if change.unit == "x" and change.what == "8 × 128")
        assert shape.regression is None and shape.note == note and None in (shape.before, shape.after)
    (against,) = (
        change for change in diff.artefacts(row(), unsure, Tolerances(), BF16) if change.unit == "x" and change.what == "8 × 128"
    )
    assert (against.note, against.after, against.regression) == (nothing, None, None)


def test_reports_that_do_not_go_together(tmp_path: Path) -> None:
    model = {"source": "x", "family": "roberta", "task": "text-classification"}
    (tmp_path / "a.json").write_text(report().model_dump_json(by_alias=True))
    (tmp_path / "b.json").write_text(report(model=model).model_dump_json(by_alias=True))
    (tmp_path / "c.json").write_text('{"stages": 3}')
    for other, words in (
        ("b", "different models: family bert and roberta"),
        ("c", "is not a report"),
        ("d", "cannot be read"),
    ):
        with pytest.raises(UsageError, match=words):
            compare.compare(tmp_path / "a.json", tmp_path / f"{other}.json", Tolerances())
    with pytest.raises(UsageError, match="--texts goes with two artefacts"):
        compare.compare(tmp_path / "a.json", tmp_path / "a.json", Tolerances(), tmp_path / "t.txt")


def test_stated_limits() -> None:
    assert compare.limits(["rel_l2=0.01", "cosine_min=0.9"]) == Limits(rel_l2=0.01, cosine_min=0.9)
    with pytest.raises(UsageError) as caught:
        compare.limits(["rel_l2", "rel_l3=1", "cosine_min=7"])
    assert len(caught.value.problems) == 3 and "did you mean 'rel_l2'?" in caught.value.problems[1]


def test_old_reports_still_load() -> None:
    old = json.loads(report(row(rel_l2=0.07)).model_dump_json(by_alias=True))
    for gone in ("failures", "waived", "effects"):
        del old["stages"][1][gone]
    del old["stages"][1]["parity"]["blame"]
    old["stages"][1]["parity"] |= {"failures": ["rel_l2 must be at most 0.06; got 0.07"], "failed": ["rel_l2"]}
    again = Report.model_validate(old).stages[1]
    assert again.status == "failed" and "got 0.07" in (again.reason or "") and again.parity is not None


# Files for continuous integration.


NASTY = '<b> & "quotes" ]]> \x00\x1b[31m \ufffe | `x` *y*'


def mixed() -> Report:
    """A report with a stage in every status, and every kind of gate."""
    limits = Limits(rel_l2=0.06, invariance_max=1e-3)
    known = Waiver(stage="waived", metric="rel_l2", reason=f"issue 12 {NASTY}", expires=datetime.date(2999, 1, 1))
    good, waived = row("good"), row("waived", limits=limits, rel_l2=0.07, waivers=[known])
    shaky = Invariance(max_abs=0.1, cosine_min=1, texts=3, where="text 1")
    bad = row("bad", limits=limits, rel_l2=0.08, ancestors={"half": 0.07}, invariance=shaky)
    broke = Stage(index=4, name="broke", status="failed", reason=NASTY, facts={"log": f"last words \ud800 {NASTY}"})
    away = Stage(index=5, name="away", status="unsupported", reason="needs a GPU")
    after = Stage(index=6, name="after", status="skipped", reason="the run stopped")
    back = Stage(index=7, name="back", status="reverted", reason="too far off")
    return report(
        good, waived, bad, broke, away, after, back, exit_code=3, reason=f"'bad' failed: {bad.reason}", wall_s=1.5
    )


def outcomes(text: str) -> dict[tuple[str, str], str]:
    found = {}
    for element in ElementTree.fromstring(text.encode()).iter("testcase"):
        tags = [child.tag for child in element if child.tag != "system-out"]
        found[element.attrib["classname"], element.attrib["name"]] = tags[0] if tags else "passed"
    return found


def test_junit() -> None:
    text = junit.render(mixed())
    found, root = outcomes(text), ElementTree.fromstring(text.encode())
    assert found["run", "exit code"] == "failure"
    assert found["good", "parity"] == found["good", "quality"] == found["waived", "parity"] == "passed"
    assert found["bad", "parity"] == found["bad", "invariance"] == "failure"
    assert found["bad", "build"] == found["bad", "latency"] == "passed" and found["broke", "build"] == "failure"
    assert found["broke", "parity"] == found["good", "ranking"] == "skipped"
    assert {found[name, gate] for name in ("away", "after", "back") for gate in junit.GATES} == {"skipped"}
    (suite,) = root
    counted = [int(suite.attrib[key]) for key in ("tests", "failures", "errors", "skipped")]
    values = list(found.values())
    assert counted == [len(values), values.count("failure"), values.count("error"), values.count("skipped")]
    properties = {p.attrib["name"]: p.attrib["value"] for p in root.iter("property")}
    assert properties["packages.torch"] == "2.13" and properties["isa"] == "avx2"
    broke = next(e for e in root.iter("testcase") if e.attrib == {"classname": "broke", "name": "build", "time": "0"})
    assert (broke.findtext("failure") or "").startswith('<b> & "quotes" ]]> \ufffd\ufffd[31m \ufffd |')
    assert "last words \ufffd <b>" in (broke.findtext("system-out") or "")
    waived = next(
        e for e in root.iter("testcase") if e.attrib["classname"] == "waived" and e.attrib["name"] == "parity"
    )
    assert "waived until 2999-01-01" in (waived.findtext("system-out") or "")


@pytest.mark.parametrize("gate", get_args(Gate))
def test_junit_shows_a_failure_of_every_gate(gate: Gate) -> None:
    failed = Stage(index=1, name="bad", status="failed", failures=[Failure(gate=gate, metric=None, text="too far off")])
    assert outcomes(junit.render(report(failed, exit_code=3, reason="'bad' failed")))["bad", gate] == "failure"


def test_junit_of_a_run_that_raised() -> None:
    found = outcomes(junit.render(report(exit_code=5, reason="no space left on the disk")))
    assert found["run", "exit code"] == "error"


def test_summary() -> None:
    text = markdown_summary.render(mixed())
    lines = text.splitlines()
    assert lines[0] == "## bertopt: failed (exit code 3)" and lines[2].startswith("**'bad' failed: ")
    for title in ("### Reasons", "### Waived", "### Where the difference comes from"):
        assert title in lines
    assert "introduced by `half` (0.07 against its parent)" in text
    assert "<b>" not in text and "&lt;b&gt;" in text and "\\`x\\`" in text
    assert "\x00" not in text and "\x1b" not in text
    good = report(row("good"), delivered=Delivered(stage="good", path="artifact"))
    text = markdown_summary.render(good)
    assert text.startswith("## bertopt: passed") and "Delivered `good` of org/name: FASTER 2.00x [1.98, 2.02]" in text
    assert "Reasons" not in text


def test_files_of_a_comparison(tmp_path: Path) -> None:
    after = row().model_copy(update={"size_bytes": 2**30})
    changes = diff.reports(report(row()), report(after), Tolerances())
    found = diff.conclude(("a", NASTY), ["cpu: a → b"], Tolerances(), changes)
    junit.write(tmp_path / "new" / "j.xml", None, found)
    markdown_summary.write(tmp_path / "new" / "s.md", None, found)
    cases = outcomes((tmp_path / "new" / "j.xml").read_text())
    assert cases["bf16", "size"] == "failure" and cases["bf16", "parity"] == "passed"
    text = (tmp_path / "new" / "s.md").read_text()
    assert text.startswith("## bertopt compare: 1 regression(s)") and "cpu: a → b" in text
    assert "size grew from 104.9 to 1073.7 MB; 10% allowed" in text
    assert [path.name for path in (tmp_path / "new").iterdir()] in (["j.xml", "s.md"], ["s.md", "j.xml"])
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        junit.write(tmp_path / "file" / "j.xml", None, found)
    with pytest.raises(UsageError, match="cannot be written"):
        markdown_summary.write(tmp_path / "new", None, found)


def test_units() -> None:
    shown = [
        diff_table.cells(Change(stage="s", gate="g", what="w", unit=unit, before=2**20, after=None))[3:5]
        for unit in ("", "x", "ms", "bytes")
    ]
    assert shown == [["1.04858e+06", "–"], ["1048576.00x", "–"], ["1048576.00 ms", "–"], ["1.0 MB", "–"]]


# Artefacts against artefacts.


@pytest.fixture(scope="module", autouse=True)
def workers() -> Iterator[SharedWorkers]:
    with cheap_workers("pipeline", "commands.compare") as shared:
        yield shared


@pytest.fixture(scope="module")
def export(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`export(steps, limits=…, task=…)`: the directory of an artefact."""

    def go(*steps: str, task: str = "text-classification", limits: dict[str, Any] | None = None) -> Path:
        out = tmp_path_factory.mktemp("out")
        (out / "t.txt").write_text("the cat sat on the mat\n")
        recipe = {
            "schema_version": 1, "model": str(tiny(task=task)), "device": "cpu", "limits": {"float32": limits or {}},
            "inputs": {"shapes": [[1, 8], [2, 8]], "texts": str(out / "t.txt")}, "steps": [{"pass": step} for step in steps],
        }  # fmt: skip
        report = bertopt.run(recipe, out)
        assert report.exit_code == 0, report.reason
        return out / "artifact"

    return go


@pytest.fixture(scope="module")
def plain(export: Callable[..., Path]) -> Path:
    return export("touch")


WIDE = {"rel_l2": 9, "max_abs": 99, "cosine_min": -1, "label_flips_max": 1}
#: The race of tests proves nothing: whatever it says is no regression.
SLACK: dict[str, Any] = {"slower": 1e9}


def test_equal_artefacts(plain: Path, export: Callable[..., Path]) -> None:
    found = compare.compare(plain, export("use_sdpa"), Tolerances(**SLACK))
    assert found.exit_code == 0, found.reason
    seen = {(change.gate, change.what) for change in found.changes}
    assert {("parity", "rel_l2"), ("latency", "end to end"), ("latency", "2 × 8"), ("size", "size_bytes")} <= seen


def test_an_artefact_that_answers_otherwise(plain: Path, export: Callable[..., Path], tmp_path: Path) -> None:
    other = export("swap_labels", limits=WIDE)
    found = compare.compare(plain, other, Tolerances(**SLACK))
    assert found.exit_code == 3 and found.reason.startswith("'swap_labels' regressed: ")
    assert "rel_l2" in {change.what for change in found.regressions()}
    assert compare.compare(plain, other, Tolerances(**SLACK, limits=Limits(**WIDE))).exit_code == 0
    answers = bertopt.load(plain)(["the cat sat on the mat", "a good film"])
    lines = [json.dumps({"text": t, "label": a["label"]}) for t, a in zip(["the cat sat on the mat", "a good film"], answers, strict=True)]  # fmt: skip
    (tmp_path / "t.jsonl").write_text("\n".join(lines) + "\n")
    found = compare.compare(plain, plain_copy(plain, tmp_path), Tolerances(**SLACK), tmp_path / "t.jsonl")
    assert found.exit_code == 0 and [c.after for c in found.changes if c.gate == "quality"] == [1.0]


def test_a_spoilt_word_between_artefacts_of_reduced_precision(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """Their limits name no figure of parity that one word of many would miss."""
    from safetensors.torch import load_file, save_file

    checkpoint = tiny("bert")
    spoilt = Path(shutil.copytree(checkpoint, tmp_path / "spoilt"))
    state = load_file(spoilt / "model.safetensors")
    state["bert.embeddings.word_embeddings.weight"][40] *= -1
    save_file(state, spoilt / "model.safetensors", {"format": "pt"})
    first, same, other = (
        write_artefact(source, tmp_path / name, form)
        for source, name, form in ((checkpoint, "first", "native"), (checkpoint, "same", "openvino"), (spoilt, "other", "native"))
    )
    tolerances = Tolerances(**SLACK, bigger=9, memory=9)
    right = compare.compare(first, same, tolerances)
    assert right.exit_code == 0, right.reason
    found = compare.compare(first, other, tolerances)
    assert found.exit_code == 3 and [change.gate for change in found.regressions()] == ["coverage"]
    assert "one row of the coverage sweeps" in found.reason


def plain_copy(directory: Path, folder: Path) -> Path:
    return Path(shutil.copytree(directory, folder / "copy"))


def test_artefacts_that_do_not_go_together(plain: Path, export: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is another kind of model"):
        compare.compare(plain, export("touch", task="fill-mask"), Tolerances())
    with pytest.raises(UsageError, match="two artefacts or two reports; got one of each"):
        compare.compare(plain, plain.parent, Tolerances())
    with pytest.raises(UsageError, match="the same directory"):
        compare.compare(plain, plain / ".." / "artifact", Tolerances())
    damaged = plain_copy(plain, tmp_path)
    (damaged / "config.json").write_text("{}")
    with pytest.raises(IntegrityError):
        compare.compare(plain, damaged, Tolerances())


def test_output_directories_hold_reports(plain: Path) -> None:
    found = compare.compare(plain.parent, plain.parent / "report.json", Tolerances())
    assert found.exit_code == 0 and "no regression" in found.reason
