"""A small HTTP/1.1 client for load: little CPU per request beside the server it loads, and exact about what broke.

It speaks what bertopt's and uvicorn's servers speak (Content-Length bodies) and no more: no chunked bodies, no TLS.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any


class NotConnected(ConnectionError):
    """Nobody listens."""


class Broken(ConnectionError):
    """The connection ended before the whole response was there; `partial` where some of it was."""

    def __init__(self, partial: bool) -> None:
        super().__init__("the connection ended in the middle of a response" if partial else "the connection ended without a response")
        self.partial = partial


@dataclass
class Response:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Connection:
    """One keep-alive connection; opened again where the server closed it."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def post(self, path: str, body: bytes, request_id: str = "") -> Response:
        """Raises NotConnected and Broken."""
        if self._writer is None:
            try:
                self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 26)
            except OSError as error:
                raise NotConnected(str(error)) from error
        reader, writer = self._reader, self._writer
        assert reader is not None
        named = f"X-Request-Id: {request_id}\r\n" if request_id else ""
        head = f"POST {path} HTTP/1.1\r\nHost: server\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{named}\r\n"
        received = b""
        try:
            writer.write(head.encode() + body)
            received = await reader.readuntil(b"\r\n\r\n")
            lines = received.decode("latin-1").split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
            content = await reader.readexactly(int(headers.get("content-length", "0")))
        except (OSError, asyncio.IncompleteReadError) as error:
            self.close()
            raise Broken(bool(received) or bool(getattr(error, "partial", b""))) from error
        except BaseException:
            self.close()
            raise
        if headers.get("connection", "").lower() == "close":
            self.close()
        return Response(int(lines[0].split()[1]), headers, content)

    def close(self) -> None:
        if self._writer is not None:
            with contextlib.suppress(OSError, RuntimeError):
                self._writer.close()
        self._reader = self._writer = None


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@dataclass
class Server:
    """A process that serves HTTP on `port`; `command`, the interpreter's path first, gets the port as its last argument. Its log goes to `log`."""

    command: list[str]
    log: Path
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] = field(init=False)
    ready_s: float = field(init=False)

    def __post_init__(self) -> None:
        start = time.monotonic()
        self._file: IO[bytes] = self.log.open("ab")
        self.process = subprocess.Popen([*self.command, str(self.port)], stderr=self._file, stdout=self._file, env=os.environ)
        while True:
            with contextlib.suppress(OSError):
                if self.get("/health") is not None:
                    break
            if self.process.poll() is not None or time.monotonic() > start + 300:
                self.end(signal.SIGKILL)
                raise SystemExit(f"the server did not start: {self.log.read_text()[-2000:]}")
            time.sleep(0.02)
        self.ready_s = time.monotonic() - start

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
            return bytes(answer.read())

    def rss_mb(self) -> float:
        import psutil

        process = psutil.Process(self.process.pid)
        return float(sum(each.memory_info().rss for each in [process, *process.children(recursive=True)])) / 1e6

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, return the exit code, and end children that outlive the process, as LitServe's do."""
        import psutil

        children = []
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.process.pid).children(recursive=True)
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.wait()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        return code

    def wait(self) -> int:
        """Return the exit code of a process that is ending; one that has not after a minute is killed."""
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait(10)
        finally:
            self._file.close()
