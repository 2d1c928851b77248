"""The compilers that torch's Inductor calls."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

from bertopt.errors import Unsupported


def check_compiler(device: str) -> None:
    """Raise Unsupported where Inductor (on a CPU) or Triton's launcher (on CUDA) would find no compiler or no headers."""
    if device == "cpu":
        if not (os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")):
            raise Unsupported(
                "torch.compile needs a C++ compiler on a CPU; install g++ (apt-get install g++) or set CXX"
            )
        return
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        raise Unsupported("torch.compile needs a C compiler on CUDA; install gcc (apt-get install gcc) or set CC")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        version = sysconfig.get_python_version()
        raise Unsupported(
            f"torch.compile needs Python's headers on CUDA and there is no {header}; apt-get install python{version}-dev"
        )
