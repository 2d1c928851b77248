"""The state of a GPU from a faked NVML, and the warnings of a race. Nothing here ran on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bertopt import stages
from bertopt.commands import recipes
from bertopt.commands.verify import _other_gpu as other_gpu
from bertopt.errors import Unsupported
from bertopt.passes import BuildTensorrt, CastHalf
from bertopt.pipeline.job import gpu_conflict
from bertopt.pipeline.store import Store
from bertopt.recipe.parser import from_dict, load
from bertopt.recipe.texts import Texts
from bertopt.system import cpu_contention, environment, gpu
from bertopt.system.cpu_contention import Seen
from bertopt.system.gpu import GpuState
from bertopt.workers.client import NO_CUDA_CALLS
from bertopt.workers.operations import Ops
from bertopt.workers.server import _describe
from tests.support.specs import spec as make_spec


class NVMLError(Exception):
    pass


class Nvml(types.ModuleType):
    """As much of nvidia-ml-py as is used; `unknown` are questions that this GPU does not answer."""

    NVMLError, NVML_CLOCK_SM = NVMLError, 1

    def __init__(self, **said: Any) -> None:
        super().__init__("pynvml")
        self.handles: list[Any] = []
        self.unknown: set[str] = set()
        self.said = {
            "DeviceGetName": b"NVIDIA A10G", "DeviceGetCudaComputeCapability": (8, 6), "SystemGetDriverVersion": "550.54.15",
            "SystemGetCudaDriverVersion_v2": 12040, "DeviceGetMemoryInfo": types.SimpleNamespace(used=3 << 30, total=24 << 30),
            "DeviceGetComputeMode": 0, "DeviceGetMigMode": (0, 0), "DeviceGetClockInfo": 1500,
            "DeviceGetCurrentClocksThrottleReasons": 1, "DeviceGetComputeRunningProcesses": [],
        } | said  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        if name in ("nvmlInit", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetHandleByUUID"):
            return lambda *asked: self.handles.append((name, *asked)) or "handle"
        question = name.removeprefix("nvml")
        if question not in self.said:
            raise AttributeError(name)

        def answer(*_: Any) -> Any:
            if question in self.unknown:
                raise NVMLError("Not Supported")
            return self.said[question]

        return answer


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def install(**said: Any) -> Nvml:
        made = Nvml(**said)
        monkeypatch.setitem(sys.modules, "pynvml", made)
        gpu._device.cache_clear()
        return made

    yield install
    gpu._device.cache_clear()


def test_a_gpu_is_described(plant: Any) -> None:
    ran = [types.SimpleNamespace(pid=7, usedGpuMemory=1 << 30), types.SimpleNamespace(pid=8, usedGpuMemory=None)]
    plant(DeviceGetComputeRunningProcesses=ran, DeviceGetCurrentClocksThrottleReasons=0x21, DeviceGetComputeMode=3)
    state = gpu.state()
    assert state is not None and (state.name, state.capability, state.driver_cuda) == ("NVIDIA A10G", "sm86", (12, 4))
    assert state.processes == {7: 1 << 30, 8: None} and state.throttling == ("temperature",)
    assert state.refuses_second_process and not replace(state, mps=True).refuses_second_process


def test_questions_that_a_gpu_does_not_answer_are_left_out(plant: Any) -> None:
    plant().unknown = {"DeviceGetMigMode", "DeviceGetClockInfo", "DeviceGetComputeRunningProcesses", "DeviceGetComputeMode"}
    state = gpu.state()
    assert state is not None and not state.mig and state.clock_mhz is None and state.processes == {}


def test_no_nvml_is_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu._device.cache_clear()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu.state() is None and gpu.memory_of(1, 0) is None
    gpu._device.cache_clear()


@pytest.mark.parametrize(
    ("value", "which"),
    [(None, 0), ("", 0), ("2,3", 2), (" 1", 1), ("GPU-89,GPU-1", "GPU-89"), ("MIG-89/1/0", 0)],
)
def test_the_gpu_asked_about_is_the_first_visible(value: str | None, which: Any, plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu.visible(value) == which
    if value is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    made = plant()
    gpu.state()
    if value is not None:
        kind = "nvmlDeviceGetHandleByIndex" if isinstance(which, int) else "nvmlDeviceGetHandleByUUID"
        assert (kind, which) in made.handles


def test_memory_is_the_process_s_own_or_what_the_gpu_lost() -> None:
    state = GpuState(used_bytes=9 << 30, processes={5: 2 << 30, 6: None})
    assert gpu.memory_of(5, 8 << 30, state) == 2 << 30
    assert gpu.memory_of(6, 8 << 30, state) == 1 << 30
    assert gpu.memory_of(99, 8 << 30, state) == 1 << 30
    assert gpu.memory_of(99, None, state) is None
    assert gpu.memory_of(99, 10 << 30, state) == 0


def test_the_driver_s_version_needs_no_nvml(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu, "_DRIVER", tmp_path / "version")
    assert gpu.driver() is None
    for line, version in [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024", "550.54.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build", "580.65.06"),
    ]:
        (tmp_path / "version").write_text(f"{line}\nGCC version:  gcc version 12.3.0\n")
        assert gpu.driver() == version


def seen(*states: GpuState, pids: tuple[int, ...] = (1, 2)) -> list[str]:
    return cpu_contention.findings(Seen([], 0.0, 0.0, 0.0, 1.0, states, pids))


OURS = GpuState(processes={1: 5, 2: 5}, clock_mhz=1980)


def test_a_quiet_gpu_gives_no_warning() -> None:
    assert seen() == seen(GpuState()) == seen(*[OURS] * 9) == []
    assert seen(*[replace(OURS, clock_mhz=mhz) for mhz in (1980, 345, 1965, 1980, 345, 1950, 1935, 1980, 345)]) == []


def test_a_busy_gpu_is_named() -> None:
    assert seen(OURS, replace(OURS, processes={1: 5, 2: 5, 9: 1})) == ["1 other process used the GPU during the race"]
    # In another PID namespace none of the numbers is ours.
    assert seen(replace(OURS, processes={41: 5, 42: 5})) == []
    assert seen(OURS, replace(OURS, throttling=("temperature", "power limit"))) == [
        "the GPU lowered its clock during the race: temperature, power limit"
    ]
    slower = [replace(OURS, clock_mhz=mhz) for mhz in (1980, 1980, 1980, 1700, 1500, 1410, 1410, 1410, 1410)]
    assert seen(*slower) == ["the GPU's clock changed during the race, from 1980 to 1410 MHz"]
    assert "MIG slice" in seen(replace(OURS, mig=True))[0] and "MPS runs" in seen(replace(OURS, mps=True))[0]


def test_a_race_on_a_cpu_does_not_ask_for_the_gpu(plant: Any) -> None:
    made = plant()
    machine = cpu_contention.MachineWatch([os.getpid()])
    machine.calibrate()
    assert machine.seen().gpu == [] and made.handles == []
    machine = cpu_contention.MachineWatch([os.getpid()], on_gpu=True)
    machine.calibrate()
    assert len(machine.seen().gpu) == 2


class Answers:
    def __init__(self, **cuda: Any) -> None:
        self.cuda = {"cuda": True, "gpu": {"name": "A10G"}, "refuses_second_process": None} | cuda

    def call(self, op: str) -> dict[str, Any]:
        assert op == "device"
        return self.cuda


def test_a_gpu_for_one_process_ends_with_4_unless_the_recipe_is_for_the_cpu(tmp_path: Path) -> None:
    def settle(wanted: str, **cuda: Any) -> Any:
        store = Store(tmp_path, False, lambda _: None)
        return store.choose_device(Answers(**cuda), wanted)[0], store.gpu  # type: ignore[arg-type]

    assert settle("auto") == settle("cuda") == ("cuda", {"name": "A10G"})
    assert settle("cpu") == settle("cpu", refuses_second_process="exclusive") == ("cpu", None)
    assert settle("auto", cuda=False) == ("cpu", None)
    for wanted in ("auto", "cuda"):
        with pytest.raises(Unsupported, match=r"compute mode exclusive.*nvidia-smi -c DEFAULT"):
            settle(wanted, refuses_second_process="exclusive")
    with pytest.raises(Unsupported, match="sees no CUDA GPU"):
        settle("cuda", cuda=False)


def test_a_gpu_that_takes_no_further_process_is_exit_4() -> None:
    said = _describe(RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable"))
    assert said["type"] == "Unsupported" and "nvidia-smi -c DEFAULT" in str(said["message"])


def test_the_fork_server_makes_no_cuda_call() -> None:
    """Every way into CUDA is recorded while the server preloads; a CUDA call before a fork breaks every worker."""
    code = """
import os, torch
called = []
for name in {"_cuda_init", "_cuda_getDeviceCount", "_cuda_setDevice"} & set(dir(torch._C)):
    setattr(torch._C, name, lambda *a, name=name: called.append(name) or 0)
for name in ("_lazy_init", "init", "current_device", "get_device_capability", "get_device_properties"):
    setattr(torch.cuda, name, lambda *a, name=name, **k: called.append(name))
from bertopt.workers.server import _preload
_preload()
assert not called, called
import threading
assert threading.active_count() == 1, threading.enumerate()
assert os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"
"""
    variables = {**os.environ, **NO_CUDA_CALLS, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=variables)
    assert done.returncode == 0, done.stderr


def test_workers_do_not_inherit_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in NVIDIA's containers of torch, whose float32 would make the reference wrong by 1e-3."""
    monkeypatch.setenv("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    code = "import os, torch; print(torch.get_float32_matmul_precision(), os.environ.get('NVIDIA_TF32_OVERRIDE'))"
    said = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=variables).stdout.split()
        for variables in (dict(os.environ), environment.without_float32_rounding())
    ]
    assert said == [["high", "1"], ["highest", "None"]]


def test_the_real_binding_has_every_question() -> None:
    nvml = pytest.importorskip("pynvml")
    for question in Nvml().said:
        assert callable(getattr(nvml, f"nvml{question}"))
    for name in ("nvmlInit", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetHandleByUUID", "NVML_CLOCK_SM", "NVMLError"):
        assert hasattr(nvml, name)


@pytest.mark.parametrize("name", ["quickstart", "ladder"])
def test_the_first_recipes_run_on_the_cpu_where_there_is_a_gpu(name: str, tmp_path: Path) -> None:
    recipe = load(recipes.find(recipes.FOLDER / f"{name}.yaml"))
    store = Store(tmp_path, False, lambda _: None)
    assert store.choose_device(Answers(), recipe.device)[0] == "cpu"  # type: ignore[arg-type]
    assert store.gpu is None


def test_another_gpu_is_another_engine_and_the_same_everything_else(tmp_path: Path) -> None:
    engine, half = BuildTensorrt(), CastHalf()
    built: list[str] = []
    stages.write_manifest(tmp_path, {"form": "onnx", "precision": "float32", "spec": make_spec().model_dump(mode="json"), "key": "p"})

    def keys(gpu_here: dict[str, Any] | None) -> list[str]:
        store = Store(tmp_path, False, lambda _: None)
        store.gpu = gpu_here
        store._stage = lambda name, key, device, make: built.append(key)  # type: ignore[assignment,method-assign,return-value,func-returns-value]
        built.clear()
        for step in (engine, half):
            asked = types.SimpleNamespace(pass_=step, name=step.name(), timeout=1.0)
            store.build(None, asked, tmp_path, "cuda", [(1, 8)], Texts(()))  # type: ignore[arg-type]
        return list(built)

    here = {"name": "A10G", "capability": "sm86", "driver": "550.54", "cuda_version": "13.0"}
    first = keys(here)
    for field, other in (("name", "H100"), ("capability", "sm90"), ("driver", "580.1"), ("cuda_version", "12.8")):
        there = keys(here | {field: other})
        assert there[0] != first[0] and there[1] == first[1], field
    assert keys(here) == first


@pytest.mark.parametrize(
    ("steps", "deliver", "packages", "words"),
    [
        (["export_onnx"], "last", {"onnxruntime": "1"}, "'export_onnx' needs onnxruntime-gpu; pip uninstall -y onnxruntime"),
        (["export_onnx"], "last", {"onnxruntime-gpu": "1"}, None),
        (["use_sdpa", "export_onnx"], "use_sdpa", {}, None),
        (["export_onnx"], "fastest", {}, None),
        (["export_onnx", "convert_openvino"], "last", {"onnxruntime-gpu": "1"}, "'convert_openvino' is for a CPU"),
    ],
)
def test_a_runtime_that_cannot_follow_to_the_gpu_is_named_first(
    steps: list[str], deliver: str, packages: dict[str, str], words: str | None
) -> None:
    recipe = from_dict({"schema_version": 1, "model": "m", "deliver": deliver, "steps": [{"pass": name} for name in steps]})
    reason = gpu_conflict(recipe, packages)
    assert reason is None if words is None else words in str(reason)


class Asked:
    """The workers of `verify`, of which one says what CUDA sees."""

    def __init__(self, gpu_here: dict[str, Any] | None) -> None:
        self.gpu = gpu_here

    def start(self) -> Any:
        return self

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def call(self, op: str) -> dict[str, Any]:
        return {"cuda": self.gpu is not None, "gpu": self.gpu}


def test_verify_warns_of_another_gpu() -> None:
    then = {"name": "A10G", "capability": "sm86", "driver": "550.54", "cuda_version": "13.0"}
    fields = {"form": "onnx", "precision": "float32", "spec": make_spec().model_dump(mode="json")}
    on_gpu, on_cpu = stages.Manifest.model_validate(fields | {"gpu": then}), stages.Manifest.model_validate(fields)
    assert other_gpu(Asked(then), on_gpu) == other_gpu(Asked(None), on_gpu) == other_gpu(Asked(then), on_cpu) == []  # type: ignore[arg-type]
    assert other_gpu(Asked(then | {"name": "H100", "driver": "580.1"}), on_gpu) == [  # type: ignore[arg-type]
        "GPU name differs: exported on A10G, here H100", "GPU driver differs: exported on 550.54, here 580.1"
    ]  # fmt: skip
    # A manifest of the CPU is as it was before: no key, the same hash.
    assert '"gpu"' not in on_cpu.sealed().text() and '"gpu"' in on_gpu.sealed().text()


def test_peak_gpu_memory_is_the_process_s(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    ops = Ops()
    assert torch.cuda.is_available() or ops._gpu_bytes() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 1 << 20)
    plant(DeviceGetComputeRunningProcesses=[types.SimpleNamespace(pid=os.getpid(), usedGpuMemory=7 << 30)])
    assert ops._gpu_bytes() == 7 << 30
    # NVML of another PID namespace: what the GPU lost since the model was opened.
    plant(DeviceGetMemoryInfo=types.SimpleNamespace(used=5 << 30, total=24 << 30))
    ops.gpu_used = 2 << 30
    assert ops._gpu_bytes() == 3 << 30
    monkeypatch.setitem(sys.modules, "pynvml", None)
    gpu._device.cache_clear()
    assert ops._gpu_bytes() == 1 << 20
