"""uvicorn's protocol with the bounds of `slow_clients`, fed without a socket."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bertopt.serve import slow_clients


class Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self.closed = b"", False

    def write(self, data: Any) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


CHUNKED = b"POST / HTTP/1.1\r\nHost: s\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(("first", "more", "closed"), [
    (CHUNKED, b"2\r\n{}\r\n" * 1000, False),
    (CHUNKED + b"0\r\n", b"X-A: b\r\n" * 1000, True),
    (CHUNKED + b"0\r\nX-A: ", b"a" * 8000, True),
    (CHUNKED + b"2\r\n{}\r\n1;", b"a" * 8000, True),
    (b"", b"\r\n" * 4000, True),
    (b"GET / HTTP/1.1\r\n", b"X-A: b\r\n" * 1000, True),
    (b"GET /", b"a" * 8000, True),
    (b"", b"GET / HTTP/1.1\r\n\r\n" * 400, False),
], ids=["chunks", "trailers", "trailer", "chunk extension", "empty lines", "headers", "target", "requests"])  # fmt: skip
def test_what_is_no_body_and_does_not_end_is_refused(first: bytes, more: bytes, closed: bool) -> None:
    """Trailers were kept for as long as a body may take: in eight seconds 5 GB."""
    import uvicorn
    from uvicorn.server import ServerState

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(60)

    async def go() -> tuple[bytes, bool, int, int]:
        config = uvicorn.Config(app, ws="none", log_config=None)
        config.load()
        transport = Transport()
        protocol: Any = slow_clients.protocol(30)(config, ServerState(), {}, asyncio.get_running_loop())  # type: ignore[call-arg]
        protocol.connection_made(transport)
        protocol.data_received(first)
        sent, kept = 0, 0
        while sent < 2_000_000 and not transport.closed:
            protocol.data_received(more)
            sent += len(more)
            kept = len(protocol.headers or ())
        ended = transport.closed
        protocol.connection_lost(None)
        for task in protocol.tasks:
            task.cancel()
        return transport.written, ended, sent, kept

    written, ended, sent, kept = asyncio.run(go())
    assert ended == closed and (b"at most 65536 bytes" in written) == closed
    assert sent <= slow_clients.HEAD_BYTES + len(more) if closed else sent >= 2_000_000
    assert kept <= (slow_clients.HEAD_BYTES + len(more)) // len(b"X-A: b\r\n")
