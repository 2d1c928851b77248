"""What a worker says of errors of a device, by the words that runtimes use. Nothing here was run on a GPU."""

from __future__ import annotations

import os
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bertopt.errors import PassFailed, Unsupported, WorkerCrashed
from bertopt.workers import protocol
from bertopt.workers.client import Worker
from bertopt.workers.server import _describe


class AcceleratorError(RuntimeError):
    """As torch names errors of CUDA."""


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : BFCArena::AllocateRawInternal Failed to allocate memory "
                     "for requested buffer of size 1073741824"),
        RuntimeError("CUDA failure 2: out of memory ; GPU=0 ; hostname=h ; expr=cudaMalloc((void**)&p, size);"),
        RuntimeError("[defaultAllocator.cpp] cudaErrorMemoryAllocation"),
        AcceleratorError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError(),
    ],
    ids=str,
)  # fmt: skip
def test_memory_that_ends_is_a_resource(error: Exception) -> None:
    assert _describe(error)["type"] == "ResourceError"


def test_a_library_that_cannot_be_loaded_is_what_the_machine_lacks() -> None:
    assert _describe(ImportError("libcudnn.so.9: cannot open shared object file: No such file or directory"))["type"] == "Unsupported"
    assert _describe(ImportError("cannot import name 'nothing'"))["type"] == "WorkerRaised"


@pytest.mark.parametrize(
    "error",
    [
        AcceleratorError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA failure 700: an illegal memory access was encountered ; GPU=0"),
    ],
    ids=str,
)
def test_a_lost_device_ends_the_worker(error: Exception) -> None:
    described = _describe(error)
    assert described["ends"] and described["type"] == "WorkerRaised"


@pytest.mark.parametrize(
    "error", [AcceleratorError("CUDA error: out of memory"), ValueError("no such shape"), Unsupported("no kernel")], ids=str
)
def test_other_errors_do_not(error: Exception) -> None:
    assert not _describe(error)["ends"]


def test_our_own_errors_keep_their_type() -> None:
    assert _describe(Unsupported("the text says CUDA error: out of memory"))["type"] == "Unsupported"


@pytest.mark.parametrize(("error", "alive"), [("CUDA error: device-side assert triggered", False), ("no such shape", True)])
def test_who_calls_ends_a_worker_that_lost_its_device(error: str, alive: bool, tmp_path: Path) -> None:
    ours, theirs = Pipe()
    ended: list[int] = []
    workers: Any = SimpleNamespace(end=lambda pid: (ended.append(pid), (0, []))[1], call_s=60.0)
    worker = Worker(workers, os.getpid(), ours, tmp_path / "log")
    protocol.send(theirs, {"error": _describe(RuntimeError(error))}, {})
    with pytest.raises(WorkerCrashed, match=error):
        worker.call("step")
    assert (worker.alive, bool(ended)) == (alive, not alive)


def test_what_a_pass_raised_for_want_of_memory_is_no_fault_of_the_pass() -> None:
    full, wrong = PassFailed("pass 'mine' raised MemoryError"), PassFailed("pass 'mine' raised KeyError")
    full.__cause__, wrong.__cause__ = MemoryError(), KeyError("a")
    assert _describe(full)["type"] == "ResourceError"
    assert (_describe(wrong)["type"], _describe(wrong)["message"]) == ("PassFailed", "pass 'mine' raised KeyError")
