"""The sources are correct C++ for ARM too, whose kernels share most of their code with x86-64's; where a cross compiler is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).resolve().parent.parent
COMPILER = shutil.which("aarch64-linux-gnu-g++")
#: The kernels' options, by their names.
OPTIONS = dict(re.findall(r"^set\((neon_\w+) (-march=\S+)\)$", (NATIVE / "CMakeLists.txt").read_text(), re.MULTILINE)) if (NATIVE / "CMakeLists.txt").exists() else {}
SOURCES = sorted(path.name for path in (NATIVE / "src").glob("*.cpp") if path.name not in ("cpu_x86.cpp", "module.cpp"))


@pytest.mark.skipif(not COMPILER, reason="needs g++-aarch64-linux-gnu")
@pytest.mark.parametrize("source", [*(f"kernel/{name}.cpp" for name in OPTIONS), *SOURCES])
def test_sources_compile_for_arm(source: str) -> None:
    option = OPTIONS.get(Path(source).stem, "-march=armv8-a")
    command = [str(COMPILER), "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", option, str(NATIVE / "src" / source)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


@pytest.mark.skipif(not (NATIVE / "src").exists(), reason="needs the sources")
def test_every_kernel_of_arm_has_options() -> None:
    assert set(OPTIONS) == {path.stem for path in (NATIVE / "src" / "kernel").glob("neon_*.cpp")} != set()
