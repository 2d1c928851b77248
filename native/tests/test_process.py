"""Forks, interrupts, idle threads, masked instruction sets."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import bertopt_native
import numpy as np
import pytest
from conftest import ISAS

Packed = Callable[..., Path]
#: Steps that a thread does not take beside a call that keeps Python's lock: it takes one or two, as the call begins and ends.
ENOUGH = 10


def wait_for(child: int, seconds: float) -> int:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("the child hangs")


@pytest.mark.parametrize("tokens", [20, 2000])
def test_fork(tokens: int, packed: Packed) -> None:
    encoder = bertopt_native.Encoder(packed(), threads=3)
    ids = (np.arange(tokens) % 290).astype(np.int32)
    starts = np.append(np.arange(0, tokens, 20), tokens).astype(np.int64)
    want = encoder.run(ids, starts, output="mean")
    stop = threading.Event()

    def busy() -> None:
        while not stop.is_set():
            encoder.run(ids, starts, output="mean")

    others = [threading.Thread(target=busy) for _ in range(2)]
    for t in others:
        t.start()
    try:
        for _ in range(30):
            child = os.fork()
            if not child:
                ok = all((encoder.run(ids, starts, output="mean") == want).all() for _ in range(3))
                os._exit(0 if ok else 1)
            assert wait_for(child, 20) == 0
    finally:
        stop.set()
        for t in others:
            t.join()


def processor_time(call: Callable[[], object]) -> float:
    """Return the seconds that all threads of this process compute in a call: another process' load does not change them."""
    begin = time.process_time()
    call()
    return time.process_time() - begin


def test_interrupt_between_groups(packed: Packed) -> None:
    encoder = bertopt_native.Encoder(packed(), threads=2)
    ids = np.zeros(1_000_000, np.int32)
    starts = np.arange(0, len(ids) + 1, 50, dtype=np.int64)
    whole = processor_time(lambda: encoder.run(ids, starts, output="mean"))

    def interrupted() -> None:
        with pytest.raises(KeyboardInterrupt):
            encoder.run(ids, starts, output="mean")

    handler = signal.signal(signal.SIGPROF, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_PROF, whole / 10)
        assert processor_time(interrupted) < whole / 2
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)
    assert encoder.run(ids[:10], [0, 10]).shape == (10, 64)


def test_idle_threads_do_not_spin(packed: Packed) -> None:
    encoder = bertopt_native.Encoder(packed(), threads=4)
    encoder.run(np.zeros(2000, np.int32), np.arange(0, 2001, 50), output="mean")
    time.sleep(0.05)
    # Threads of the tests' own process may compute in one of the intervals.
    assert min(processor_time(lambda: time.sleep(0.2)) for _ in range(5)) < 0.02


def steps_beside(call: Callable[[], object]) -> int:
    """Return how many steps this thread takes beside a call in another: those beside the call that leaves it the most of many."""
    most = 0
    for _ in range(100):
        done = threading.Event()
        thread = threading.Thread(target=lambda done=done: (call(), done.set()))
        thread.start()
        steps = 0
        while not done.is_set():
            time.sleep(0.0001)
            steps += 1
        thread.join()
        most = max(most, steps)
        if most >= ENOUGH:
            break
    return most


def test_other_threads_run_meanwhile(packed: Packed) -> None:
    encoder = bertopt_native.Encoder(packed(), threads=1)
    ids = np.zeros(100_000, np.int32)
    assert steps_beside(lambda: encoder.run(ids, np.arange(0, len(ids) + 1, 50), output="mean")) >= ENOUGH


def kernels_of_arm(lines: list[str]) -> list[str]:
    features = set(next(line for line in lines if line.startswith("Features")).split())
    dotprod = "asimddp" in features
    return ["neon_i8mm"] * (dotprod and {"i8mm", "bf16"} <= features) + ["neon_dotprod"] * dotprod


def kernels_of_x86(lines: list[str]) -> list[str]:
    flags = set(next(line for line in lines if line.startswith("flags")).split())
    avx2 = {"avx2", "fma"} <= flags
    vnni = avx2 and {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"} <= flags
    bf16 = vnni and "avx512_bf16" in flags
    amx = bf16 and {"amx_tile", "amx_int8", "amx_bf16"} <= flags
    wide = ["avx512_bf16"] * bf16 + ["avx512_vnni"] * vnni
    if any(line.split()[-1] == "GenuineIntel" for line in lines if line.startswith("vendor_id")):
        wide.reverse()  # whose vectors multiply bf16 slowly
    return ["amx"] * amx + wide + ["avx_vnni"] * (avx2 and "avx_vnni" in flags) + ["avx2"] * avx2


def test_kernels_are_those_that_the_system_sees_the_cpu_has() -> None:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    want = kernels_of_arm(lines) if platform.machine() == "aarch64" else kernels_of_x86(lines)
    # A process may be refused AMX though its CPU has it.
    assert bertopt_native.supported() in (want, [isa for isa in want if isa != "amx"])
    assert bertopt_native.isa() == os.environ.get("BERTOPT_NATIVE_ISA", bertopt_native.supported()[0])


@pytest.mark.skipif("amx" not in ISAS, reason="this CPU has no AMX, or the system does not permit it")
def test_a_process_that_is_refused_amx_goes_on_without_it() -> None:
    """Linux refuses where a stack for signals is too small for the tiles."""
    code = """
import ctypes, bertopt_native
class Stack(ctypes.Structure):
    _fields_ = [("start", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
room = ctypes.create_string_buffer(6000)
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(Stack(ctypes.addressof(room), 0, 6000)), None) == 0
print(*bertopt_native.supported())
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ISAS[1:]


def test_isa_by_environment(packed: Packed) -> None:
    code = (
        "import bertopt_native as b, sys; e = b.Encoder(sys.argv[1]);"
        "print(b.isa(), e.info['isa'], b.Encoder(sys.argv[1], isa=b.supported()[0]).info['isa'])"
    )
    for isa in ISAS:
        environment = {**os.environ, "BERTOPT_NATIVE_ISA": isa}
        out = subprocess.run(
            [sys.executable, "-c", code, packed()], env=environment, capture_output=True, text=True, check=True
        )
        assert out.stdout.split() == [isa, isa, ISAS[0]]
    out = subprocess.run(
        [sys.executable, "-c", code, packed()],
        env={**os.environ, "BERTOPT_NATIVE_ISA": "none"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert out.returncode and "Unsupported: instruction set must be one of: " in out.stderr


def test_runtime_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import bertopt_native, sys; print([m for m in ('torch', 'transformers', 'safetensors') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def process(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("tokens", [50, 4000])
def test_a_process_ends_while_daemon_threads_run(tokens: int, packed: Packed) -> None:
    """Small batches, which threads share, and large ones, which ask for signals."""
    code = """
import sys, threading, time, numpy as np, bertopt_native
encoder = bertopt_native.Encoder(sys.argv[1], threads=2)
ids, starts = np.zeros(int(sys.argv[2]), np.int64), np.arange(0, int(sys.argv[2]) + 1, 50)
def call():
    while True:
        encoder.run(ids, starts, output="mean")
for _ in range(3):
    threading.Thread(target=call, daemon=True).start()
time.sleep(0.2)
"""
    done = process(code, packed(), tokens)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_caller_that_changes_its_arrays_meanwhile_reads_nothing_else(packed: Packed) -> None:
    code = """
import sys, threading, numpy as np, bertopt_native
encoder = bertopt_native.Encoder(sys.argv[1], threads=1)
ids, starts, stop = np.zeros(1000, np.int64), np.arange(0, 1001, 50), threading.Event()
def change():
    while not stop.is_set():
        starts[10] = 2**40
        starts[10] = 500
threading.Thread(target=change).start()
for _ in range(2000):
    try:
        encoder.run(ids, starts, output="mean")
    except ValueError:
        pass
stop.set()
"""
    done = process(code, packed())
    assert (done.returncode, done.stderr) == (0, "")


def test_other_threads_run_while_a_file_is_opened(packed: Packed) -> None:
    """Copying the weights of a large network takes a good part of a second."""
    path = packed(hidden_size=1024, num_attention_heads=16, num_hidden_layers=4, intermediate_size=4096)
    assert steps_beside(lambda: bertopt_native.Encoder(path)) >= ENOUGH


def test_a_file_for_which_there_is_no_memory_is_not_called_damaged(packed: Packed) -> None:
    code = """
import pathlib, resource, sys, bertopt_native
bertopt_native.supported()
used = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used, used))
try:
    bertopt_native.Encoder(sys.argv[1])
except MemoryError:
    print("no memory")
"""
    path = packed(hidden_size=1024, num_attention_heads=16, num_hidden_layers=4, intermediate_size=4096)
    assert process(code, path).stdout == "no memory\n"
