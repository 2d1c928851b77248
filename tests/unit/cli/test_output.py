"""What the command line prints, on any terminal."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bertopt.cli import export, main
from bertopt.cli.app import escaping
from bertopt.commands.bulk import Answered
from bertopt.core import Context, Eager, Pass, Result
from bertopt.passes import registry
from tests.support.reports import LONG, full


def test_what_a_terminal_does_not_know_is_escaped() -> None:
    """`inspect` ended in a UnicodeEncodeError, as for a bug, where the locale was C."""
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding="ascii")
    escaping(stream)
    print("1.3 × 同 🤖", file=stream, flush=True)
    assert written.getvalue() == b"1.3 \\u00d7 \\u540c \\ud83e\\udd16\n"
    assert json.loads(b'"' + written.getvalue().strip() + b'"') == "1.3 × 同 🤖"
    escaping(io.StringIO())  # a stream that encodes nothing


def test_doubtful_timings_are_one_line_with_the_delivered_stage_first(capsys: pytest.CaptureFixture[str]) -> None:
    """It was in the report alone, and the table shows figures that nobody should trust."""
    report = full()
    timings = sum(len(stage.latency or []) for stage in report.stages)

    def said() -> list[str]:
        export.show(report, Path("out"), False, False)
        return [line for line in capsys.readouterr().err.splitlines() if "doubtful" in line]

    (line,) = said()
    assert line.startswith(f"warning: 1 of {timings} timings are doubtful: 'unsure', end to end: the spread is wide <script>") and "\x1b" not in line
    mix = report.stage(LONG).mix()
    assert mix is not None
    mix.warning = "CPU steal: the hypervisor took 9% of the CPUs"
    (line,) = said()
    assert line == (
        f"warning: 2 of {timings} timings are doubtful: '{LONG}', end to end: CPU steal: the hypervisor took 9% of the CPUs; "
        "out/report.html lists all; after noise, repeat on a calmer machine, or with larger timing.shape_s and timing.mix_s"
    )
    report.recipe["timing"] = {"quick": True}  # the table says it already
    assert said() == []
    for stage in report.stages:
        stage.latency = None
    report.recipe["timing"] = {}
    assert said() == []


def test_passes_lists_one_that_says_nothing_of_itself(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass of a package without a docstring ended the list in an IndexError."""

    class Quiet(Pass[Eager, Eager]):
        def __call__(self, model: Eager, ctx: Context) -> Result[Eager]:
            return model.rewritten(self)

    monkeypatch.setattr(registry, "_registered", {**registry._registered, "quiet": Quiet})
    with pytest.raises(SystemExit, match="0"):
        main(["passes"])
    assert capsys.readouterr().out.endswith("quiet  (Eager → Eager)\n  \n")


def test_a_failed_run_says_where_its_report_is_and_ends_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    report = full(failed=True)
    export.show(report, Path("out"), False, False)
    assert capsys.readouterr().err.endswith(f"\nreport: out/report.html\n{report.reason}\n")


def test_verify_warns_of_doubtful_timings_too(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bertopt.commands.verify.verify", lambda *_: full())
    with pytest.raises(SystemExit):
        main(["verify", "artifact", "--against", "org/model"])
    assert "timings are doubtful: 'unsure', end to end: the spread is wide" in capsys.readouterr().err


@pytest.mark.parametrize(("cut", "said"), [(0, ""), (1200, "; longer than the model takes, and cut off: 1,200")])
def test_progress_of_bulk_does_not_stand_before_the_last_line(
    cut: int, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A terminal showed "20,000 rows20000 rows in answers"."""

    def bulk(*given: Any) -> Answered:
        given[7](20_000)
        return Answered(20_000, cut)

    monkeypatch.setattr("bertopt.commands.bulk.bulk", bulk)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with pytest.raises(SystemExit):
        main(["bulk", "texts.jsonl", "answers", "--artifact", "artifact"])
    written = capsys.readouterr()
    assert written.err.endswith("20,000 rows\r") and written.out == f"20000 rows in answers{said}\n"
