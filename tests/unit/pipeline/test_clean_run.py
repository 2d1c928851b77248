"""What the new interpreter is given in which a delivered artefact must answer as it did when it was measured."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bertopt.errors import BertoptError, ResourceError, WorkerCrashed
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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the variable is glibc's")
def test_memory_that_nobody_wrote_is_not_zero_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A model that added a buffer that it had not written was right where memory is fresh from the kernel, and was delivered."""
    given: dict[str, str] = {}
    run = subprocess.run

    def note(*_: Any, env: dict[str, str], **__: Any) -> subprocess.CompletedProcess[str]:
        given.update(env)
        return subprocess.CompletedProcess((), 1, "", "")

    monkeypatch.setattr(subprocess, "run", note)
    with pytest.raises(WorkerCrashed):
        clean_run.answers(tmp_path, "cpu", compiled=False)
    code = "import numpy as np; x = np.empty(1 << 20, np.float32); assert np.isfinite(x).all() and (np.abs(x) > 1e9).all(), x"
    assert run([sys.executable, "-c", code], env=given, check=False).returncode == 0


@pytest.mark.parametrize(
    ("code", "log", "raised", "says"),
    [
        (1, "Traceback …\nOSError: [Errno 28] No space left on device", ResourceError, "No space left on device); free space there or in TMPDIR"),
        (-9, "", ResourceError, "with -9 (no message), as happens when memory runs out"),
        (1, "MemoryError", ResourceError, "as happens when memory runs out"),
        (1, "Traceback …\nKeyError: 'x'", WorkerCrashed, "with 1"),
    ],
)
def test_an_interpreter_that_ends_for_want_of_disk_or_memory_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int, log: str, raised: type[BertoptError], says: str
) -> None:
    """A full TMPDIR, or the kernel that killed it, ended the run with exit code 1, as for a bug."""
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess((), code, "", log))
    with pytest.raises(raised) as error:
        clean_run.answers(tmp_path, "cpu", compiled=False)
    assert says in str(error.value) and error.value.log == log
