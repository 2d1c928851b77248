"""Run an artefact in a new interpreter with another hash seed, thread count and working directory, few environment variables, and new memory
that is not zero.

Not tried: another user, machine or date, and other values of the variables that are kept.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bertopt import stages
from bertopt.core import Device
from bertopt.errors import BY_NAME, BertoptError, ResourceError, StepTimeout, WorkerCrashed, WrongAnswer
from bertopt.passes import registry
from bertopt.runtime import replay, weight_figures
from bertopt.runtime.replay import Answers
from bertopt.runtime.weight_figures import Figures
from bertopt.system import disk_full, environment, out_of_memory, temporary_directory

#: Environment variables that are kept, by prefix: where programs, libraries, caches and GPUs are, and limits on threads.
_KEPT = (
    "PATH", "HOME", "USER", "LANG", "LC_", "TMP", "TEMP", "LD_", "DYLD_", "XDG_", "SSL_", "CC", "CXX", "CUDA", "NVIDIA", "TRITON",
    "TORCH", "PYTORCH", "HF_", "TRANSFORMERS_", "ORT_", "ONNX", "OV_", "OPENVINO", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "TBB_",
    "MALLOC_", "GLIBC_", "VIRTUAL_ENV", "CONDA_", "SYSTEMROOT",
)  # fmt: skip
#: Another hash seed than the workers'.
HASH_SEED = "4242"
#: MALLOC_PERTURB_: glibc's malloc fills new memory with the complement, 0x5a in each byte. Memory read before it was written is then 1.5e16 in
#: float32, not 0 as in a new process, and not NaN, which a correct model may multiply by 0.
UNWRITTEN = "165"
TIMEOUT_S = 600.0


def answers(directory: Path, device: Device, compiled: bool, weights: Figures | None = None) -> tuple[dict[str, Answers], list[str]]:
    """Return the artefact's outputs in a new interpreter, by how it was called, and warnings: files that it read from elsewhere, and what was
    not tried.

    It is opened a second time on more threads than there are cores, unless it is `compiled`, which takes minutes for each thread count.

    Raises what it raises there, and WrongAnswer where concurrent calls give other outputs, where its weights differ from those with these
    figures or change in calls, or where opening it replaces functions or classes of libraries that other models in the process use.
    """
    # Float32 products in full, as in workers: NVIDIA's containers switch on TF32, and outputs would differ too much from what was measured.
    variables = {name: value for name, value in environment.without_float32_rounding().items() if name.startswith(_KEPT)}
    variables |= {"PYTHONHASHSEED": HASH_SEED, "PYTHONPATH": environment.python_path(), "MALLOC_PERTURB_": UNWRITTEN}
    threads = 2 if variables.get("OMP_NUM_THREADS") == "1" or os.cpu_count() == 1 else 1
    # For code that runs before the session sets its number of threads.
    variables["OMP_NUM_THREADS"] = str(threads)
    request = {
        "directory": str(directory.resolve()), "device": device, "threads": threads,
        "compiled": compiled, "more_threads": max(5, 2 * (os.cpu_count() or 1) + 1),
        "passes": registry.importable_passes(), "parent": os.getpid(),
    }  # fmt: skip
    found = _run(request, variables)
    if "error" in found:
        kind, text = found["error"]
        raise BY_NAME.get(kind, WorkerCrashed)(f"the delivered artefact cannot be opened in a new interpreter: {text}")
    if weights is not None and found["weights"] is not None and (name := weight_figures.difference(found["weights"], weights)) is not None:
        raise WrongAnswer(
            f"in a new interpreter the artefact holds another tensor '{name}' than when it was measured: a pass must make the "
            "same weights everywhere"
        )
    if found["drifted"]:
        raise WrongAnswer(
            f"calls of the artefact change its tensor '{found['drifted'][0]}', which adds up over many calls: a pass must leave weights and stored buffers as they are "
            "once the artefact is open, and may change copies"
        )
    precision = stages.read_manifest(directory).precision
    for one_by_one, *at_once in found["at_once"]:
        for answered in at_once:
            replay.check(answered, one_by_one, precision, "a call while other threads call")
    if found["replaced"]:
        raise WrongAnswer(
            f"opening the artefact replaces {', '.join(found['replaced'][:3])} for every model in the process, whose "
            "outputs are not checked: change the network's own modules (`module.forward = …`), not a library's"
        )
    elsewhere = [f"reads '{path}', which is not part of the artefact: it may be missing elsewhere" for path in found["elsewhere"]]
    return found["answers"], elsewhere + found["left_out"]


def _run(request: Mapping[str, Any], variables: Mapping[str, str]) -> dict[str, Any]:
    """Run `runtime.replay_process` in a new interpreter with these environment variables and return what it writes."""
    with temporary_directory.make() as folder:
        out = Path(folder) / "answers.json"
        try:
            ended = subprocess.run(
                [sys.executable, "-P", "-m", "bertopt.runtime.replay_process"], input=json.dumps({**request, "out": str(out)}), text=True,
                env=variables, cwd=folder, capture_output=True, timeout=TIMEOUT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise StepTimeout(f"the delivered artefact did not answer within {TIMEOUT_S:g} s in a new interpreter") from error
        if ended.returncode or not out.is_file():
            raise _ended(ended.returncode, ended.stderr)
        found: dict[str, Any] = json.loads(out.read_text("utf-8"))
    return found


def _ended(code: int, log: str) -> BertoptError:
    """Return the error of an interpreter that ended with `code` (negative for a signal) without writing outputs; `log` is its stderr."""
    how, last = f"a new interpreter that opened the delivered artefact ended with {code}", (log.strip().splitlines() or ["no message"])[-1]
    error: BertoptError = WorkerCrashed(how)
    if disk_full.said(log):
        error = ResourceError(f"{how} ({last}); free space there or in TMPDIR ({tempfile.gettempdir()}), and run again")
    elif code == -signal.SIGKILL or out_of_memory.said(log):
        error = ResourceError(f"{how} ({last}), as happens when memory runs out; free memory, or run elsewhere")
    error.log = log
    return error
