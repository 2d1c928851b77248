"""Verification of an artefact: what it says of its timing, and how a server is judged."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bertopt.checks import gates
from bertopt.commands import verify as command
from bertopt.commands.verify import timed_in_full
from bertopt.commands.verify_url import _differences, _judged
from bertopt.report import formatting, markdown_summary
from bertopt.results import Limits, Report
from bertopt.runtime import replay


def test_a_quick_export_does_not_make_a_verification_quick() -> None:
    exported = {"model": "org/name", "timing": {"quick": True, "mix_s": 2.5}}
    found = timed_in_full(exported)
    assert formatting.is_quick(exported) and not formatting.is_quick(found)
    assert found["timing"]["mix_s"] == 2.5 and timed_in_full({}) == {}


def test_a_verification_says_how_long_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Markdown and JUnit said 0 s after 20 minutes."""
    report = Report(bertopt_version="0", recipe={}, environment={"cores": 2}, model={})
    monkeypatch.setattr(command, "opening", lambda *_: nullcontext(SimpleNamespace(path=Path("artifact"), manifest=None)))
    monkeypatch.setattr(command, "_verified", lambda *_: report)
    times = iter((100.0, 1307.0))
    monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=lambda: next(times)))
    assert command.verify(Path("artifact")).wall_s == 1207.0
    assert "Measured on cores 2; 1207 s." in markdown_summary.render(report)


@pytest.mark.parametrize("precision", ["int8", "bfloat16", "float32"])
def test_a_server_must_answer_as_this_artefact_does_whatever_its_limits_leave_open(precision: Any) -> None:
    """Those of reduced precision name no figure that answers are compared by: random scores passed."""
    rng = np.random.default_rng(0)
    expected = rng.standard_normal((40, 8)).astype(np.float32)
    noise = rng.standard_normal(expected.shape)
    noise *= np.linalg.norm(expected, axis=1, keepdims=True) / np.linalg.norm(noise, axis=1, keepdims=True)
    limits = gates.effective_limits(precision)
    median, worst = replay.MEDIAN_TOLERANCE[precision], replay.TOLERANCE[precision]

    def failures(got: np.ndarray) -> str:
        values = _differences(expected, got, classifies=False)
        found = _judged("http://there", len(got), values, limits if precision != "float32" else Limits(), precision, [1.0], None)
        assert found.exit_code == (3 if found.failures else 0)
        return " ".join(found.failures)

    assert failures(expected + 0.8 * median * noise) == ""
    assert "median_text" in failures(expected + 1.2 * median * noise)
    one = expected.copy()
    largest = np.linalg.norm(expected, axis=1).argmax()
    one[largest] += 1.2 * worst * noise[largest]
    assert "worst_text" in failures(one)
    assert "worst_text" in failures(rng.permutation(expected)) and "median_text" in failures(expected * np.nan)
