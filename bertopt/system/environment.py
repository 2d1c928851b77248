"""Hardware, system and package versions, on which measurements and stages depend."""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from bertopt.errors import BertoptError, Unsupported, missing_library
from bertopt.system import limits

PACKAGES = (
    "bertopt", "torch", "transformers", "tokenizers", "safetensors", "optimum", "numpy", "onnx", "onnx-ir", "onnxscript",
    "onnxruntime", "onnxruntime-gpu", "openvino", "nncf", "tensorrt", "tensorrt-rtx",
    "bertopt-native",
)  # fmt: skip
PROC = Path("/proc")
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
#: What `-march=native` chooses instructions from, as /proc/cpuinfo spells it.
_COMPILED = re.compile(
    r"(sse4|avx|amx|bmi|fma|sve|asimd)\w*|f16c|abm|movbe|popcnt|aes|sha_ni|vaes|vpclmulqdq|gfni|adx|rdseed|clwb|i8mm|bf16|atomics"
)
#: CPU features of which one is needed for fast (and for INT8 exact) products in a precision: without VNNI the sum of two INT8 products
#: saturates. Runtimes silently run without them.
NATIVE = {
    "int8": {"avx_vnni", "avx512_vnni", "amx_int8", "asimddp", "i8mm"},
    "bfloat16": {"avx512_bf16", "amx_bf16", "bf16"},
}

#: Variables that round the inputs of float32 products, with errors of 1e-3: to TF32 (NVIDIA's containers of torch set the first), and to bfloat16
#: in oneDNN, which torch uses on ARM and in compiled code; guides for ARM servers recommend that.
_ROUND_FLOAT32 = ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "NVIDIA_TF32_OVERRIDE", "ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE")

#: Variables that huggingface_hub reads when it is imported.
_HUB_SECONDS = ("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT")


def without_float32_rounding() -> dict[str, str]:
    """Return this process's environment variables without those that round float32 products."""
    return {name: value for name, value in os.environ.items() if name not in _ROUND_FLOAT32}


def check_docstrings() -> None:
    """Raise Unsupported where Python has dropped the docstrings, from which transformers writes those of its models when it imports them."""
    if sys.flags.optimize > 1:
        raise Unsupported("transformers cannot import its models without their docstrings, which python -OO drops; unset PYTHONOPTIMIZE, or leave out -OO")


def check_hub_variables() -> None:
    """Raise Unsupported where a variable keeps huggingface_hub, and so transformers, from being imported."""
    for name in _HUB_SECONDS:
        try:
            int(os.environ.get(name, "0"))
        except ValueError as error:
            raise Unsupported(f"{name} must be a whole number of seconds, or huggingface_hub cannot be imported; got '{os.environ[name]}': change or unset it") from error


def search_path() -> list[str]:
    """Return where this process looks for modules, as absolute paths: another process may have another working directory."""
    return [str(Path(path).resolve()) for path in sys.path]


def python_path() -> str:
    """Return `search_path` as a PYTHONPATH for another process."""
    return os.pathsep.join(search_path())


def version(package: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of those of `PACKAGES` that are installed."""
    found = {package: version(package) for package in PACKAGES}
    return {package: v for package, v in found.items() if v is not None}


def isa(cpuinfo: str | None = None) -> list[str]:
    """The features of this CPU that decide which kernels run."""
    words = set((_cpuinfo() if cpuinfo is None else cpuinfo).split())
    return [flag for flag in ISA if flag in words]


def instructions() -> tuple[str, ...]:
    """Return every instruction set of this CPU that a compiler may use when it builds for this machine."""
    return tuple(sorted({word for word in _cpuinfo().split() if _COMPILED.fullmatch(word)}))


def _cpuinfo() -> str:
    return (PROC / "cpuinfo").read_text() if (PROC / "cpuinfo").exists() else ""


def need_proc(name: str, why: str) -> None:
    """Raise Unsupported where `name` is missing in /proc, as it is in a chroot without it, and with systemd's ProcSubset=pid."""
    if not (PROC / name).exists():
        raise Unsupported(f"bertopt reads '{PROC / name}' {why}, and it is not there; mount /proc whole (systemd: ProcSubset=all)")


def need_cpuinfo() -> None:
    """Raise Unsupported where nothing says which instructions this CPU has."""
    need_proc("cpuinfo", "to know this CPU's instructions")


def describe() -> dict[str, Any]:
    """Hardware, system and package versions of this machine, without importing any of the packages."""
    cpuinfo = _cpuinfo()
    return {
        "cpu": cpu_name(cpuinfo),
        "cores": limits.cores(),
        "isa": isa(cpuinfo),
        "memory_gib": round(limits.memory_bytes() / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": versions(),
    }


def cpu_name(cpuinfo: str) -> str:
    """Return what /proc/cpuinfo calls this CPU. ARM's have numbers there, of the implementer and the part, and no name."""
    fields: dict[str, str] = dict(re.findall(r"^(model name|CPU implementer|CPU part)\s*:\s*(.+?)\s*$", cpuinfo, re.MULTILINE))
    if "CPU part" in fields:
        return f"{platform.machine()}, implementer {fields.get('CPU implementer', '?')}, part {fields['CPU part']}"
    return fields.get("model name", platform.machine())


def saturates_int8(cpuinfo: str | None = None) -> bool:
    """Return whether this CPU adds two products of 8 bits in 16 bits, which overflow: x86 without VNNI."""
    flags = isa(cpuinfo)
    return "avx2" in flags and not NATIVE["int8"] & set(flags)


def check_isa(form: str, precision: str, measured_with: Sequence[str], device: str) -> None:
    """Raise Unsupported if an artefact was measured with CPU instructions for its precision that this CPU lacks.

    One that was exported without them was measured without them, so it may run anywhere; as may the native encoder's, whose kernels
    all multiply the same numbers.
    """
    if form == "native":
        return
    native = NATIVE.get(precision, set())
    then, now = set(measured_with) & native, set(isa()) & native
    if device == "cpu" and then and not now:
        need_cpuinfo()
        raise Unsupported(
            f"the artefact is {precision} and was measured with {', '.join(sorted(then))}; this CPU has none of "
            f"{', '.join(sorted(native))} and would run it slowly or less exactly; export again on a machine like this one, "
            "or deliver a float32 stage"
        )


#: The extra that brings a module which running an artefact does not need.
_EXTRA_OF = {
    **dict.fromkeys(("torch", "transformers", "optimum", "requests", "scipy", "onnx", "onnx_ir", "onnxscript", "nncf"), "cpu"),
    **dict.fromkeys(("starlette", "uvicorn", "prometheus_client", "httptools", "orjson"), "serve"),
}  # fmt: skip


def missing_module(error: ModuleNotFoundError) -> BertoptError | None:
    """Return the install line for a missing module that an extra brings, or None for any other module."""
    name = (error.name or "").partition(".")[0]
    extra = _EXTRA_OF.get(name)
    if extra is None:
        return None
    also = " (on a GPU: 'bertopt[gpu]')" if extra == "cpu" else ""
    return missing_library(f"this needs {name}, which running an artefact does not", f"'bertopt[{extra}]'{also}")


#: What the loader says of a library that it cannot find or use, and torch of its CUDA libraries. Libraries that find no memory say something else.
_UNUSABLE = re.compile(
    r"\.so\b.*(cannot open shared object file|undefined symbol|version .* not found|not found in the system path|file too short|invalid ELF header)"
)


def unusable_library(said: str) -> Unsupported | None:
    """Return what to do where an import `said` that a library is missing or damaged, as torch does without its CUDA libraries."""
    if not _UNUSABLE.search(said):
        return None
    first = said.partition(" in the system path")[0]  # all of sys.path follows
    return Unsupported(f"a library that is needed cannot be loaded ({first}); run bertopt doctor, which says what to install")


#: Packages that an extra of bertopt brings.
OPTIONAL = ("onnxruntime", "onnxscript", "openvino", "onnxruntime-gpu", "tensorrt", "tensorrt-rtx")
#: Other extras: a module that shows one, and what it is for.
EXTRAS = {
    "serve": ("uvicorn", "`bertopt serve`"), "native": ("bertopt_native", "`build_native` and its artefacts; in a clone pip install ./native"),
    "sign": ("cryptography", "`bertopt sign`, `verify --key`"), "metrics": ("sklearn", "macro-F1, MCC and the like"),
}  # fmt: skip


def missing_extras() -> list[str]:
    """Return the extras that are not installed, with what each is for."""
    return [f"{extra} ({use})" for extra, (module, use) in EXTRAS.items() if importlib.util.find_spec(module) is None]
