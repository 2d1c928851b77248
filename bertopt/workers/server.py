"""The fork server of the workers.

`python -m bertopt.workers.server FD` imports torch once, then forks a worker for each request on the socket FD; a worker starts in about
0.1 s. No process is left behind, however bertopt or a worker ends: this process ends when the socket is closed or its parent ends; a
worker dies with this process; orphans of a worker are adopted by the worker and then by this process, so that everything a worker
started is found and killed, even in other sessions and after double forks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import re
import signal
import socket
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from bertopt.errors import BertoptError, PassFailed, ResourceError, Unsupported
from bertopt.system import disk_full, environment, gpu, limits, out_of_memory, out_of_threads, process_tree
from bertopt.workers import protocol

#: A worker needs more memory than bertopt or this process: let the kernel choose it when memory runs out.
_OOM_SCORE = "500"
#: In exclusive compute mode one process at a time may use a GPU.
_BUSY = re.compile(r"busy or unavailable|cudaErrorDevicesUnavailable", re.IGNORECASE)
_LOST_DEVICE = re.compile(r"CUDA error: (?!out of memory)|CUDA failure (?!2:)|cudaErrorIllegalAddress", re.IGNORECASE)


def main(fd: int) -> NoReturn:
    control = socket.socket(fileno=fd)
    parent = os.getppid()
    process_tree.adopt_orphans()
    # A process that the user's script forked may keep the socket open, so the parent's end has to be noticed too.
    signal.signal(signal.SIGTERM, lambda *_: _exit() if os.getppid() != parent else None)
    # Libraries that run out of memory while they are loaded may spin without returning to Python: no handler would run.
    process_tree.die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    _preload()
    process_tree.die_with_parent(signal.SIGTERM)
    if os.getppid() != parent:
        _exit()
    workers: set[int] = set()
    while True:
        message, fds, _, _ = socket.recv_fds(control, 65536, 1)
        if not message:
            _exit()
        request = json.loads(message)
        if request["op"] == "end":
            workers.discard(request["pid"])
            control.send(json.dumps(_end(request["pid"], workers)).encode())
            continue
        pid = os.fork()
        if pid == 0:
            control.close()
            _become_worker(fds[0], request)
        workers.add(pid)
        os.close(fds[0])
        control.send(json.dumps(pid).encode())


def _end(pid: int, others: set[int]) -> dict[str, object]:
    """Kill a worker and all that it started; return its exit code (None where it did not end), and the ids of processes that did not."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + process_tree.END_S
    while (waited := os.waitpid(pid, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.002)
    # Live workers adopt their own orphans, so all others that this process adopted are the dead worker's.
    left = process_tree.end_descendants(spared=others)
    return {"code": os.waitstatus_to_exitcode(waited[1]) if waited[0] else None, "left": left}


def _exit() -> NoReturn:
    process_tree.end_descendants()
    # Tearing torch down politely takes a second; there is nothing to save.
    os._exit(0)


def _preload() -> None:
    """Import what nearly every worker needs, while bertopt checks the recipe. No threads may start here."""
    import bertopt.passes  # noqa: F401
    import bertopt.runtime.predictor  # noqa: F401

    # Workers that only run an artefact do without: what needs it then says so. ValueError: `check_hub_variables` says why.
    with contextlib.suppress(ModuleNotFoundError, ValueError):
        import torch  # noqa: F401
        import transformers.modeling_utils  # noqa: F401
        import transformers.models.auto  # noqa: F401

        import bertopt.modeling.checkpoint  # noqa: F401


def _become_worker(fd: int, request: dict[str, Any]) -> NoReturn:
    parent = os.getppid()
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    process_tree.die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    process_tree.adopt_orphans()
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable(file=2, all_threads=False)
    # Any thread may get the signal; the one that works is written last.
    faulthandler.register(process_tree.WHERE_SIGNAL, file=2, all_threads=True)
    sys.path[:] = request["sys_path"]
    os.environ["BERTOPT_WORKER"] = "1"
    code = 0
    try:
        from bertopt.passes import registry

        registry.add_importable(request["passes"])
        serve(Connection(fd), request["operations"])
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def serve(connection: Connection, operations: str) -> None:
    """Run requests of `Ops` in the module `operations` until the other end is closed."""
    ops = importlib.import_module(operations).Ops()
    while True:
        try:
            message, arrays = protocol.receive(connection)
        except EOFError:
            return
        try:
            result, out = ops(message, arrays)
            reply = {"result": result}
        except BaseException as error:
            traceback.print_exc()
            sys.stderr.flush()
            reply, out = {"error": _describe(error)}, {}
        protocol.send(connection, reply, out)


def _describe(raised: BaseException) -> dict[str, object]:
    # The cause of a PassFailed tells what the machine lacks.
    error = raised.__cause__ if isinstance(raised, PassFailed) and raised.__cause__ else raised
    known: BaseException = error
    if isinstance(error, BertoptError):
        pass
    elif isinstance(error, ModuleNotFoundError):
        known = environment.missing_module(error) or error
    elif isinstance(error, ImportError | OSError | ValueError) and (unusable := environment.unusable_library(str(error))):
        known = unusable
    elif out_of_memory.ended(error):
        known = ResourceError(f"out of memory: {error}")
    elif out_of_threads.said(str(error)):
        known = ResourceError(out_of_threads.REMEDY)
    elif _BUSY.search(str(error)):
        known = Unsupported(f"the GPU takes no further process ({error}); {gpu.SHARE}")
    elif disk_full.is_full(error):
        known = disk_full.resource_error(error)
    elif little := limits.little_address_space():
        known = ResourceError(f"{type(error).__name__}: {error}; {little}")
    if known is error:
        known = raised
    kind = type(known).__name__ if isinstance(known, BertoptError) else "WorkerRaised"
    text = str(known) if isinstance(known, BertoptError) else f"{type(error).__name__}: {error}"
    trace = "".join(traceback.format_exception(raised))
    # After an error of the device every later CUDA call of this process fails.
    return {"type": kind, "message": text, "traceback": trace, "ends": _LOST_DEVICE.search(str(error)) is not None}


if __name__ == "__main__":
    main(int(sys.argv[1]))
