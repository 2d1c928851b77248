"""What `bertopt doctor` knows of this machine: plain facts, so that tests can state a machine of any kind."""

from __future__ import annotations

import concurrent.futures
import ctypes
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from bertopt.system import compilers, environment, gpu_facts, limits, onnxruntime_import, openvino_import
from bertopt.system.gpu_facts import GpuFacts

#: Modules by the distribution that brings them: another file of that name that shadows one breaks everything after it.
MODULES = {
    "torch": "torch", "transformers": "transformers", "optimum": "optimum", "tokenizers": "tokenizers",
    "safetensors": "safetensors", "numpy": "numpy", "onnx": "onnx", "onnxscript": "onnxscript",
    "onnxruntime": "onnxruntime", "onnxruntime-gpu": "onnxruntime", "openvino": "openvino", "nncf": "nncf",
    "tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx", "bertopt-native": "bertopt_native",
}  # fmt: skip
#: Modules whose import loads libraries of the system, so that it is tried.
RUNTIMES = ("torch", "onnxruntime", "openvino", "tensorrt", "tensorrt_rtx", "bertopt_native")
IMPORT_TIMEOUT_S = 60.0
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (only looked at)


@dataclass(frozen=True)
class Machine:
    """Facts about a machine. The defaults are those of a healthy one."""

    isa: frozenset[str] = frozenset({"avx2", "avx512f", "avx512_vnni", "avx512_bf16"})
    amx_permitted: bool = True
    """False where the CPU has AMX and Linux keeps it from processes."""
    cores: int = 8
    cpu_quota: float | None = None
    """CPUs that a cgroup allows, where it allows fewer than any number."""
    memory_bytes: int = 16 << 30
    address_space_bytes: int | None = None
    shared_memory_bytes: int | None = 1 << 30
    open_files: int = 1024
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables."""
    bad_temp: str | None = None
    """TMPDIR where it names no directory that can be written."""
    unwritable_caches: tuple[str, ...] = ()
    compiler: str | None = "/usr/bin/g++"
    gpus: int = 0
    gpu: GpuFacts = field(default_factory=GpuFacts)
    free_disk_bytes: int = 100 << 30
    """Where bertopt would write: the current directory's disk."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """Installed distributions and their versions."""
    outdated: Mapping[str, str] = field(default_factory=dict)
    """Installed distributions that are older than bertopt needs, and the versions that it needs, as '>=1.2'."""
    shadowed: Mapping[str, str] = field(default_factory=dict)
    """Modules that are not imported from their distribution, and the file that is imported in its place."""
    broken: Mapping[str, str] = field(default_factory=dict)
    """Modules that are installed and cannot be imported, and the last line of the error."""


def read() -> Machine:
    """Look at this machine. Runtimes are imported in separate processes, which takes a few seconds."""
    environment.need_cpuinfo()
    packages = environment.versions()
    gpus = gpu_count()
    installed = {MODULES[name] for name in packages if name in MODULES}
    isa = frozenset(environment.isa())
    return Machine(
        isa=isa,
        amx_permitted="amx_int8" not in isa or _amx_permitted(),
        cores=limits.visible_cores(),
        cpu_quota=limits.cgroup_cpus(),
        memory_bytes=limits.memory_bytes(),
        address_space_bytes=limits.address_space_bytes(),
        shared_memory_bytes=shutil.disk_usage(_SHARED_MEMORY).total if _SHARED_MEMORY.is_dir() else None,
        open_files=limits.most_open_files(),
        environment=dict(os.environ),
        bad_temp=_bad_temp(),
        unwritable_caches=() if _writable(hub := _hub_cache()) else (str(hub),),
        compiler=compilers.cplusplus_compiler(),
        gpus=gpus,
        gpu=gpu_facts.read(_as_workers, gpus),
        free_disk_bytes=shutil.disk_usage(".").free,
        packages=packages,
        outdated=_outdated(packages),
        shadowed=_shadowed(packages),
        broken=_broken([name for name in RUNTIMES if name in installed]),
    )


def _amx_permitted() -> bool:
    """Whether Linux lets processes ask for AMX's tiles. It does from 5.16 on, unless a sandbox or seccomp refuses the question."""
    arch_prctl, arch_get_xcomp_supp, xtiledata = 158, 0x1021, 18  # of x86-64
    features = ctypes.c_uint64()
    answered = ctypes.CDLL(None).syscall(arch_prctl, arch_get_xcomp_supp, ctypes.byref(features)) == 0
    return answered and bool(features.value >> xtiledata & 1)


def _outdated(packages: Mapping[str, str]) -> dict[str, str]:
    """Those of `packages` whose version bertopt's metadata leaves out, in any of its extras."""
    from packaging.requirements import Requirement

    try:
        stated = [Requirement(line) for line in metadata.requires("bertopt") or ()]
    except metadata.PackageNotFoundError:  # bertopt runs from its sources, which pip has not installed
        return {}
    installed = [(needed, packages[needed.name]) for needed in stated if needed.name in packages]
    return {needed.name: str(needed.specifier) for needed, version in installed if not needed.specifier.contains(version, prereleases=True)}


def gpu_count() -> int:
    """Return the number of NVIDIA devices here, whether or not anything can use them."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def _bad_temp() -> str | None:
    named = os.environ.get("TMPDIR")
    return named if named and not (Path(named).is_dir() and os.access(named, os.W_OK)) else None


def _hub_cache() -> Path:
    """The directory that the hub's client writes to."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))  # noqa: PTH111  (Path.home raises for a user without a home)
    hub = Path(os.environ.get("HF_HOME") or cache / "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or hub / "hub")


def _writable(path: Path) -> bool:
    """Whether `path` can be written, or made in the nearest directory above it that exists."""
    existing = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    return existing.is_dir() and os.access(existing, os.W_OK)


def _as_workers(code: str, timeout: float) -> subprocess.CompletedProcess[str]:
    """Run Python code with the module search path that bertopt's workers have. Where it imports ONNX Runtime that reports nothing."""
    return subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False, timeout=timeout, stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": environment.python_path(), onnxruntime_import.SWITCH: "1"},
    )  # fmt: skip


def _shadowed(packages: Mapping[str, str]) -> dict[str, str]:
    """Return the modules that are shadowed by a file in the current directory or on PYTHONPATH."""
    roots: dict[str, list[Path]] = {}
    for name in packages:
        distribution = metadata.distribution(name)
        if name in MODULES and '"editable": true' not in (distribution.read_text("direct_url.json") or ""):
            roots.setdefault(MODULES[name], []).append(Path(str(distribution.locate_file(""))).resolve())
    code = (
        "import importlib.util, json, sys\n"
        f"found = {{name: importlib.util.find_spec(name) for name in {sorted(roots)!r}}}\n"
        "print(json.dumps({n: s.origin or str(list(s.submodule_search_locations)[0]) for n, s in found.items() if s}))"
    )
    try:
        origins = json.loads(_as_workers(code, IMPORT_TIMEOUT_S).stdout)
    except (subprocess.TimeoutExpired, ValueError):
        return {}
    return {
        name: origin
        for name, origin in origins.items()
        if not any(Path(origin).resolve().is_relative_to(root) for root in roots[name])
    }


def _broken(modules: Sequence[str], timeout: float = IMPORT_TIMEOUT_S) -> dict[str, str]:
    """Modules of `modules` whose import fails or hangs, and why."""

    def failure(name: str) -> str | None:
        try:
            done = _as_workers(f"import sys; sys.modules[{openvino_import.TELEMETRY!r}] = None; import {name}", timeout)
        except subprocess.TimeoutExpired:
            return f"the import did not end within {timeout:g} s"
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        if done.returncode < 0:
            return f"the import was ended by signal {-done.returncode}"
        return (lines[-1] if lines else f"exit code {done.returncode}") if done.returncode else None

    with concurrent.futures.ThreadPoolExecutor(max_workers=max(1, len(modules))) as pool:
        results = zip(modules, pool.map(failure, modules), strict=True)
        return {name: reason for name, reason in results if reason is not None}
