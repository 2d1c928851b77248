"""Files for continuous integration: JUnit's XML and a Markdown summary, of runs and of comparisons."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import get_args
from xml.etree import ElementTree

import pytest

from bertopt.errors import UsageError
from bertopt.report import diff, junit, markdown_summary
from bertopt.report.diff import Tolerances
from bertopt.results import Delivered, Failure, Gate, Invariance, Limits, Report, Stage, Waiver
from tests.support.judged import report, row

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
