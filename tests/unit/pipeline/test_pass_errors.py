"""Whose fault an error is that nobody foresaw."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from bertopt import stages
from bertopt.core import Rewrite
from bertopt.errors import IntegrityError, PassFailed, WorkerCrashed, WorkerRaised
from bertopt.passes import ExportOnnx, QuantizeInt8
from bertopt.pipeline import pass_errors
from tests.support.example_passes import Touch


def test_an_error_nobody_foresaw_names_the_last_pass_of_somebody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that its runtime could not open ended with exit code 1, a bug in bertopt, whoever wrote it."""
    before = [Rewrite(name="use_sdpa", options={})]
    monkeypatch.setattr(stages, "read_manifest", lambda path: SimpleNamespace(passes=before))
    raised, parent = WorkerRaised("Fail: no such input", "Traceback"), Path("parent")
    assert pass_errors.explained(raised, ExportOnnx(), parent) is raised
    found = pass_errors.explained(raised, Touch(), parent)
    assert isinstance(found, PassFailed) and found.exit_code == 3 and found.log == "Traceback"
    assert str(found).startswith("Fail: no such input; pass 'touch', which is not part of bertopt, made this model")
    for other in (WorkerCrashed("the worker ended with signal SIGSEGV"), IntegrityError("damaged")):
        assert pass_errors.explained(other, Touch(), parent) is other
    before.append(Touch().record())
    assert "pass 'touch'" in str(pass_errors.explained(raised, QuantizeInt8(), parent))
