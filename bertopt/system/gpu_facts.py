"""What the doctor knows of a machine's GPU, and how it is read."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bertopt.system import compilers, gpu
from bertopt.system.gpu import GpuState

_PCI = Path("/sys/bus/pci/devices")
_NVIDIA, _DISPLAY = "0x10de", "0x03"
#: Tried in a process that imports no torch, as a service that runs an ONNX artefact does.
_PROBE = """
import contextlib, ctypes, json, os
facts = {}
with contextlib.suppress(Exception):
    from bertopt.system import onnxruntime_import
    onnxruntime = onnxruntime_import.module()
    facts["onnxruntime_cuda"] = getattr(onnxruntime, "cuda_version", None) or None
    if facts["onnxruntime_cuda"]:
        with contextlib.redirect_stdout(open(os.devnull, "w")):
            onnxruntime.preload_dlls()
        facts["missing"] = []
        major = facts["onnxruntime_cuda"].split(".")[0]
        # What the provider is linked with, one library of each package, and cuDNN, which newer ones load when they need it.
        linked = ["libcublasLt.so." + major, "libcurand.so.10", "libcudart.so." + major] + ["libcufft.so.11"] * (major == "12")
        for name in (*linked, "libcudnn.so.9"):
            try:
                ctypes.CDLL(name)
            except OSError:
                facts["missing"].append(name)
with contextlib.suppress(Exception):
    import torch
    facts["torch_cuda"], facts["torch_targets"] = torch.version.cuda, torch.cuda.get_arch_list()
    from bertopt.system.compilers import has_cuda_headers
    facts["cuda_headers"] = has_cuda_headers()
print("facts", json.dumps(facts))
"""


@dataclass(frozen=True)
class GpuFacts:
    """The defaults are those of a healthy machine. What could not be read is None."""

    state: GpuState | None = None
    """What NVML tells."""
    in_pci: bool = False
    """Whether an NVIDIA GPU is on the PCI bus, whether or not this process may use it."""
    container: bool = False
    torch_cuda: str | None = None
    torch_targets: tuple[str, ...] = ()
    """What the wheel holds code for, as torch names it: sm_90, compute_90, …"""
    onnxruntime_cuda: str | None = None
    missing_libraries: tuple[str, ...] = ()
    """Of those that onnxruntime-gpu needs and no loader finds."""
    c_compiler: str | None = "/usr/bin/gcc"
    python_header: bool = True
    cuda_headers: bool = True
    """Whether torch finds them, as `compilers.has_cuda_headers` says."""
    others_bytes: int = 0
    """GPU memory that is in use, bertopt not running."""


def read(run: Callable[[str, float], subprocess.CompletedProcess[str]], gpus: int) -> GpuFacts:
    """Look at the GPU of this machine. `run` runs Python code in a process like a worker."""
    in_pci, container = _in_pci(), _in_container()
    if not gpus:
        return GpuFacts(in_pci=in_pci, container=container)
    try:
        said = [line for line in run(_PROBE, 60.0).stdout.splitlines() if line.startswith("facts ")]
        facts = json.loads(said[-1].removeprefix("facts ")) if said else {}
    except (subprocess.TimeoutExpired, ValueError):
        facts = {}
    state = gpu.state()
    return GpuFacts(
        state=state, in_pci=in_pci, container=container, torch_cuda=facts.get("torch_cuda"),
        torch_targets=tuple(facts.get("torch_targets", ())), onnxruntime_cuda=facts.get("onnxruntime_cuda"),
        missing_libraries=tuple(facts.get("missing", ())), c_compiler=compilers.c_compiler(),
        python_header=Path(sysconfig.get_paths()["include"], "Python.h").is_file(), cuda_headers=facts.get("cuda_headers", True),
        others_bytes=state.used_bytes if state else 0,
    )  # fmt: skip


def runs_here(targets: tuple[str, ...], capability: str) -> bool:
    """Whether a wheel with code for `targets` runs on `capability` (sm90): the same major, no newer minor, or PTX of an
    older one, which the driver compiles."""
    here = int(re.sub(r"\D", "", capability))
    for target in targets:
        found = re.fullmatch(r"(sm|compute)_(\d+)[af]?", target)
        if found is None:
            continue
        number = int(found[2])
        if (found[1] == "sm" and number // 10 == here // 10 and number <= here) or (found[1] == "compute" and number <= here):
            return True
    return False


def _in_pci() -> bool:
    def value(device: Path, name: str) -> str:
        try:
            return (device / name).read_text().strip()
        except OSError:
            return ""

    devices = _PCI.iterdir() if _PCI.is_dir() else ()
    return any(value(one, "vendor") == _NVIDIA and value(one, "class").startswith(_DISPLAY) for one in devices)


def _in_container() -> bool:
    return Path("/.dockerenv").exists() or Path("/run/.containerenv").exists() or "KUBERNETES_SERVICE_HOST" in os.environ
