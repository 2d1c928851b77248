"""What NVML and the driver report about the GPU: what it is, which processes use it, how fast it may run.

Uses nvidia-ml-py (extra `gpu`); without it, or without a driver, every question is answered by None. The GPU asked
about is the first that CUDA_VISIBLE_DEVICES names by number or UUID, else number 0. Not seen: which process of another
container uses how much, and GPUs that CUDA numbers in another order than PCI.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Reasons of NVML for a clock below the one asked for that a healthy machine does not have; power is a race's concern alone.
_THROTTLING = {0x8: "hardware slowdown", 0x20: "temperature", 0x40: "temperature", 0x80: "power supply"}
_POWER = {0x4: "power limit"}
_MODES = {0: "default", 1: "exclusive", 2: "prohibited", 3: "exclusive"}
_DRIVER = Path("/proc/driver/nvidia/version")
#: Remedy for a GPU that only one process may use.
SHARE = "end the process that holds it, or sudo nvidia-smi -c DEFAULT"
_MPS_PIPE = "/tmp/nvidia-mps"  # noqa: S108  (MPS's own default)


@dataclass(frozen=True)
class GpuState:
    """One GPU at one moment. The defaults are those of a healthy, idle one."""

    name: str = "NVIDIA H100"
    capability: str = "sm90"
    driver: str = "580.65.06"
    driver_cuda: tuple[int, int] = (13, 0)
    """The newest CUDA that the driver runs."""
    used_bytes: int = 0
    compute_mode: str = "default"
    """default, exclusive or prohibited"""
    mig: bool = False
    mps: bool = False
    clock_mhz: int | None = None
    throttling: tuple[str, ...] = ()
    processes: Mapping[int, int | None] = field(default_factory=dict)
    """Bytes by process id, None where NVML does not tell."""

    @property
    def refuses_second_process(self) -> bool:
        """Whether bertopt's workers could not use it at the same time."""
        return self.compute_mode == "prohibited" or (self.compute_mode == "exclusive" and not self.mps)


def state() -> GpuState | None:
    """Return the state of the GPU, or None where NVML cannot be asked."""
    found = _device()
    if found is None:
        return None
    nvml, device = found

    def ask(name: str, *args: Any, otherwise: Any = None) -> Any:
        try:
            return getattr(nvml, name)(*args)
        except (nvml.NVMLError, AttributeError):  # not every GPU, driver or binding knows every question
            return otherwise

    memory = ask("nvmlDeviceGetMemoryInfo", device)
    version = int(ask("nvmlSystemGetCudaDriverVersion_v2", otherwise=0))
    reasons = int(ask("nvmlDeviceGetCurrentClocksThrottleReasons", device, otherwise=0))
    running = ask("nvmlDeviceGetComputeRunningProcesses", device, otherwise=())
    return GpuState(
        name=_text(ask("nvmlDeviceGetName", device, otherwise="unknown")),
        capability="sm{}{}".format(*ask("nvmlDeviceGetCudaComputeCapability", device, otherwise=(0, 0))),
        driver=_text(ask("nvmlSystemGetDriverVersion", otherwise="")), driver_cuda=(version // 1000, version % 1000 // 10),
        used_bytes=int(memory.used) if memory else 0,
        compute_mode=_MODES.get(ask("nvmlDeviceGetComputeMode", device, otherwise=0), "default"),
        mig=bool(ask("nvmlDeviceGetMigMode", device, otherwise=(0, 0))[0]), mps=_mps(),
        clock_mhz=ask("nvmlDeviceGetClockInfo", device, getattr(nvml, "NVML_CLOCK_SM", 1)),
        throttling=tuple(dict.fromkeys(why for bit, why in (_THROTTLING | _POWER).items() if reasons & bit)),
        processes={int(one.pid): None if one.usedGpuMemory is None else int(one.usedGpuMemory) for one in running},
    )  # fmt: skip


def memory_of(pid: int, used_before: int | None, now: GpuState | None = None) -> int | None:
    """Return the GPU memory that process `pid` holds, its CUDA context included, or None where nothing tells.

    Allocators of torch, ONNX Runtime and TensorRT keep what they took, so what a worker holds at its end is its peak. NVML
    names processes of this PID namespace alone: elsewhere it is what the GPU lost since `used_before`, which is right as
    long as nothing else on it allocates.
    """
    now = now or state()
    if now is None:
        return None
    if (held := now.processes.get(pid)) is not None:
        return held
    return None if used_before is None else max(0, now.used_bytes - used_before)


def driver() -> str | None:
    """Return the version of NVIDIA's kernel driver, or None; needs neither NVML nor CUDA."""
    with contextlib.suppress(OSError):
        if version := re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", _DRIVER.read_text("utf-8", "replace")):
            return version[1]
    return None


def capability() -> str:
    """Return the compute capability of the GPU that torch uses, such as `sm86`. Raises what torch does where it sees none."""
    import torch

    return "sm{}{}".format(*torch.cuda.get_device_capability())


def visible(value: str | None) -> int | str:
    """Return the GPU that CUDA_VISIBLE_DEVICES names first: its number, or its UUID."""
    first = (value or "").split(",")[0].strip()
    if first.isdecimal():
        return int(first)
    return first if first.startswith("GPU-") else 0


def _mps() -> bool:
    pipe = os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or _MPS_PIPE
    return Path(pipe, "control").exists()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


@functools.cache
def _device() -> tuple[Any, Any] | None:
    """NVML, started, and its handle of the GPU."""
    try:
        import pynvml as nvml
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        which = visible(os.environ.get("CUDA_VISIBLE_DEVICES"))
        handle: Callable[[Any], Any] = (
            nvml.nvmlDeviceGetHandleByIndex if isinstance(which, int) else nvml.nvmlDeviceGetHandleByUUID
        )
        return nvml, handle(which)
    except (nvml.NVMLError, OSError, AttributeError):
        return None
