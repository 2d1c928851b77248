"""bertopt's side of its workers: start them, ask them, stop them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from bertopt import passes, wire
from bertopt.core import Session
from bertopt.errors import BY_NAME, ResourceError, StepTimeout, UsageError, WorkerCrashed

if TYPE_CHECKING:
    from bertopt.core import Array

LOG_TAIL = 30


class Workers:
    """Starts workers by forking a process that has torch imported. Leaving the context ends every one of them."""

    def __init__(self) -> None:
        if os.environ.get("BERTOPT_WORKER"):
            raise UsageError(
                "this script runs bertopt while a worker imports it; put the call under: if __name__ == '__main__':"
            )
        self._logs = tempfile.TemporaryDirectory(prefix="bertopt-")
        self._control, theirs = socket.socketpair()
        self._log = Path(self._logs.name) / "server.log"
        with self._log.open("wb") as log:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "bertopt.child", str(theirs.fileno())], pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(str(Path(path).resolve()) for path in sys.path)},
            )  # fmt: skip
        theirs.close()
        self._workers: list[Worker] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> Worker:
        mine, theirs = socket.socketpair()
        log = Path(self._logs.name) / f"{len(self._workers)}.log"
        request = {
            "op": "fork",
            "log": str(log),
            "sys_path": [str(Path(path).resolve()) for path in sys.path],
            "passes": passes.offers(),
        }
        try:
            socket.send_fds(self._control, [json.dumps(request).encode()], [theirs.fileno()])
            pid = self._answer()
        except (OSError, ValueError) as error:
            raise WorkerCrashed(f"the worker server ended: {_tail(self._log)}", _tail(self._log)) from error
        finally:
            theirs.close()
        worker = Worker(self, pid, Connection(mine.detach()), log)
        self._workers.append(worker)
        return worker

    def reap(self, pid: int) -> int:
        """Exit code of a worker that is gone, negative for a signal."""
        self._control.send(json.dumps({"op": "reap", "pid": pid}).encode())
        return self._answer()

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self._control.close()
        try:
            self._server.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        self._logs.cleanup()

    def _answer(self) -> int:
        reply = self._control.recv(1024)
        if not reply:
            raise OSError("the worker server closed its socket")
        return int(json.loads(reply))


class Worker:
    """One worker process. Calls raise what the worker raised, WorkerCrashed where it died, StepTimeout where it hung."""

    def __init__(self, workers: Workers, pid: int, connection: Connection, log: Path) -> None:
        self._workers, self.pid, self._connection, self._log = workers, pid, connection, log
        #: False from when its end was noticed: its process id may be another's by now.
        self.alive = True
        self.max_shape: tuple[int, int] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def call(
        self, op: str, arrays: Mapping[str, Array] | None = None, timeout: float | None = None, **args: Any
    ) -> Any:
        return self.exchange(op, arrays, timeout, **args)[0]

    def exchange(
        self, op: str, arrays: Mapping[str, Array] | None = None, timeout: float | None = None, **args: Any
    ) -> tuple[Any, dict[str, Array]]:
        if not self.alive:
            raise WorkerCrashed(f"'{op}' was asked of a worker that has ended")
        try:
            wire.send(self._connection, {"op": op, "args": args}, arrays)
            if not self._connection.poll(timeout):
                self.kill()
                raise StepTimeout(
                    f"'{op}' took longer than {timeout:g} s; raise the step's timeout, or look at what it does"
                )
            message, out = wire.receive(self._connection)
        except (EOFError, OSError) as error:  # OSError: it died in the middle of a message
            raise self._died(op) from error
        if "error" in message:
            described = message["error"]
            kind = BY_NAME.get(described["type"], WorkerCrashed)
            if kind is WorkerCrashed:
                raise WorkerCrashed(described["message"], described["traceback"])
            raise kind(described["message"])
        return message["result"], out

    def pause(self) -> None:
        """Stop the process, so that none of its threads can disturb a measurement."""
        if self.alive:
            os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        if self.alive:
            os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        """Let the worker end by itself, or kill it and what it started."""
        if not self.alive:
            return
        self.resume()
        self._connection.close()
        _ends(self.pid, 0.5)
        self.kill()

    def kill(self) -> None:
        """Kill the worker's whole process group; compilers it started die with it."""
        if not self.alive:
            return
        self.alive = False
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(OSError, ValueError):
            self._workers.reap(self.pid)

    def _died(self, op: str) -> WorkerCrashed | ResourceError:
        self.alive = False
        ended = _ends(self.pid, 1.0)
        if not ended:
            os.killpg(self.pid, signal.SIGKILL)
        log = _tail(self._log)
        try:
            code = self._workers.reap(self.pid)
        except (OSError, ValueError):
            code = 0
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        if not ended:
            return WorkerCrashed(f"the worker closed its connection during '{op}'", log)
        if code == -signal.SIGKILL:
            return ResourceError(
                f"the worker was killed by SIGKILL during '{op}', as the kernel does when memory runs out"
            )
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return WorkerCrashed(f"the worker ended with {how} during '{op}'", log)


class RemoteSession(Session):
    """The session open in a worker."""

    def __init__(self, worker: Worker, timeout: float | None = None) -> None:
        self.worker, self.timeout = worker, timeout

    def load(self, inputs: Mapping[str, Array]) -> None:
        self.worker.call("load", inputs, self.timeout)

    def step(self) -> None:
        self.worker.call("time", timeout=self.timeout, steps=1)

    def fetch(self) -> dict[str, Array]:
        return self.worker.exchange("fetch", timeout=self.timeout)[1]

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return self.worker.exchange("run", inputs, self.timeout)[1]

    def time(self, steps: int) -> list[float]:
        taken: list[float] = self.worker.call("time", timeout=self.timeout, steps=steps)
        return taken


def _ends(pid: int, seconds: float) -> bool:
    """Wait for a process to end; whether it did."""
    deadline = time.monotonic() + seconds
    while (runs := _runs(pid)) and time.monotonic() < deadline:
        time.sleep(0.005)
    return not runs


def _runs(pid: int) -> bool:
    """Whether a process is alive and no zombie."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def _tail(log: Path) -> str:
    try:
        return "\n".join(log.read_text("utf-8", "replace").splitlines()[-LOG_TAIL:])
    except OSError:
        return ""
