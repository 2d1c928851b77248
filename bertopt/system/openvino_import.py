"""OpenVINO and NNCF, imported so that they send nothing over the network.

Importing either imports `openvino_telemetry`, which reports the import, every conversion and every quantisation to
Google Analytics unless a file in the user's home says no. Where that package is missing both do without.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

from bertopt.errors import missing_library

#: The package that reports.
TELEMETRY = "openvino_telemetry"
#: oneTBB's switch, meant for sanitizers, which preload an allocator too.
_TBB_SHALLOW = "TBB_ENABLE_SANITIZERS"


def openvino() -> Any:
    """The `openvino` package. Raises Unsupported with the install line where it is missing."""
    try:
        with _without_telemetry():
            import openvino as module
    except ImportError as error:
        raise missing_library("OpenVINO models need openvino", "'bertopt[openvino]'", failed=error) from error
    return module


def nncf() -> Any:
    """The `nncf` package, logging errors only. Raises Unsupported with the install line where it is missing."""
    openvino()
    try:
        with _without_telemetry():
            import nncf as module
    except ImportError as error:
        raise missing_library("quantising OpenVINO models needs nncf", "'bertopt[cpu]'", failed=error) from error
    module.set_log_level(logging.ERROR)
    return module


def runs_bfloat16() -> bool:
    """Whether OpenVINO has bfloat16 kernels for this CPU. Elsewhere it would run float32, and say nothing."""
    return "BF16" in openvino().Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


@contextlib.contextmanager
def one_allocator() -> Iterator[None]:
    """Compile a model in this context: memory comes from the allocator that LD_PRELOAD names, and goes back to it.

    When a process compiles its first model, TBB loads its library of processor topologies with RTLD_DEEPBIND, so that this frees with libc what
    another allocator, such as jemalloc, has allocated: the process aborts. TBB does not where this variable is set.
    """
    if not os.environ.get("LD_PRELOAD") or _TBB_SHALLOW in os.environ:
        yield
        return
    os.environ[_TBB_SHALLOW] = "1"
    try:
        yield
    finally:
        os.environ.pop(_TBB_SHALLOW, None)


@contextlib.contextmanager
def _without_telemetry() -> Iterator[None]:
    """In this context `import openvino_telemetry` fails, as if it were not installed."""
    there = TELEMETRY in sys.modules
    held = sys.modules.get(TELEMETRY)
    sys.modules[TELEMETRY] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[TELEMETRY]
        if there and held is not None:
            sys.modules[TELEMETRY] = held
