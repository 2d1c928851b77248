"""What a figure was measured on, and which versions a stage was built with."""

from __future__ import annotations

import functools
import os
import platform
import re
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from bertopt.errors import Unsupported
from bertopt.system import limits

PACKAGES = (
    "bertopt", "torch", "transformers", "tokenizers", "safetensors", "optimum", "numpy", "onnx", "onnx-ir", "onnxscript",
    "onnxruntime", "onnxruntime-gpu", "openvino", "nncf", "tensorrt", "tensorrt-rtx",
    "bertopt-native",
)  # fmt: skip
#: CPU features that decide which kernels run.
ISA = (
    "avx2",
    "avx_vnni",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_int8",
    "amx_bf16",
    "asimddp",
    "i8mm",
    "bf16",
)
#: Any of these makes products of that precision fast and, for INT8, exact: without VNNI the sums of two products
#: saturate. Runtimes go on without them, and say nothing.
NATIVE = {
    "int8": {"avx_vnni", "avx512_vnni", "amx_int8", "asimddp", "i8mm"},
    "bfloat16": {"avx512_bf16", "amx_bf16", "bf16"},
}


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def versions() -> dict[str, str]:
    found = {package: version(package) for package in PACKAGES}
    return {package: v for package, v in found.items() if v is not None}


def isa(cpuinfo: str | None = None) -> list[str]:
    """The features of this CPU that decide which kernels run."""
    words = set((_cpuinfo() if cpuinfo is None else cpuinfo).split())
    return [flag for flag in ISA if flag in words]


def _cpuinfo() -> str:
    return Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""


def describe() -> dict[str, Any]:
    """Hardware, system and package versions of this machine, without importing any of the packages."""
    cpuinfo = _cpuinfo()
    name = re.search(r"model name\s*:\s*(.+)", cpuinfo)
    return {
        "cpu": name.group(1).strip() if name else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "isa": isa(cpuinfo),
        "memory_gib": round(limits.memory_bytes() / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": versions(),
    }


def check_isa(precision: str, measured_with: Sequence[str], device: str) -> None:
    """Raise Unsupported if an artefact was measured with CPU instructions for its precision that this CPU lacks.

    One that was exported without them was measured without them, so it may run anywhere.
    """
    native = NATIVE.get(precision, set())
    then, now = set(measured_with) & native, set(isa()) & native
    if device == "cpu" and then and not now:
        raise Unsupported(
            f"the artefact is {precision} and was measured with {', '.join(sorted(then))}; this CPU has none of "
            f"{', '.join(sorted(native))} and would run it slowly or less exactly; export again on a machine like this one, "
            "or deliver a float32 stage"
        )


#: Packages that an extra of bertopt brings.
OPTIONAL = ("onnxruntime", "onnxscript", "openvino", "onnxruntime-gpu", "tensorrt", "tensorrt-rtx")
