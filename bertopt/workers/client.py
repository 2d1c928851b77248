"""The client's side of workers: start, call and stop them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from bertopt.core import Device, ShapeLimits
from bertopt.errors import BY_NAME, BertoptError, StepTimeout, UsageError, WorkerCrashed
from bertopt.passes import registry
from bertopt.system import environment, limits, process_tree, temporary_directory
from bertopt.workers import diagnosis, protocol

if TYPE_CHECKING:
    from bertopt.core import Array

#: The module whose `Ops` a worker runs by default.
OPERATIONS = "bertopt.workers.operations"
#: Seconds after which a message that makes no progress counts as hung, and that a call may take by default.
STALL_S, CALL_S = 60, 1800.0
#: The share of this process's memory limit that one worker may use, polled while a call waits. (RLIMIT_AS counts address space, of which torch
#: and mapped weights reserve far more than they use, and a cgroup needs rights that users seldom have.) Not seen: peaks between two polls (see
#: docs/reliability.md).
MEMORY_SHARE = 0.9
#: Seconds between two polls of whether a worker is alive (its children may keep the socket open), and that a worker that hangs has to print
#: its stack.
LOOK_S, WHERE_S = 0.25, 1.0
#: Seconds that the server may take to answer: at first it imports torch, perhaps from a slow disk.
SERVER_S = 300.0
#: Seconds that a server may take to end after its socket was closed: some, where memory or CPU time is scarce.
END_S = 10.0
#: torch then asks NVML whether there is a GPU: a CUDA call before a fork would leave every worker without one.
NO_CUDA_CALLS = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


class Workers:
    """Starts workers by forking a process that has torch imported. Leaving the context ends every one of them."""

    #: The module that runs as the process to fork.
    SERVER: ClassVar[str] = "bertopt.workers.server"

    def __init__(self) -> None:
        if os.environ.get("BERTOPT_WORKER"):
            raise UsageError(
                "this script runs bertopt while a worker imports it; put the call under: if __name__ == '__main__':"
            )
        environment.need_proc("stat", "to watch its workers")
        self._logs = temporary_directory.make()
        self._control, theirs = socket.socketpair()
        self._control.settimeout(SERVER_S)
        self._log = Path(self._logs.name) / "server.log"
        with self._log.open("wb") as log:
            # -P: PYTHONPATH has all of `search_path`, and so the current directory only where this process looks for modules there.
            self._server = subprocess.Popen(
                [sys.executable, "-P", "-m", self.SERVER, str(theirs.fileno())], pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env={**environment.without_float32_rounding(), **NO_CUDA_CALLS, "PYTHONHASHSEED": "0", "PYTHONPATH": environment.python_path()},
            )  # fmt: skip
        theirs.close()
        self._workers: list[Worker] = []
        #: Seconds that a call of any worker may take that states no `timeout`.
        self.call_s = CALL_S
        #: Only one request to the server at a time, from whichever thread.
        self._asking = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, operations: str = OPERATIONS) -> Worker:
        """Start a worker that runs the requests of `Ops` in the module `operations`."""
        mine, theirs = socket.socketpair()
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            mine.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", STALL_S, 0))
        log = Path(self._logs.name) / f"{len(self._workers)}.log"
        log.touch(0o600)  # here, where a full disk is an error with the file's name: a worker could only end
        request = {
            "op": "fork",
            "operations": operations,
            "log": str(log),
            "sys_path": environment.search_path(),
            "passes": registry.importable_passes(),
        }
        try:
            with self._asking:
                socket.send_fds(self._control, [json.dumps(request).encode()], [theirs.fileno()])
                pid = int(self._answer())
        except TimeoutError as error:
            self._server.kill()
            self._server.wait()
            raise diagnosis.server_hung(SERVER_S, diagnosis.tail(self._log)) from error
        except (OSError, ValueError) as error:
            raise self.ended() or WorkerCrashed(f"the server of the workers does not answer ({error})", diagnosis.tail(self._log)) from error
        finally:
            theirs.close()
        worker = Worker(self, pid, Connection(mine.detach()), log)
        self._workers.append(worker)
        return worker

    @contextlib.contextmanager
    def calls_within(self, seconds: float) -> Iterator[None]:
        """Let calls of any worker that state no `timeout` take at most `seconds` in the block."""
        before, self.call_s = self.call_s, seconds
        try:
            yield
        finally:
            self.call_s = before

    def end(self, pid: int) -> tuple[int | None, list[int]]:
        """Kill a worker and all processes that it started, also those in other sessions.

        Return the worker's exit code, negative for a signal and None where it is unknown, and the ids of processes that could not be killed.
        """
        try:
            with self._asking:
                self._control.send(json.dumps({"op": "end", "pid": pid}).encode())
                answer = self._answer()
        except (OSError, ValueError):
            # The server is gone; its workers died with it.
            return None, []
        return answer["code"], answer["left"]

    def ended(self) -> BertoptError | None:
        """Return the error that says why the server ended, or None where it still runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._server.wait(timeout=END_S)
        if (code := self._server.poll()) is None:
            return None
        return diagnosis.server_ended(code, diagnosis.tail(self._log))

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self._control.close()
        if not self._workers:  # it may still import torch, and for seconds not notice that the socket is closed; a worker dies with it
            self._server.kill()
        try:
            self._server.wait(timeout=process_tree.END_S + 2)
        except subprocess.TimeoutExpired:
            for pid in [self._server.pid, *process_tree.descendants(self._server.pid)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._server.wait()
        self._logs.cleanup()

    def _answer(self) -> Any:
        reply = self._control.recv(65536)
        if not reply:
            raise OSError("the worker server closed its socket")
        return json.loads(reply)


class Worker:
    """One worker process. Calls raise what the worker raised, WorkerCrashed where it died, StepTimeout where it hung."""

    def __init__(self, workers: Workers, pid: int, connection: Connection, log: Path) -> None:
        self._workers, self.pid, self._connection, self._log = workers, pid, connection, log
        #: False once its end was noticed: its process id may belong to another process by now.
        self.alive = True
        #: Properties of the open model, which `open` sets.
        self.shapes: ShapeLimits | None = None
        self.packed = False
        self.device: Device = "cpu"
        #: Resident bytes beyond which the worker is ended.
        self.memory_bytes = int(MEMORY_SHARE * limits.memory_bytes())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self, directory: Path, device: Device) -> None:
        """Open a committed stage, verified, and remember which batches it can run."""
        opened = self.call("open", directory=str(directory.resolve()), device=device)
        self.shapes = ShapeLimits.model_validate(opened["shapes"])
        self.packed = opened["layout"] == "packed"
        self.device = device

    def fits(self, shape: tuple[int, int]) -> bool:
        """Whether the open model can run a batch of this [B, S]."""
        return self.shapes is None or self.shapes.fit(*shape) is not None

    def call(self, op: str, arrays: Mapping[str, Array] | None = None, timeout: float | None = None, **args: Any) -> Any:
        """Run the operation `op` and return its result; see `exchange`."""
        return self.exchange(op, arrays, timeout, **args)[0]

    def exchange(
        self, op: str, arrays: Mapping[str, Array] | None = None, timeout: float | None = None, **args: Any
    ) -> tuple[Any, dict[str, Array]]:
        """Run the operation `op` for at most `timeout` seconds, `Workers.call_s` unless given, and return its result and arrays."""
        if not self.alive:
            raise WorkerCrashed(f"'{op}' was sent to a worker that has ended")
        try:
            protocol.send(self._connection, {"op": op, "args": args}, arrays)
            if not self._answers(op, timeout := self._workers.call_s if timeout is None else timeout):
                raise self._hangs(op, timeout)
            message, out = protocol.receive(self._connection)
        except (EOFError, OSError) as error:  # OSError: it died, or stalled, in the middle of a message
            raise self._died(op) from error
        if "error" in message:
            described = message["error"]
            raised = BY_NAME.get(described["type"], WorkerCrashed)(described["message"])
            raised.log = described["traceback"]
            if described["ends"]:
                self.kill()
            raise raised
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
        process_tree.ends(self.pid, 0.5)
        self.kill()

    def kill(self) -> tuple[int | None, list[int]]:
        """Kill the worker and all that it started; return what `Workers.end` does."""
        if not self.alive:
            return None, []
        self.alive = False
        return self._workers.end(self.pid)

    def _answers(self, op: str, timeout: float) -> bool:
        """Wait for the first byte of an answer and return whether it came within `timeout` seconds.

        Raises EOFError where the worker has died, ResourceError where it was ended because it took too much memory.
        """
        deadline = time.monotonic() + timeout
        while True:
            if self._connection.poll(min(LOOK_S, max(0.0, deadline - time.monotonic()))):
                return True
            if time.monotonic() >= deadline:
                return False
            if not process_tree.runs(self.pid) and not self._connection.poll(0):
                raise EOFError
            if (used := process_tree.resident_bytes(self.pid)) > self.memory_bytes:
                _, left = self.kill()
                raise diagnosis.took_too_much(op, used, self.memory_bytes, left, diagnosis.tail(self._log))

    def _hangs(self, op: str, timeout: float) -> StepTimeout:
        """End a worker that does not answer, after asking it where it is."""
        before = self._log.stat().st_size
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)
            os.kill(self.pid, process_tree.WHERE_SIGNAL)
        deadline = time.monotonic() + WHERE_S
        size = before
        # Wait until it has written something, and then nothing more for a while.
        while (size == before or self._log.stat().st_size != size) and time.monotonic() < deadline:
            size = self._log.stat().st_size
            time.sleep(0.05)
        _, left = self.kill()
        return diagnosis.took_too_long(op, timeout, left, diagnosis.tail(self._log))

    def _died(self, op: str) -> BertoptError:
        ended = process_tree.ends(self.pid, 1.0)
        code, left = self.kill()
        if code is None and (error := self._workers.ended()) is not None:
            return error
        return diagnosis.worker_ended(op, code if ended else None, left, diagnosis.tail(self._log))
