"""A contender as the benchmark sees it: a separate process that answers requests and sleeps in between."""

from __future__ import annotations

import base64
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

SERVER = Path(__file__).parent / "server.py"
#: Lines of a contender's log that an error shows.
TAIL = 5


class ContenderError(Exception):
    """A contender refused, died or did not answer in time."""


class Contender:
    """Start `python` with `server.py` in a new session; stopped with SIGSTOP whenever no request is open.

    Raises ContenderError where the model cannot be opened within `timeout_s`, which later requests get too.
    """

    def __init__(
        self, name: str, python: Path, options: Mapping[str, Any], log: Path, timeout_s: float,
        path: Sequence[Path] = (), server: Path = SERVER,
    ) -> None:  # fmt: skip
        self.name, self.timeout_s, self._log, self._unread = name, timeout_s, log, b""
        threads = str(options["threads"])
        environment = {
            **os.environ, "OMP_NUM_THREADS": threads, "RAYON_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "true",
            "PYTHONPATH": os.pathsep.join(map(str, path)),
        }  # fmt: skip
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [python, server, json.dumps(options)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=errors, start_new_session=True,
            )  # fmt: skip
        self.facts: dict[str, Any] = self._answer("open")
        self.pause()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def pause(self) -> None:
        """Stop every thread of it, so that none disturbs who is timed."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def ask(self, op: str, **fields: Any) -> Any:
        """Wake it, send one request, wait for its answer, and stop it again."""
        assert self._process.stdin is not None
        if self._process.poll() is not None:
            raise self._failure(f"'{op}' was sent to a process that has ended")
        self.resume()
        try:
            self._process.stdin.write(json.dumps({"op": op, **fields}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._failure(f"'{op}' was sent to a process that has ended") from error
        result = self._answer(op)
        self.pause()
        return result

    def close(self) -> None:
        """Kill it and all that it started in its session."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                # A request that it never read.
                continue

    def _signal(self, number: int) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def _answer(self, op: str) -> Any:
        assert self._process.stdout is not None
        deadline = time.monotonic() + self.timeout_s
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._unread:
            if not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise self._failure(f"'{op}' took longer than {self.timeout_s:g} s")
            some = os.read(descriptor, 1 << 20)
            if not some:
                raise self._failure(f"ended during '{op}'")
            self._unread += some
        line, _, self._unread = self._unread.partition(b"\n")
        message = json.loads(line)
        if "error" in message:
            raise self._failure(message["error"], tail=False)
        return message["result"]

    def _failure(self, words: str, tail: bool = True) -> ContenderError:
        self.close()
        lines = self._log.read_text("utf-8", "replace").splitlines()[-TAIL:] if tail else []
        return ContenderError("; ".join([f"{self.name}: {words}", *(line.strip() for line in lines)]))


def decoded(answers: Mapping[str, Any]) -> NDArray[np.float32] | list[str]:
    """What `server.described` made: vectors float32 [N, H], or labels."""
    if "labels" in answers:
        return list(answers["labels"])
    flat = np.frombuffer(base64.b64decode(answers["float32"]), "<f4")
    return flat.reshape(answers["shape"])
