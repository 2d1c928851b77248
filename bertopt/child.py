"""The process that builds stages and runs sessions.

`python -m bertopt.child FD` imports torch once, then forks a worker for each request on the socket FD: a worker
starts in about 0.1 s. Every worker is a session of its own, dies with this process, and this process ends when
the socket's other end does, so nothing is left behind however bertopt ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from bertopt import wire
from bertopt.errors import BertoptError, ResourceError

_PR_SET_PDEATHSIG = 1


def main(fd: int) -> NoReturn:
    control = socket.socket(fileno=fd)
    _preload()
    workers: set[int] = set()
    while True:
        message, fds, _, _ = socket.recv_fds(control, 65536, 1)
        if not message:
            # Whatever a worker started is in its group, and would outlive it.
            for pid in workers:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            # Tearing torch down politely takes a second; there is nothing to save.
            os._exit(0)
        request = json.loads(message)
        if request["op"] == "reap":
            _, status = os.waitpid(request["pid"], 0)
            workers.discard(request["pid"])
            control.send(json.dumps(os.waitstatus_to_exitcode(status)).encode())
            continue
        pid = os.fork()
        if pid == 0:
            control.close()
            _become_worker(fds[0], request)
        workers.add(pid)
        os.close(fds[0])
        control.send(json.dumps(pid).encode())


def _preload() -> None:
    """Import what nearly every worker needs, while bertopt checks the recipe. No threads may start here."""
    import torch  # noqa: F401
    import transformers.modeling_utils
    import transformers.models.auto  # noqa: F401

    import bertopt.checkpoint
    import bertopt.passes
    import bertopt.runtime.predictor  # noqa: F401


def _become_worker(fd: int, request: dict[str, Any]) -> NoReturn:
    parent = os.getppid()
    os.setsid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.path[:] = request["sys_path"]
    os.environ["BERTOPT_WORKER"] = "1"
    code = 0
    try:
        from bertopt import passes

        passes.accept(request["passes"])
        serve(Connection(fd))
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def serve(connection: Connection) -> None:
    """Carry out requests until the other end is closed."""
    from bertopt.ops import Ops

    ops = Ops()
    while True:
        try:
            message, arrays = wire.receive(connection)
        except EOFError:
            return
        try:
            result, out = ops(message, arrays)
            reply = {"result": result}
        except BaseException as error:
            traceback.print_exc()
            sys.stderr.flush()
            reply, out = {"error": _describe(error)}, {}
        wire.send(connection, reply, out)


def _describe(error: BaseException) -> dict[str, object]:
    known: BaseException = error
    if isinstance(error, MemoryError) or type(error).__name__ in ("OutOfMemoryError", "CUDAOutOfMemoryError"):
        known = ResourceError(f"out of memory: {error}")
    elif isinstance(error, OSError) and error.errno in (28, 122):
        known = ResourceError(
            f"no space left on the disk ({error.filename or 'while writing'}); free some and run again"
        )
    kind = type(known).__name__ if isinstance(known, BertoptError) else "WorkerCrashed"
    text = str(known) if isinstance(known, BertoptError) else f"{type(error).__name__}: {error}"
    return {"type": kind, "message": text, "traceback": "".join(traceback.format_exception(error))}


if __name__ == "__main__":
    main(int(sys.argv[1]))
