"""The checks of `bertopt doctor` for GPUs, each for one cause.

Not checked: ECC and other hardware errors, PCIe width, power supplies, and whether the driver's modules fit the kernel.
"""

from __future__ import annotations

from bertopt.system.finding import Finding
from bertopt.system.gpu_facts import runs_here
from bertopt.system.machine import Machine

#: Memory that an idle GPU may have in use: the driver's own, and a desktop's.
_IDLE_BYTES = 2 << 30


def no_gpu(machine: Machine) -> Finding | None:
    if machine.gpus:
        return None
    found, fix = "no NVIDIA device (/dev/nvidia0) is here", "run where one is (docker run --gpus all), or use --target cpu"
    if machine.gpu.in_pci and machine.gpu.container:
        found, fix = "this container was started without GPUs: it has no /dev/nvidia0", "docker run --gpus all"
    elif machine.gpu.in_pci:
        found, fix = "the GPU's driver is not loaded: there is no /dev/nvidia0", "apt-get install nvidia-driver, then restart"
    return Finding(
        check="no_gpu", found=found, stops="nothing can run on a GPU", fix=fix, concerns=("gpu",), blocks=True, only_if_needed=True,
    )  # fmt: skip


def cpu_wheels(machine: Machine) -> list[Finding]:
    findings = []
    if machine.gpus and machine.packages.get("torch", "").endswith("+cpu"):
        again = f"pip install --force-reinstall torch=={machine.packages['torch'].split('+')[0]}"
        findings.append(("torch", "torch is the CPU wheel", again, "gpu"))
    if machine.gpus and "onnxruntime" in machine.packages and "onnxruntime-gpu" not in machine.packages:
        change = "pip uninstall -y onnxruntime && pip install 'bertopt[gpu]'"
        findings.append(("onnxruntime", "onnxruntime is the CPU wheel", change, "onnx_cuda"))
    return [
        Finding(check="cpu_wheels", found=f"{found}, on a machine with a GPU", stops=f"{module} cannot use the GPU", fix=fix,
                concerns=(concerned,), blocks=True)
        for module, found, fix, concerned in findings
    ]  # fmt: skip


def old_driver(machine: Machine) -> list[Finding]:
    state = machine.gpu.state
    if state is None or state.driver_cuda == (0, 0):
        return []
    findings = []
    for module, cuda in (("torch", machine.gpu.torch_cuda), ("onnxruntime-gpu", machine.gpu.onnxruntime_cuda)):
        # Within one major version every driver runs every toolkit (CUDA's minor version compatibility).
        if cuda and int(cuda.split(".")[0]) > state.driver_cuda[0]:
            older = f", or pip install {module} built for CUDA {state.driver_cuda[0]}"
            findings.append(
                Finding(check="old_driver", found=f"the driver {state.driver} runs CUDA {state.driver_cuda[0]}.{state.driver_cuda[1]}; {module} is built for CUDA {cuda}",
                        stops=f"{module} cannot use the GPU", fix=f"install a driver for CUDA {cuda.split('.')[0]}{older}",
                        concerns=("gpu",), blocks=True)
            )  # fmt: skip
    return findings


def wheel_without_gpu(machine: Machine) -> Finding | None:
    state, targets = machine.gpu.state, machine.gpu.torch_targets
    if state is None or not targets or runs_here(targets, state.capability):
        return None
    return Finding(
        check="wheel_without_gpu", found=f"torch {machine.packages['torch']} has code for {', '.join(targets)}; the GPU is {state.capability}",
        stops="torch fails with 'no kernel image is available'", concerns=("gpu",), blocks=True,
        fix="install a torch that supports this GPU: see https://pytorch.org/get-started/locally",
    )  # fmt: skip


def cuda_majors_apart(machine: Machine) -> Finding | None:
    torch, ort = machine.gpu.torch_cuda, machine.gpu.onnxruntime_cuda
    if not torch or not ort or torch.split(".")[0] == ort.split(".")[0]:
        return None
    return Finding(
        check="cuda_majors_apart", found=f"torch is built for CUDA {torch}, onnxruntime-gpu for CUDA {ort}",
        stops="one process cannot load both, so ONNX graphs do not run on the GPU", concerns=("onnx_cuda",), blocks=True,
        fix="pip install --force-reinstall both for one CUDA major version (onnxruntime-gpu 1.27 and later need CUDA 13)",
    )  # fmt: skip


def missing_cuda_libraries(machine: Machine) -> Finding | None:
    names = machine.gpu.missing_libraries
    if not names:
        return None
    major = (machine.gpu.onnxruntime_cuda or "13").split(".")[0]
    # From CUDA 13 on the packages have no suffix, and ONNX Runtime runs without cuFFT.
    suffix, cufft = ("", "") if int(major) >= 13 else (f"-cu{major}", f" nvidia-cufft-cu{major}")
    return Finding(
        check="missing_cuda_libraries", found=f"{' and '.join(names)} cannot be loaded without torch",
        stops="ONNX artefacts do not run on the GPU", concerns=("onnx_cuda",), blocks=True,
        fix=f"pip install nvidia-cublas{suffix} nvidia-cuda-runtime{suffix} nvidia-curand{suffix}{cufft} nvidia-cudnn-cu{major}",
    )  # fmt: skip


def no_cuda_compiler(machine: Machine) -> Finding | None:
    if not machine.gpus:
        return None
    missing = [] if machine.gpu.c_compiler else ["a C compiler"]
    missing += [] if machine.gpu.python_header else ["Python.h"]
    if not missing:
        return None
    return Finding(
        check="no_cuda_compiler", found=f"missing: {' and '.join(missing)}", stops="compile_torch cannot run on the GPU",
        fix="apt-get install gcc python3-dev", concerns=("compile_cuda",), blocks=True, only_if_needed=True,
    )  # fmt: skip


def no_cuda_headers(machine: Machine) -> Finding | None:
    if not machine.gpus:
        return None
    missing = [] if machine.compiler else ["a C++ compiler"]
    missing += [] if machine.gpu.cuda_headers else ["CUDA's headers"]
    if not missing:
        return None
    return Finding(
        check="no_cuda_headers", found=f"missing: {' and '.join(missing)}", stops="package_aot cannot compile for the GPU",
        fix=f"apt-get install g++, and the CUDA toolkit {machine.gpu.torch_cuda or ''}".rstrip() + ", or set CUDA_HOME to one",
        concerns=("package_cuda",), blocks=True, only_if_needed=True,
    )  # fmt: skip


def compute_mode(machine: Machine) -> Finding | None:
    state = machine.gpu.state
    if state is None or not state.refuses_second_process:
        return None
    return Finding(
        check="compute_mode", found=f"the GPU is in compute mode {state.compute_mode}",
        stops="stages cannot be compared, since a second process cannot start", fix="sudo nvidia-smi -c DEFAULT",
        concerns=("gpu",), blocks=True,
    )  # fmt: skip


def shared_gpu(machine: Machine) -> list[Finding]:
    """What disturbs timings and stops nothing."""
    state = machine.gpu.state
    if state is None:
        return []
    seen = [
        (state.mig, "mig", "the GPU is a MIG slice", "its memory bandwidth is shared: speeds hold for this slice alone", "use a whole GPU to measure"),
        (state.mps, "mps", "MPS runs", "other processes can take part of the GPU's cores", "echo quit | nvidia-cuda-mps-control"),
        (bool(state.throttling), "throttling", f"the GPU has lowered its clock ({', '.join(state.throttling)})",
         "timings are slow and noisy", "look at nvidia-smi -q -d PERFORMANCE: cooling, power limit (nvidia-smi -pl)"),
        (bool(state.processes) or machine.gpu.others_bytes > _IDLE_BYTES, "gpu_in_use",
         f"{len(state.processes) or 'unknown'} processes use the GPU and {machine.gpu.others_bytes / 2**30:.1f} GiB of its memory",
         "timings are noisy and memory may end", "end them (nvidia-smi lists them), or choose another GPU by CUDA_VISIBLE_DEVICES"),
    ]  # fmt: skip
    return [
        Finding(check=check, found=found, stops=stops, fix=fix, concerns=("gpu",), only_if_needed=True)
        for there, check, found, stops, fix in seen
        if there
    ]
