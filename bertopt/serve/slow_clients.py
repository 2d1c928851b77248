"""Bounds for connections that uvicorn leaves open: a head or trailers that do not end, a body that comes after its answer, an answer
that nobody reads. Bodies before their answer are bounded in `call`; connections are not counted here."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

#: Size at which what is no body and does not end is refused: a head, the lines between chunks, trailers. What arrived together with
#: the end of the request or chunk before is not counted.
HEAD_BYTES = 65_536


def protocol(timeout_s: float) -> type[asyncio.Protocol]:
    """Return uvicorn's HTTP protocol, closing a connection whose client keeps it waiting for `timeout_s` inside a head or an answer,
    or sends a head or trailers without end."""
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    from bertopt.serve.upgrades import Parser

    class Bounded(HttpToolsProtocol):  # type: ignore[misc]
        _timer: asyncio.TimerHandle | None = None
        _in_head, _framing_bytes = False, 0

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.parser: Any = Parser(self, self.parser)

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            one = transport.get_extra_info("socket")
            if one is not None and one.family in (socket.AF_INET, socket.AF_INET6):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, round(timeout_s * 1000)))
            self._watch()

        def data_received(self, data: bytes) -> None:
            self._framing_bytes += len(data)
            super().data_received(data)
            if self._framing_bytes > HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response(f"the head must be at most {HEAD_BYTES} bytes")
            self._watch()

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._in_head = True

        def on_header(self, name: bytes, value: bytes) -> None:
            if self._in_head:  # else a trailer, of which no route wants one
                super().on_header(name, value)

        def on_headers_complete(self) -> None:
            self._in_head, self._framing_bytes = False, 0
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._framing_bytes = 0
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._framing_bytes = 0
            super().on_message_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._unwatch()
            super().connection_lost(exc)

        def _watch(self) -> None:
            """Bytes outside of a request begin a head, or belong to a body whose answer is out: the time for them runs."""
            if not self._between():
                self._unwatch()
            elif self._timer is None:
                self._timer = self.loop.call_later(timeout_s, self._late)

        def _unwatch(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _late(self) -> None:
            self._timer = None
            if self._between():
                self.transport.abort()

        def _between(self) -> bool:
            return self.cycle is None or bool(self.cycle.response_complete)

    return Bounded
