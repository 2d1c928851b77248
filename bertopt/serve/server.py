"""The process: uvicorn around the application, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from bertopt.errors import Unsupported, UsageError
from bertopt.serve.settings import Settings
from bertopt.system import environment, limits, out_of_threads

if TYPE_CHECKING:
    import uvicorn

#: Connections that wait to be accepted, and seconds that an idle one is kept.
BACKLOG, KEEP_ALIVE_S = 2048, 75
#: Seconds between closing the port and closing idle connections, on which a request may be on its way.
LINGER_S = 0.5
#: Threads that the event loop and what runs beside it start as they need them.
THREADS = 8
#: Share of the open files that may be open before the log warns, at most once in this many seconds. uvloop closes connections beyond
#: the limit without a word.
FULL, WARN_S = 0.9, 60.0


def serve(models: dict[str, Path], settings: Settings, log_level: str = "info") -> None:
    """Serve artefacts until SIGTERM, SIGINT or SIGHUP; return once every accepted request was answered, or the grace is over.

    Raises what `bertopt.load` raises for an artefact that cannot be served here, and UsageError where the port is taken.
    """
    try:
        import prometheus_client  # noqa: F401
        import uvicorn

        from bertopt.serve import slow_clients, traces
        from bertopt.serve.app import create
    except ModuleNotFoundError as error:
        raise environment.missing_module(error) or error from error
    _log_to_stderr(log_level)
    environment.need_proc("self/fd", "to count connections")
    limits.raise_open_files()
    app = create(models, settings)
    out_of_threads.check(THREADS)
    sends = traces.provider()
    config = uvicorn.Config(
        app if sends is None else traces.traced(app, sends),
        host=settings.host, port=settings.port, log_config=None, access_log=False, backlog=BACKLOG, lifespan="on",
        timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=max(1, round(settings.grace_s)), server_header=False,
        http=slow_clients.protocol(settings.timeout_s), ws="none",
    )  # fmt: skip
    server = _server(config, app.state.bertopt, settings)
    try:
        server.run()
        if sends is not None:
            sends.shutdown()  # sends what is left
    except SystemExit as error:
        if error.code not in (1, 3):  # a signal, before uvicorn took them
            raise
        # uvicorn's way to say that it could not listen.
        raise UsageError(f"cannot listen on {settings.host}:{settings.port}; choose a free port with --port, or an address of this machine with --host") from error
    if not server.started:
        raise Unsupported("the server did not start; its log says why")
    if server.force_exit:
        sys.exit(128 + server.ended_by)  # what was accepted may be unanswered


def _server(config: uvicorn.Config, state: Any, settings: Settings) -> uvicorn.Server:
    import uvicorn

    class Server(uvicorn.Server):  # type: ignore[misc]
        ended_by = 0
        #: Open files that are no connections, and when the log may warn again.
        _files, _quiet_until = 0, 0.0

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            """Take SIGHUP too, of a terminal that closes, unless `nohup` has it ignored."""
            with super().capture_signals():
                before = signal.getsignal(signal.SIGHUP)
                if before == signal.SIG_IGN or threading.current_thread() is not threading.main_thread():
                    yield
                    return
                signal.signal(signal.SIGHUP, self.handle_exit)
                try:
                    yield
                finally:
                    signal.signal(signal.SIGHUP, before)

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            """Turn readiness first, then stop accepting. A second signal ends without grace."""
            if not state.accepts:
                self.should_exit = self.force_exit = True
                self.ended_by = sig
                return
            state.drain()
            logging.getLogger("bertopt.serve").info("%s: ending; what was accepted is answered", signal.Signals(sig).name)
            if not settings.drain_s:
                self.should_exit = True
                return
            loop = asyncio.get_running_loop()
            loop.call_later(settings.drain_s, lambda: setattr(self, "should_exit", True))

        async def startup(self, sockets: list[Any] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                self._files = limits.open_files()
                host = f"[{settings.host}]" if ":" in settings.host else settings.host
                port = self.servers[0].sockets[0].getsockname()[1]  # of 0, the one that the system chose
                logging.getLogger("bertopt.serve").info("listening on http://%s:%d; /openapi.json lists the routes", host, port)

        async def on_tick(self, counter: int) -> bool:
            connections, most = len(self.server_state.connections), limits.most_open_files()
            if 0 < FULL * most < connections + self._files and time.monotonic() > self._quiet_until:
                self._quiet_until = time.monotonic() + WARN_S
                text = "%d connections are open, and %d files may be: more are closed unanswered; raise ulimit -n, LimitNOFILE of systemd"
                logging.getLogger("bertopt.serve").warning(text, connections, most)
            return bool(await super().on_tick(counter))

        async def shutdown(self, sockets: list[Any] | None = None) -> None:
            """Close the port, answer what still comes on open connections, then close those."""
            for listening in self.servers:
                listening.close()
            end = time.monotonic() + LINGER_S
            while self.server_state.connections and time.monotonic() < end and not self.force_exit:
                await asyncio.sleep(0.02)
            await super().shutdown(sockets)

    return Server(config)


def _worth_saying(record: logging.LogRecord) -> bool:
    """Whether to log what uvicorn says: not that the port is taken, and not that a second signal ended it."""
    text = record.getMessage()
    return "error while attempting to bind" not in text and not text.rstrip().endswith("CancelledError")


def _log_to_stderr(level: str) -> None:
    """Give bertopt's and uvicorn's loggers one handler; the access log is JSON, one object a line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    handler.addFilter(_worth_saying)
    plain = logging.StreamHandler(sys.stderr)
    plain.setFormatter(logging.Formatter("%(message)s"))
    for name, chosen in (("bertopt.serve", handler), ("uvicorn", handler), ("bertopt.access", plain)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [chosen], False
        logger.setLevel(level.upper() if name != "uvicorn" or level == "debug" else "WARNING")
