"""A server in this process and clients that need no socket; and a server as a process."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx

from bertopt.serve.settings import Settings

T = TypeVar("T")
ROOT = Path(__file__).parents[2]


class InProcess:
    """The application of some artefacts. `get` and `post` take a path; `together` runs several clients at once."""

    def __init__(self, models: dict[str, Path], **settings: Any) -> None:
        from bertopt.serve.app import create

        self.app = create(models, Settings(**settings))
        self.state = self.app.state.bertopt

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        arguments: dict[str, Any] = {"content": body} if isinstance(body, bytes) else {"json": body}
        return self._one("POST", path, headers=headers, **arguments)

    def get(self, path: str, **headers: str) -> httpx.Response:
        return self._one("GET", path, headers=headers)

    def together(self, bodies: Sequence[tuple[str, Any]]) -> list[httpx.Response]:
        """POST all `bodies` by path at once."""

        async def all_of(client: httpx.AsyncClient) -> list[httpx.Response]:
            return list(await asyncio.gather(*(client.post(path, json=body) for path, body in bodies)))

        return self.run(all_of)

    def run(self, do: Callable[[httpx.AsyncClient], Awaitable[T]]) -> T:
        async def go() -> T:
            transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=60) as client:
                return await do(client)

        return asyncio.run(go())

    def close(self) -> None:
        for model in self.state.models.values():
            model.close()

    def _one(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        return self.run(lambda client: client.request(method, path, **arguments))


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Served:
    """A process that serves `models`, ready when this is."""

    def __init__(self, *models: str, options: tuple[str, ...] = ()) -> None:
        # The system chooses a free port: one that was looked for before may be another process's by then.
        command = [sys.executable, "-m", "bertopt", "serve", *models, "--port", "0", *options]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        )
        self.log: list[str] = []
        self.url = ""
        listening = threading.Event()
        threading.Thread(target=self._read, args=(listening,), daemon=True).start()
        assert listening.wait(120) and self.url, "".join(self.log)
        self.port = int(self.url.rpartition(":")[2])
        assert httpx.get(f"{self.url}/health", timeout=60).status_code == 200

    def _read(self, listening: threading.Event) -> None:
        for line in self.process.stderr or ():
            self.log.append(line)
            if "listening on " in line:
                self.url = line.partition("listening on ")[2].partition(";")[0]
                listening.set()
        listening.set()  # it ended

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=60)
        finally:
            self.process.kill()
