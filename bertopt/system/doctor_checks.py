"""The checks of `bertopt doctor`, each for one cause.

A check is a function of `Machine` that returns a `Finding`, several, or None. To add one, write it and name it in `CHECKS`.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from bertopt.system import gpu_checks
from bertopt.system.environment import NATIVE
from bertopt.system.finding import ALL, Finding
from bertopt.system.machine import MODULES, Machine

_ONNX = ("export_onnx", "fuse_ort", "cast_onnx_half", "quantize_int8", "convert_openvino", "build_tensorrt")
_RUN_ONNX = _ONNX[:4]
#: What needs each module. The wheels of one module are alternatives.
_NEEDED_BY: dict[str, tuple[str, ...]] = {
    "torch": (ALL,), "transformers": (ALL,), "optimum": (ALL,), "tokenizers": (ALL,), "safetensors": (ALL,), "numpy": (ALL,),
    "onnx": _ONNX, "onnxscript": _ONNX, "onnxruntime": _RUN_ONNX, "openvino": ("convert_openvino",),
    "nncf": ("openvino_int8",), "tensorrt": ("build_tensorrt",), "tensorrt_rtx": ("build_tensorrt",),
    "bertopt_native": ("build_native",),
}  # fmt: skip
#: What building needs and running an artefact does not. Where none of it is installed, that is on purpose.
_BUILDING = ("torch", "transformers", "optimum")
#: Debian's package for libraries that runtimes commonly miss.
_SYSTEM_PACKAGES = {"libgomp.so.1": "libgomp1", "libstdc++.so.6": "libstdc++6", "libGL.so.1": "libgl1", "libz.so.1": "zlib1g"}
#: What loaders and libraries say that find no room in virtual memory.
_NO_ROOM = "failed to map segment|[Mm]emory allocation|[Cc]annot allocate memory|MemoryError"


Check = Callable[[Machine], Finding | list[Finding] | None]


def _stops(concerns: Sequence[str]) -> str:
    return "every run fails" if ALL in concerns else f"{', '.join(concerns)} cannot run"


def missing_packages(machine: Machine) -> list[Finding]:
    findings = []
    for module, concerns in _NEEDED_BY.items():
        wheels = [name for name, brings in MODULES.items() if brings == module]
        if module == "tensorrt" or any(name in machine.packages for name in wheels):
            continue
        if module == "tensorrt_rtx" and "tensorrt" in machine.packages:
            continue
        runs_only = module in _BUILDING and not machine.packages.keys() & set(_BUILDING)
        building = "[gpu]" if machine.gpus else "[cpu]"
        extra = {"tensorrt_rtx": "[rtx]", "bertopt_native": "[native]", "onnxruntime": building, **dict.fromkeys(_BUILDING, building)}.get(module, "[cpu]")
        fix = f"pip install 'bertopt{'' if module in ('tokenizers', 'safetensors', 'numpy') else extra}'"
        findings.append(
            Finding(check="missing_packages", found=f"{wheels[0]} is not installed", stops=_stops(concerns), fix=fix,
                    # Recipes go on without the native encoder.
                    concerns=concerns, blocks=module != "bertopt_native", only_if_needed=runs_only or concerns != (ALL,))
        )  # fmt: skip
    return findings


def broken_imports(machine: Machine) -> list[Finding]:
    findings = []
    for module, reason in machine.broken.items():
        if module in machine.shadowed or _without_room(machine, reason):
            continue
        wheel = next(name for name, brings in MODULES.items() if brings == module and name in machine.packages)
        library = re.search(r"(lib[\w.+-]+\.so(?:\.\w+)*)", reason)
        system = _SYSTEM_PACKAGES.get(library[1]) if library else None
        what = f"{wheel} {machine.packages[wheel]} is installed but cannot be imported"
        if library:
            what += f", because the library {library[1]} is missing or broken"
        again = _reinstall(wheel, machine.packages[wheel], library is not None)
        findings.append(
            Finding(check="broken_imports", found=f"{what} ({reason})", stops=_stops(_NEEDED_BY[module]),
                    fix=f"apt-get install {system}" if system else again, concerns=_NEEDED_BY[module], blocks=True)
        )  # fmt: skip
    return findings


def _reinstall(wheel: str, version: str, library: bool) -> str:
    """Return what installs the same build again, and where a `library` is missing also the wheels that bring libraries."""
    release, _, build = version.partition("+")
    # TensorRT's libraries are wheels that it depends on, on NVIDIA's own index. So are those of torch where it is built for CUDA.
    depends = wheel == "tensorrt" or (wheel == "torch" and library and build != "cpu")
    index = " --extra-index-url https://pypi.nvidia.com" if wheel == "tensorrt" else ""
    index = f" --index-url https://download.pytorch.org/whl/{build}" if wheel == "torch" and build else index
    return f"pip install --force-reinstall{'' if depends else ' --no-deps'}{index} {wheel}=={release}"


def _without_room(machine: Machine, reason: str) -> bool:
    """Whether a library did not fit into the virtual memory that this process may have, which `little_memory` reports."""
    return machine.address_space_bytes is not None and re.search(_NO_ROOM, reason) is not None


def shadowed_modules(machine: Machine) -> list[Finding]:
    findings = []
    for module, origin in machine.shadowed.items():
        paths = machine.environment.get("PYTHONPATH", "").split(os.pathsep)
        by = next((path for path in paths if path and Path(origin).is_relative_to(path)), None)
        fix = f"remove '{by}' from PYTHONPATH" if by else "rename that file, or run bertopt in another directory"
        findings.append(
            Finding(check="shadowed_modules", found=f"'import {module}' takes '{origin}', not the installed package",
                    stops=_stops(_NEEDED_BY[module]), fix=fix, concerns=_NEEDED_BY[module], blocks=True)
        )  # fmt: skip
    return findings


def outdated_packages(machine: Machine) -> list[Finding]:
    findings = []
    for name, needed in machine.outdated.items():
        concerns = _NEEDED_BY[MODULES[name]]
        source = " --index-url https://download.pytorch.org/whl/cpu" if name == "torch" and not machine.gpus else ""
        findings.append(
            Finding(check="outdated_packages", found=f"{name} {machine.packages[name]} is installed; bertopt needs {name}{needed}",
                    stops=f"{'any run' if ALL in concerns else ', '.join(concerns)} may fail", fix=f"pip install{source} '{name}{needed}'", concerns=concerns)
        )  # fmt: skip
    return findings


def two_onnxruntimes(machine: Machine) -> Finding | None:
    if not {"onnxruntime", "onnxruntime-gpu"} <= machine.packages.keys():
        return None
    keep = "onnxruntime-gpu" if machine.gpus else "onnxruntime"
    return Finding(
        check="two_onnxruntimes", found="onnxruntime and onnxruntime-gpu are both installed, over each other's files",
        stops="which of them runs is chance, and a GPU may go unused", concerns=(*_RUN_ONNX, "gpu"),
        fix=f"pip uninstall -y onnxruntime onnxruntime-gpu && pip install {keep}=={machine.packages[keep]}",
    )  # fmt: skip


def cpu_quota(machine: Machine) -> Finding | None:
    quota = machine.cpu_quota
    if quota is None or quota >= machine.cores - 0.5:
        return None
    return Finding(
        check="cpu_quota", found=f"a cgroup allows {quota:g} CPUs, but {machine.cores} cores are visible",
        stops=f"timings are noisy where the quota stops threads; bertopt starts {math.ceil(quota)}, other libraries one per core",
        fix=f"give the container whole cores (docker run --cpuset-cpus=0-{max(0, round(quota) - 1)})",
    )  # fmt: skip


def small_shared_memory(machine: Machine) -> Finding | None:
    size = machine.shared_memory_bytes
    if size is None or size >= 16 << 20:
        return None
    return Finding(
        check="small_shared_memory", found=f"shared memory (/dev/shm) has {size / 2**20:.2g} MiB",
        stops="runtimes that share memory between processes can end with SIGBUS",
        fix="docker run --shm-size=1g, or mount -o remount,size=1g /dev/shm",
    )  # fmt: skip


def no_compiler(machine: Machine) -> Finding | None:
    if machine.compiler is not None:
        return None
    return Finding(
        check="no_compiler", found="no C++ compiler (g++ or clang++) is on PATH", stops=_stops(["compile_torch"]),
        fix="apt-get install g++", concerns=("compile_torch",), blocks=True,
    )  # fmt: skip


def no_int8_instructions(machine: Machine) -> Finding | None:
    if machine.isa & NATIVE["int8"]:
        return None
    native = "use build_native, whose INT8 is exact with AVX2 (`bertopt optimize` tries it), or" if "avx2" in machine.isa else "use"
    return Finding(
        check="no_int8_instructions", found="this CPU has no INT8 dot-product instructions (VNNI on x86, dotprod on ARM)",
        stops="INT8 of ONNX Runtime and OpenVINO is slow and less exact", fix=f"{native} `bertopt optimize --keep near-lossless`, or another machine",
        concerns=("int8",),
    )  # fmt: skip


def no_bfloat16_instructions(machine: Machine) -> Finding | None:
    if machine.isa & NATIVE["bfloat16"]:
        return None
    return Finding(
        check="no_bfloat16_instructions", found="this CPU has no bfloat16 instructions (avx512_bf16, amx_bf16 or ARM's bf16)",
        stops="bfloat16 is emulated and slow", fix="use `--keep exact` or `--keep fast`, or another machine",
        concerns=("bfloat16",), only_if_needed=True,
    )  # fmt: skip


def amx_refused(machine: Machine) -> Finding | None:
    if machine.amx_permitted:
        return None
    return Finding(
        check="amx_refused", found="this CPU has AMX, but Linux does not let processes use it", stops="INT8 and bfloat16 run without it, at less than half the speed",
        fix="use Linux 5.16 or later and, in a container, a runtime that allows arch_prctl, which gVisor does not", concerns=("int8", "bfloat16"),
    )  # fmt: skip


def unwritable_caches(machine: Machine) -> Finding | None:
    if not machine.unwritable_caches:
        return None
    return Finding(
        check="unwritable_caches", found=f"the cache {machine.unwritable_caches[0]} cannot be written",
        stops="models cannot be downloaded", fix="export HF_HOME=/a/writable/directory", concerns=("hub",), blocks=True,
    )  # fmt: skip


def bad_temp(machine: Machine) -> Finding | None:
    if machine.bad_temp is None:
        return None
    return Finding(
        check="bad_temp", found=f"TMPDIR names '{machine.bad_temp}', which is not a writable directory",
        stops="compilers and runtimes that use it fail", fix=f"mkdir -p '{machine.bad_temp}', or unset TMPDIR",
    )  # fmt: skip


def few_open_files(machine: Machine) -> Finding | None:
    if machine.open_files >= 256:
        return None
    return Finding(
        check="few_open_files", found=f"a process may open {machine.open_files} files (ulimit -n)",
        stops="runs fail with 'Too many open files'", fix="ulimit -n 4096", blocks=machine.open_files < 64,
    )  # fmt: skip


def little_memory(machine: Machine) -> Finding | None:
    limit = machine.address_space_bytes
    if limit is not None and limit < 16 << 30:
        # torch's CPU build takes 1 GiB, that for CUDA takes 4.
        unloaded = [name for name, reason in machine.broken.items() if _without_room(machine, reason)] or ["torch"] * (limit < 2 << 30)
        return Finding(
            check="little_memory", found=f"virtual memory is limited to {limit / 2**30:.2g} GiB (ulimit -v)",
            stops=f"{', '.join(unloaded)} cannot be loaded" if unloaded else "larger models fail",
            fix="ulimit -v unlimited", blocks=bool(unloaded),
        )  # fmt: skip
    if machine.memory_bytes >= 2 << 30:
        return None
    return Finding(
        check="little_memory", found=f"this process may use {machine.memory_bytes / 2**30:.2g} GiB of memory",
        stops="workers are killed" if machine.memory_bytes < 1 << 30 else "base-size models fail",
        fix="raise the container's limit (docker run --memory=8g)", blocks=machine.memory_bytes < 1 << 30,
    )  # fmt: skip


def few_threads(machine: Machine) -> Finding | None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        value = machine.environment.get(name)
        if value is None or machine.cores == 1 or (value.strip().isdecimal() and int(value) > 1):
            continue
        return Finding(
            check="few_threads", found=f"{name}={value!r}, with {machine.cores} cores",
            stops="torch runs on one core, and speed-ups over it mean little" if value.strip() == "1" else "it is not a number of threads",
            fix=f"unset {name}",
        )  # fmt: skip
    return None


def cuda_visible_devices(machine: Machine) -> Finding | None:
    value = machine.environment.get("CUDA_VISIBLE_DEVICES")
    if value is None or re.fullmatch(r"\s*(\d+|(GPU|MIG)-[\w/-]+)(\s*,\s*(\d+|(GPU|MIG)-[\w/-]+))*\s*", value):
        return None
    hidden = value.strip() in ("", "-1", "NoDevFiles", "void")
    return Finding(
        check="cuda_visible_devices",
        found=f"CUDA_VISIBLE_DEVICES={value!r} " + ("hides every GPU" if hidden else "names no device"),
        stops="no GPU can be used", fix="unset CUDA_VISIBLE_DEVICES", concerns=("gpu",), blocks=True, only_if_needed=hidden,
    )  # fmt: skip


def low_disk(machine: Machine) -> Finding | None:
    if machine.free_disk_bytes >= 5 << 30:
        return None
    return Finding(
        check="low_disk", found=f"the disk here has {machine.free_disk_bytes / 2**30:.1f} GiB free",
        stops="stages of base-size models may not fit", fix="free some, or give --out on another disk",
        blocks=machine.free_disk_bytes < 256 << 20,
    )  # fmt: skip


def hub_offline(machine: Machine) -> Finding | None:
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    on = [name for name in names if machine.environment.get(name, "").upper() in ("1", "ON", "YES", "TRUE")]
    if not on:
        return None
    return Finding(
        check="hub_offline", found=f"{on[0]} is set", stops="hub ids work only where they are in the cache",
        fix=f"unset {on[0]}, or give a directory", concerns=("hub",),
    )  # fmt: skip


CHECKS: tuple[Check, ...] = (
    shadowed_modules, broken_imports, missing_packages, outdated_packages, two_onnxruntimes, little_memory, few_open_files, small_shared_memory,
    bad_temp, cpu_quota, few_threads, no_int8_instructions, no_bfloat16_instructions, amx_refused, no_compiler, unwritable_caches,
    hub_offline, low_disk, cuda_visible_devices, gpu_checks.cpu_wheels, gpu_checks.no_gpu, gpu_checks.old_driver, gpu_checks.wheel_without_gpu,
    gpu_checks.cuda_majors_apart, gpu_checks.missing_cuda_libraries, gpu_checks.no_cuda_compiler, gpu_checks.no_cuda_headers,
    gpu_checks.compute_mode, gpu_checks.shared_gpu,
)  # fmt: skip
