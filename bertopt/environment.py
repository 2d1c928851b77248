"""What a figure was measured on, and which versions a stage was built with."""

from __future__ import annotations

import functools
import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    "bertopt", "torch", "transformers", "tokenizers", "safetensors", "optimum", "numpy", "onnx", "onnx-ir", "onnxscript",
    "onnxruntime", "onnxruntime-gpu", "openvino", "nncf", "tensorrt", "tensorrt-rtx",
)  # fmt: skip
#: CPU features that decide which kernels run.
ISA = (
    "avx2",
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


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def versions() -> dict[str, str]:
    found = {package: version(package) for package in PACKAGES}
    return {package: v for package, v in found.items() if v is not None}


def describe() -> dict[str, Any]:
    """Hardware, system and package versions of this machine, without importing any of the packages."""
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    name = re.search(r"model name\s*:\s*(.+)", cpuinfo)
    words = set(cpuinfo.split())
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": name.group(1).strip() if name else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "isa": [flag for flag in ISA if flag in words],
        "memory_gib": round(pages / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": versions(),
    }


#: What each optional package is for, and how to get it.
OPTIONAL = {
    "onnxruntime": "pip install 'bertopt[cpu]' to export to ONNX and run it on a CPU",
    "onnxscript": "pip install 'bertopt[cpu]' to export to ONNX",
    "openvino": "pip install 'bertopt[cpu]' for OpenVINO",
    "onnxruntime-gpu": "pip install 'bertopt[gpu]' (not beside onnxruntime) to run ONNX on an NVIDIA GPU",
    "tensorrt": "pip install 'bertopt[gpu]' from NVIDIA's index to build and run TensorRT engines",
    "tensorrt-rtx": "pip install 'bertopt[rtx]' to build TensorRT-RTX engines, without a GPU too",
}
