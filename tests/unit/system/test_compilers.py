"""Which compiler Inductor would call."""

from __future__ import annotations

from pathlib import Path

import pytest

from bertopt.errors import Unsupported
from bertopt.system import compilers


def test_a_compiler_that_cxx_names_must_be_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`doctor` said g++, a recipe went on to Inductor, which calls what CXX names and nothing else."""
    for name in ("g++", "mine"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for named, found in (("mine", "mine"), ("", "g++"), ("no_such_compiler", None)):
        monkeypatch.setenv("CXX", named)
        assert compilers.cplusplus_compiler() == (found and str(tmp_path / found))
    with pytest.raises(Unsupported, match=r"needs a C\+\+ compiler .* set CXX to one"):
        compilers.check_compiler("cpu")
