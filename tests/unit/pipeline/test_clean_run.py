"""What the new interpreter is given in which a delivered artefact must answer as it did when it was measured."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from bertopt.errors import WorkerCrashed
from bertopt.pipeline import clean_run


def test_products_are_as_exact_as_in_the_workers_that_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """NVIDIA's containers have torch round float32 products to TF32, errors of 1e-3; answers in float32 may differ by 1e-3."""
    given: dict[str, str] = {}

    def run(*_: Any, env: dict[str, str], **__: Any) -> subprocess.CompletedProcess[str]:
        given.update(env)
        return subprocess.CompletedProcess((), 1, "", "")

    monkeypatch.setenv("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(WorkerCrashed):
        clean_run.answers(tmp_path, "cuda", compiled=False)
    assert given["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path)
    assert not [name for name in given if "TF32" in name]
