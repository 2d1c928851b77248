"""Doctor: every planted fault is named with its cause, and healthy machines are left alone."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bertopt.commands import recipes
from bertopt.commands.doctor import asked_recipe, diagnose
from bertopt.recipe.parser import from_dict
from bertopt.system import environment, gpu_facts
from bertopt.system.gpu import GpuState
from bertopt.system.gpu_facts import GpuFacts, runs_here
from bertopt.system.machine import Machine

CPU = {
    "torch": "2.13.0+cpu", "transformers": "5.23.0", "optimum": "2.3.0", "tokenizers": "0.23.3", "safetensors": "0.8.0",
    "numpy": "2.4.6", "onnx": "1.23.2", "onnxscript": "0.7.2", "onnxruntime": "1.31.1", "openvino": "2026.4.1", "nncf": "3.4.0",
    "bertopt-native": "0.1.0",
}  # fmt: skip
GPU = {name: version for name, version in CPU.items() if name not in ("onnxruntime", "openvino", "nncf")} | {
    "torch": "2.13.0", "onnxruntime-gpu": "1.31.1", "tensorrt": "10.9.0",
}  # fmt: skip
HEALTHY = Machine(packages=CPU)
#: A machine with a GPU on which everything works.
FACTS = GpuFacts(
    state=GpuState(), torch_cuda="13.0", torch_targets=("sm_80", "sm_90", "sm_100", "compute_100"), onnxruntime_cuda="13.0",
)  # fmt: skip
ON_GPU: dict[str, Any] = {"packages": GPU, "gpus": 1, "gpu": FACTS}


def gpu(state: dict[str, Any] | None = None, packages: Any = GPU, **facts: Any) -> dict[str, Any]:
    """A machine with a GPU that has one fault."""
    return ON_GPU | {"packages": packages, "gpu": replace(FACTS, state=replace(GpuState(), **state or {}), **facts)}


COMPILED = {"schema_version": 1, "model": "/", "device": "cuda", "steps": [{"pass": "compile_torch"}]}
PACKAGED = COMPILED | {"steps": [{"pass": "package_aot"}]}
ENGINE = {"schema_version": 1, "model": "/", "device": "cuda", "steps": [{"pass": "export_onnx", "opset": 20}, {"pass": "build_tensorrt"}]}
#: (change to a healthy machine, the check that must find it, words of its finding, what is asked, the exit code)
FAULTS: list[tuple[dict[str, Any], str, str, Any, int]] = [
    ({"broken": {"openvino": "ImportError: libtbb.so.12: cannot open shared object file: No such file"}}, "broken_imports",
     "openvino 2026.4.1 is installed but cannot be imported, because the library libtbb.so.12 is missing", "cpu", 4),
    ({"broken": {"onnxruntime": "ImportError: libgomp.so.1: cannot open shared object file"}}, "broken_imports",
     "apt-get install libgomp1", "cpu", 4),
    ({"broken": {"openvino": "ImportError: bad"}}, "broken_imports", "pip install --force-reinstall --no-deps openvino==2026.4.1",
     "cpu_exact", 4),
    # The same build again: PyPI's torch is built for CUDA, and its CUDA libraries are packages of their own.
    ({"broken": {"torch": "ImportError: bad"}}, "broken_imports",
     "pip install --force-reinstall --no-deps --index-url https://download.pytorch.org/whl/cpu torch==2.13.0", "cpu", 4),
    ({"packages": CPU | {"torch": "2.14.1"}, "broken": {"torch": "ImportError: libcudnn.so.9: cannot open shared object file"}}, "broken_imports",
     "libcudnn.so.9 is missing or broken (ImportError: libcudnn.so.9: cannot open shared object file); every run fails. "
     "Fix: pip install --force-reinstall torch==2.14.1", "cpu", 4),
    ({"packages": CPU | {"torch": "2.11.0+cu130"}, "broken": {"torch": "ImportError: libcublas.so.13: cannot open shared object file"}}, "broken_imports",
     "pip install --force-reinstall --index-url https://download.pytorch.org/whl/cu130 torch==2.11.0", "cpu", 4),
    ({"packages": CPU | {"torch": "2.13.0"}, "broken": {"torch": "ValueError: libcudnn.so.*[0-9] not found in the system path ['/x']"}}, "broken_imports",
     "because the library libcudnn.so is missing or broken", "cpu", 4),
    ({"packages": CPU | {"torch": "2.14.1"}, "broken": {"torch": "ImportError: bad"}}, "broken_imports",
     "pip install --force-reinstall --no-deps torch==2.14.1", "cpu", 4),
    # torch built for CUDA takes three times the address space of the CPU build.
    *(({"packages": CPU | {"torch": "2.14.1"}, "broken": {"torch": reason}, "address_space_bytes": 3 << 30}, "little_memory",
       "virtual memory is limited to 3 GiB (ulimit -v); torch cannot be loaded. Fix: ulimit -v unlimited", "cpu", 4)
      for reason in ("ImportError: libtorch_cpu.so: failed to map segment from shared object",
                     "OpenBLAS error: Memory allocation still failed after 10 retries, giving up.")),
    ({"packages": {**CPU, "onnxruntime-gpu": "1.31.1"}}, "two_onnxruntimes", "both installed", "cpu", 0),
    ({"shadowed": {"torch": "/home/me/torch.py"}}, "shadowed_modules", "rename that file", "cpu", 4),
    ({"shadowed": {"torch": "/libs/torch/__init__.py"}, "environment": {"PYTHONPATH": "/a:/libs"}}, "shadowed_modules",
     "remove '/libs' from PYTHONPATH", None, 0),
    ({"shadowed": {"onnxruntime": "/x/onnxruntime.py"}}, "shadowed_modules", "export_onnx", "cpu", 4),
    ({"packages": CPU | {"openvino": "2025.3.0"}, "outdated": {"openvino": ">=2026.3"}}, "outdated_packages",
     "openvino 2025.3.0 is installed; bertopt needs openvino>=2026.3; convert_openvino may fail. Fix: pip install 'openvino>=2026.3'", "cpu", 0),
    ({"packages": CPU | {"torch": "2.9.0+cpu"}, "outdated": {"torch": ">=2.11"}}, "outdated_packages",
     "any run may fail. Fix: pip install --index-url https://download.pytorch.org/whl/cpu 'torch>=2.11'", None, 0),
    ({"cpu_quota": 1.5}, "cpu_quota", "a cgroup allows 1.5 CPUs, but 8 cores are visible", "cpu", 0),
    ({"shared_memory_bytes": 65536}, "small_shared_memory", "/dev/shm) has 0.062 MiB", "cpu", 0),
    ({"packages": {name: version for name, version in CPU.items() if name != "bertopt-native"}}, "missing_packages",
     "build_native cannot run. Fix: pip install 'bertopt[native]'", "cpu", 0),
    ({"compiler": None}, "no_compiler", "apt-get install g++", None, 0),
    ({"compiler": None}, "no_compiler", "compile_torch cannot run", "torch_cpu", 4),
    ({"isa": frozenset({"avx2"})}, "no_int8_instructions", "--keep near-lossless", "cpu", 0),
    ({"isa": frozenset({"avx512f", "avx512_vnni"})}, "no_bfloat16_instructions", "emulated", "torch_cpu", 0),
    ({"isa": frozenset({"avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16"}), "amx_permitted": False}, "amx_refused", "Linux 5.16", "cpu", 0),
    ({"unwritable_caches": ("/root/.cache/huggingface/hub",)}, "unwritable_caches", "HF_HOME", None, 0),
    ({"bad_temp": "/nope"}, "bad_temp", "TMPDIR names '/nope'", "cpu", 0),
    ({"open_files": 16}, "few_open_files", "ulimit -n 4096", "cpu", 4),
    ({"address_space_bytes": 700 << 20}, "little_memory", "ulimit -v unlimited", "cpu", 4),
    ({"memory_bytes": 420 << 20}, "little_memory", "0.41 GiB", "cpu", 4),
    ({"environment": {"OMP_NUM_THREADS": "1"}}, "few_threads", "unset OMP_NUM_THREADS", "cpu", 0),
    ({"environment": {"OMP_NUM_THREADS": "many"}}, "few_threads", "not a number of threads", "cpu", 0),
    ({"environment": {"CUDA_VISIBLE_DEVICES": "cuda:0"}}, "cuda_visible_devices", "names no device", None, 0),
    ({"environment": {"CUDA_VISIBLE_DEVICES": "-1"}, "packages": GPU, "gpus": 1}, "cuda_visible_devices", "hides every GPU", "gpu", 4),
    ({"environment": {"HF_HUB_OFFLINE": "1"}}, "hub_offline", "unset HF_HUB_OFFLINE", None, 0),
    ({"packages": {k: v for k, v in CPU.items() if k != "openvino"}}, "missing_packages", "pip install 'bertopt[cpu]'", "cpu", 4),
    ({"packages": {k: v for k, v in CPU.items() if k != "torch"}}, "missing_packages", "torch is not installed", None, 0),
    ({"packages": {"tokenizers": "0.23.3", "safetensors": "0.8.0", "numpy": "2.4.6"}}, "missing_packages", "pip install 'bertopt[cpu]'", "torch_cpu", 4),
    ({}, "no_gpu", "no NVIDIA device", "gpu", 4),
    ({"gpus": 1}, "cpu_wheels", "torch is the CPU wheel", "gpu", 4),
    ({"gpus": 1, "packages": {**GPU, "torch": "2.13.0+cpu"}}, "cpu_wheels", "pip install --force-reinstall torch==2.13.0", "gpu", 4),
    ({"gpu": GpuFacts(container=True, in_pci=True)}, "no_gpu", "this container was started without GPUs", "gpu", 4),
    ({"gpu": GpuFacts(in_pci=True)}, "no_gpu", "driver is not loaded", "gpu", 4),
    ({"gpu": GpuFacts(container=True)}, "no_gpu", "docker run --gpus all", "ort_cuda_fp16", 4),
    ({"gpu": GpuFacts(in_pci=False)}, "no_gpu", "run where one is", "ort_cuda_fp16", 4),
    (gpu({"driver_cuda": (12, 8), "driver": "570.86"}), "old_driver", "the driver 570.86 runs CUDA 12.8; torch is built for CUDA 13.0", "gpu", 4),
    (gpu(torch_targets=("sm_100", "sm_120", "compute_120")), "wheel_without_gpu", "the GPU is sm90", "gpu", 4),
    (gpu({"capability": "sm70"}), "wheel_without_gpu", "no kernel image", "gpu", 4),
    (gpu(torch_cuda="12.8"), "cuda_majors_apart", "torch is built for CUDA 12.8, onnxruntime-gpu for CUDA 13.0", "gpu", 4),
    (gpu(missing_libraries=("libcublasLt.so.13",)), "missing_cuda_libraries", "pip install nvidia-cublas ", "gpu", 4),
    (gpu(missing_libraries=("libcurand.so.10",)), "missing_cuda_libraries", " nvidia-curand ", "gpu", 4),
    (gpu(missing_libraries=("libcufft.so.11",), onnxruntime_cuda="12.8", torch_cuda="12.8"), "missing_cuda_libraries", "nvidia-cufft-cu12", "gpu", 4),
    (gpu(missing_libraries=("libcudnn.so.9",), onnxruntime_cuda="12.8", torch_cuda="12.8"), "missing_cuda_libraries", "nvidia-cudnn-cu12", "gpu", 4),
    (gpu(c_compiler=None, python_header=False), "no_cuda_compiler", "missing: a C compiler and Python.h", COMPILED, 4),
    (gpu(cuda_headers=False), "no_cuda_headers", "missing: CUDA's headers", PACKAGED, 4),
    (gpu(cuda_headers=False) | {"compiler": None}, "no_cuda_headers", "missing: a C++ compiler and CUDA's headers", PACKAGED, 4),
    (gpu({"compute_mode": "exclusive"}), "compute_mode", "sudo nvidia-smi -c DEFAULT", "gpu", 4),
    (gpu({"compute_mode": "prohibited", "mps": True}), "compute_mode,mps", "second process cannot start", "gpu", 4),
    (gpu({"compute_mode": "exclusive", "mps": True}), "mps", "nvidia-cuda-mps-control", "gpu", 0),
    (gpu({"mig": True}), "mig", "MIG slice", "gpu", 0),
    (gpu({"throttling": ("temperature",)}), "throttling", "lowered its clock (temperature)", "gpu", 0),
    (gpu({"processes": {7: 9 << 30}}, others_bytes=9 << 30), "gpu_in_use", "1 processes use the GPU and 9.0 GiB", "gpu", 0),
    (gpu(others_bytes=9 << 30), "gpu_in_use", "unknown processes", "gpu", 0),
    (ON_GPU | {"broken": {"tensorrt": "ImportError: libnvinfer.so.10: cannot open shared object file"}}, "broken_imports",
     "pip install --force-reinstall --extra-index-url https://pypi.nvidia.com tensorrt==10.9.0", ENGINE, 4),
    (ON_GPU | {"packages": GPU | {"onnxruntime": "1.31.1"}}, "two_onnxruntimes", "pip install onnxruntime-gpu==1.31.1", "gpu", 0),
    (ON_GPU | {"packages": {**{k: v for k, v in GPU.items() if k != "onnxruntime-gpu"}, "onnxruntime": "1.31.1"}}, "cpu_wheels",
     "onnxruntime cannot use the GPU", "ort_cuda_fp16", 4),
    (ON_GPU | {"shared_memory_bytes": 65536}, "small_shared_memory", "--shm-size=1g", "gpu", 0),
    ({"free_disk_bytes": 100 << 20}, "low_disk", "0.1 GiB free", "cpu", 4),
    ({"free_disk_bytes": 3 << 30}, "low_disk", "--out on another disk", "cpu", 0),
]  # fmt: skip


def asked(what: Any) -> Any:
    if isinstance(what, dict):
        return from_dict(what)
    if what in ("cpu", "gpu", None):
        return asked_recipe(None, what)  # type: ignore[arg-type]
    return asked_recipe(what, None)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests ask about machines with other packages than the one they run on."""
    monkeypatch.setattr(environment, "versions", lambda: GPU)


@pytest.mark.parametrize(
    ("packages", "recipe"),
    [
        ({"torch": "2.11.0+cu130"}, "gpu_fastest"), ({"torch": "2.13.0", "onnxruntime-gpu": "1.31.1"}, "ort_cuda_fp16"),
        ({"torch": "2.13.0", "tensorrt": "10.9.0"}, "trt_fp16"), ({"torch": "2.13.0+cpu"}, "ort_cuda_fp16"), ({}, "ort_cuda_fp16"),
    ],
)  # fmt: skip
def test_a_gpu_is_asked_about_for_the_recipe_that_optimize_runs(packages: dict[str, str], recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Doctor wanted onnxruntime-gpu where optimize runs what torch alone does."""
    monkeypatch.setattr(environment, "versions", lambda: packages)
    assert asked_recipe(None, "gpu") == asked_recipe(recipe, None)


@pytest.mark.parametrize(("change", "check", "words", "what", "code"), FAULTS, ids=[f"{f[1]}-{i}" for i, f in enumerate(FAULTS)])
def test_a_planted_fault_is_named(change: dict[str, Any], check: str, words: str, what: Any, code: int) -> None:
    diagnosis = diagnose(replace(HEALTHY, **change), asked(what))
    assert {finding.check for finding in diagnosis.findings} == set(check.split(","))
    assert any(words in str(finding) for finding in diagnosis.findings), [str(finding) for finding in diagnosis.findings]
    assert diagnosis.exit_code == code
    assert all("\n" not in str(finding) and "Fix: " in str(finding) for finding in diagnosis.findings)


@pytest.mark.parametrize(
    ("cuda", "names"),
    [("12.8", {"libcublasLt.so.12", "libcurand.so.10", "libcufft.so.11", "libcudart.so.12", "libcudnn.so.9"}),
     ("13.0", {"libcublasLt.so.13", "libcurand.so.10", "libcudart.so.13", "libcudnn.so.9"})],
)  # fmt: skip
def test_every_library_of_the_cuda_provider_is_looked_for(tmp_path: Path, cuda: str, names: set[str]) -> None:
    """What libonnxruntime_providers_cuda.so of the wheels 1.25 and 1.28 to 1.31 is linked with, and cuDNN, one library of each package."""
    (tmp_path / "onnxruntime.py").write_text(f"cuda_version = {cuda!r}\ndef preload_dlls(): pass\n")
    (tmp_path / "torch.py").write_text("raise ImportError\n")
    without = "import ctypes\ndef none(name): raise OSError(name)\nctypes.CDLL = none\n"
    said = subprocess.run(
        [sys.executable, "-c", without + gpu_facts._PROBE], env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=True
    ).stdout
    assert set(json.loads(said.removeprefix("facts "))["missing"]) == names


def test_onnxruntime_for_cpus_stops_no_recipe_that_needs_none() -> None:
    """On its first GPU, gpu_fastest, which runs torch alone, was said to be impossible."""
    packages = {**{name: version for name, version in GPU.items() if name != "onnxruntime-gpu"}, "onnxruntime": "1.31.1"}
    diagnosis = diagnose(replace(HEALTHY, **ON_GPU | {"packages": packages}), asked("gpu_fastest"))
    assert (diagnosis.findings, diagnosis.exit_code) == ([], 0)


HEALTHY_MACHINES: dict[str, Machine] = {
    "server": HEALTHY,
    "one core": replace(HEALTHY, cores=1, environment={"OMP_NUM_THREADS": "1"}),
    "two cores": replace(HEALTHY, cores=2),
    "128 cores": replace(HEALTHY, cores=128, memory_bytes=512 << 30),
    "desktop with AVX-VNNI": replace(HEALTHY, isa=frozenset({"avx2", "avx_vnni"})),
    "Ice Lake": replace(HEALTHY, isa=frozenset({"avx2", "avx512f", "avx512_vnni"})),
    "Sapphire Rapids": replace(HEALTHY, isa=frozenset({"avx2", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16"})),
    "Graviton": replace(HEALTHY, isa=frozenset({"asimddp", "i8mm", "bf16"})),
    "Raspberry": replace(HEALTHY, isa=frozenset({"asimddp"}), cores=4, memory_bytes=8 << 30),
    "quota of all cores": replace(HEALTHY, cpu_quota=8.0),
    "small container": replace(HEALTHY, cores=2, cpu_quota=2.0, memory_bytes=2 << 30, shared_memory_bytes=64 << 20),
    "no shared memory": replace(HEALTHY, shared_memory_bytes=None),
    "threads stated": replace(HEALTHY, environment={"OMP_NUM_THREADS": "4"}),
    "PYTHONPATH of one's own": replace(HEALTHY, environment={"PYTHONPATH": "/home/me/src"}),
    "hub online": replace(HEALTHY, environment={"HF_HUB_OFFLINE": "0"}),
    "GPU": replace(HEALTHY, packages=GPU, gpus=1),
    "H100": replace(HEALTHY, **ON_GPU),
    "A100, older driver of the same CUDA": replace(HEALTHY, **gpu({"capability": "sm80", "driver_cuda": (13, 0)}, torch_cuda="13.2")),
    "RTX 3090 on sm_80 code": replace(HEALTHY, **gpu({"capability": "sm86"})),
    "RTX 50 by PTX": replace(HEALTHY, **gpu({"capability": "sm120"})),
    "newer driver than the wheels": replace(HEALTHY, **gpu({"driver_cuda": (13, 2)}, torch_cuda="12.8", onnxruntime_cuda="12.8")),
    "desktop that draws on the GPU": replace(HEALTHY, **gpu({"used_bytes": 1 << 30}, others_bytes=1 << 30)),
    "GPU without NVML": replace(HEALTHY, **ON_GPU | {"gpu": replace(FACTS, state=None)}),
    "GPU in a container": replace(HEALTHY, **gpu(container=True)),
    "no compiler, none needed": replace(HEALTHY, **gpu(c_compiler=None)),
    "torch's wheels without a CUDA toolkit": replace(HEALTHY, **gpu(cuda_headers=False)),
    "8 GPUs": replace(HEALTHY, packages=GPU, gpus=8, environment={"CUDA_VISIBLE_DEVICES": "0,1,2,3"}),
    "GPU by name": replace(HEALTHY, packages=GPU, gpus=1, environment={"CUDA_VISIBLE_DEVICES": "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"}),
    "MIG": replace(HEALTHY, packages=GPU, gpus=1, environment={"CUDA_VISIBLE_DEVICES": "MIG-GPU-8932f937/1/0"}),
    "hidden GPU": replace(HEALTHY, environment={"CUDA_VISIBLE_DEVICES": ""}),
    "TensorRT-RTX": replace(HEALTHY, packages={**CPU, "tensorrt-rtx": "1.7.1"}),
    "torch alone": replace(HEALTHY, packages={k: v for k, v in CPU.items() if "onnx" not in k and k not in ("openvino", "nncf")}),
    "an artefact's runtime alone": replace(HEALTHY, packages={k: CPU[k] for k in ("tokenizers", "safetensors", "numpy", "openvino")}),
    "large address space": replace(HEALTHY, address_space_bytes=1 << 40),
}  # fmt: skip


@pytest.mark.parametrize("name", HEALTHY_MACHINES)
def test_a_healthy_machine_has_no_findings(name: str) -> None:
    machine = HEALTHY_MACHINES[name]
    assert diagnose(machine).findings == []
    if name not in ("torch alone", "an artefact's runtime alone") and not machine.gpus:
        assert diagnose(machine, asked("cpu")).findings == []
    if machine.gpus:
        assert diagnose(machine, asked("gpu")).findings == []


def test_what_a_recipe_does_not_need_is_not_shown() -> None:
    broken = replace(HEALTHY, broken={"openvino": "ImportError: x"}, environment={"HF_HUB_OFFLINE": "1"}, compiler=None)
    assert diagnose(broken, asked("ort_cpu_int8")).findings == []
    steps = [{"pass": "compile_torch"}]
    hub = from_dict({"schema_version": 1, "model": "some/where", "steps": steps})
    assert [one.check for one in diagnose(broken, hub).findings] == ["no_compiler", "hub_offline"]
    assert diagnose(broken, hub).exit_code == 4


@pytest.mark.parametrize(
    ("change", "what", "verdict"),
    [
        ({}, "cpu_fastest", "'cpu_fastest' can run here: no problems found"),
        ({"packages": {name: CPU[name] for name in CPU if name != "bertopt-native"}, "cpu_quota": 1.5}, "cpu_fastest",
         "'cpu_fastest' can run here, with 2 warnings: bertopt-native is not installed; a cgroup allows 1.5 CPUs, but 8 cores are visible"),
        ({"packages": {name: CPU[name] for name in CPU if name not in ("openvino", "bertopt-native")}}, "cpu_fastest",
         "'cpu_fastest' cannot run here: openvino is not installed; correct the errors above, then run doctor again"),
        ({}, None, "this machine: no problems found"),
        ({"cpu_quota": 1.5}, None, "this machine: 1 problem found, see above"),
    ],
    ids=["runs", "warnings", "stopped", "machine", "machine with a problem"],
)  # fmt: skip
def test_the_last_line_is_a_verdict(change: dict[str, Any], what: str | None, verdict: str) -> None:
    assert diagnose(replace(HEALTHY, **change), asked(what)).verdict(what and f"'{what}'") == verdict


def test_every_shipped_recipe_can_be_asked_about() -> None:
    for one in recipes.shipped():
        assert diagnose(replace(HEALTHY, gpus=1, packages=CPU | GPU), asked(one.name)) is not None


@pytest.mark.parametrize(
    ("targets", "capability", "runs"),
    [
        (("sm_80",), "sm86", True), (("sm_86",), "sm80", False), (("sm_90a",), "sm90", True), (("sm_80",), "sm90", False),
        (("compute_80",), "sm120", True), (("compute_90",), "sm80", False), ((), "sm90", False), (("gfx90a",), "sm90", False),
    ],
)  # fmt: skip
def test_which_code_runs_on_which_gpu(targets: tuple[str, ...], capability: str, runs: bool) -> None:
    assert runs_here(targets, capability) is runs
