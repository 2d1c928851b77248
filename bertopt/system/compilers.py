"""The compilers that torch's Inductor calls."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

from bertopt.errors import Unsupported


def check_packaging(device: str) -> None:
    """As `check_compiler`; and raise Unsupported where AOTInductor could not compile its C++ launcher for CUDA."""
    check_compiler(device)
    if device == "cpu":
        return
    if not cplusplus_compiler():
        raise Unsupported("package_aot needs a C++ compiler on CUDA; install g++ (apt-get install g++) or set CXX to one")
    if not has_cuda_headers():
        raise Unsupported(
            "package_aot needs CUDA's headers, which torch's wheels do not bring, and there is no include/cuda_runtime.h with include/crt in "
            "$CUDA_HOME, beside nvcc or in /usr/local/cuda; install the CUDA toolkit of torch's version, or set CUDA_HOME"
        )


def c_compiler() -> str | None:
    """Return the C compiler that Triton calls, or None; where CC names one, no other is called."""
    named = os.environ.get("CC")
    return shutil.which(named) if named else shutil.which("gcc") or shutil.which("clang")


def cplusplus_compiler() -> str | None:
    """Return the C++ compiler that Inductor calls, or None; where CXX names one, no other is called."""
    named = os.environ.get("CXX")
    return shutil.which(named) if named else shutil.which("g++") or shutil.which("clang++")


def has_cuda_headers() -> bool:
    """Whether torch and the compiler find CUDA's headers. torch looks for CUDA_HOME when `cpp_extension` is first imported.

    NVIDIA's package of the runtime for pip has cuda_runtime.h, but not the headers in crt/ that it includes.
    """
    from torch.utils import cpp_extension

    home = cpp_extension.CUDA_HOME
    stated = os.pathsep.join(os.environ.get(name, "") for name in ("CUDA_INC_PATH", "CPATH", "CPLUS_INCLUDE_PATH")).split(os.pathsep)
    folders = [] if home is None else [Path(home, "include"), *(Path(folder) for folder in stated if folder)]
    return any((folder / "cuda_runtime.h").is_file() and (folder / "crt").is_dir() for folder in folders)


def check_compiler(device: str) -> None:
    """Raise Unsupported where Inductor (on a CPU) or Triton's launcher (on CUDA) would find no compiler or no headers."""
    if device == "cpu":
        if not cplusplus_compiler():
            raise Unsupported(
                "torch.compile needs a C++ compiler on a CPU; install g++ (apt-get install g++) or set CXX to one"
            )
        return
    if not c_compiler():
        raise Unsupported("torch.compile needs a C compiler on CUDA; install gcc (apt-get install gcc) or set CC")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        version = sysconfig.get_python_version()
        raise Unsupported(
            f"torch.compile needs Python's headers on CUDA and there is no {header}; apt-get install python{version}-dev"
        )
