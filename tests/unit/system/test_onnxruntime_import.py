"""ONNX Runtime reports its use to Microsoft from version 1.29 on, unless a variable says no before it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bertopt.system import onnxruntime_import
from tests.support.artefacts import write_artefact
from tests.support.tiny_models import Tiny

SWITCH = "ORT_DISABLE_TELEMETRY"
_LOAD = "import sys, bertopt; print(bertopt.load(sys.argv[1])(['a cat']))"


@pytest.mark.parametrize("before", [None, "0"])
def test_it_reports_nothing(before: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "an_onnxruntime.py").write_text(f"import os\nseen = os.environ.get({SWITCH!r})\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv(SWITCH, raising=False)
    if before is not None:
        monkeypatch.setenv(SWITCH, before)
    try:
        assert onnxruntime_import.module("an_onnxruntime").seen == "1"
    finally:
        sys.modules.pop("an_onnxruntime", None)
    assert os.environ.get(SWITCH) == before


def test_a_missing_one_is_an_import_error() -> None:
    with pytest.raises(ModuleNotFoundError):
        onnxruntime_import.module("onnxruntime_of_nobody")


def test_running_an_artefact_leaves_no_device_id_in_the_home(tiny: Tiny, tmp_path: Path) -> None:
    """It kept one there, and a database of what was not sent yet."""
    artefact = write_artefact(tiny(), tmp_path / "artefact")
    home = tmp_path / "home"
    home.mkdir()
    path = [str(Path(__file__).parents[3]), *(p for p in sys.path if p)]
    subprocess.run(
        [sys.executable, "-c", _LOAD, str(artefact)], check=True, capture_output=True,
        env={"HOME": str(home), "PYTHONPATH": ":".join(path), "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert not [*home.rglob("*")]
