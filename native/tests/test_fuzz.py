"""The fuzzer for some seconds, with sanitisers where they are built (see README: cmake, target fuzz)."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent


@pytest.mark.slow
def test_fuzzer_under_sanitisers(tmp_path: Path) -> None:
    """Builds it first, some minutes; `BERTOPT_NATIVE_FUZZ` names a build folder to use instead."""
    if not shutil.which("cmake") or not shutil.which("ninja"):
        pytest.skip("needs cmake and ninja")
    folder = Path(os.environ.get("BERTOPT_NATIVE_FUZZ") or tmp_path)
    configure = [
        "cmake",
        "-S",
        str(SOURCE),
        "-B",
        str(folder),
        "-G",
        "Ninja",
        "-DBERTOPT_NATIVE_FUZZ=ON",
        "-DBERTOPT_NATIVE_SANITIZE=ON",
    ]
    subprocess.run(configure, check=True, capture_output=True)
    subprocess.run(["cmake", "--build", str(folder)], check=True, capture_output=True)
    seconds = os.environ.get("BERTOPT_NATIVE_FUZZ_SECONDS", "20")
    done = subprocess.run([str(folder / "fuzz"), seconds], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and ", 0 findings" in done.stdout, done.stdout + done.stderr
