"""Bounds for connections that uvicorn leaves open: a head that does not end, a body that comes after its answer, an answer that
nobody reads. Bodies before their answer are bounded in `call`; connections are not counted here."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

#: Size at which a head that has not ended is refused; what arrived with its first bytes is not counted.
HEAD_BYTES = 65_536


def protocol(timeout_s: float) -> type[asyncio.Protocol]:
    """Return uvicorn's HTTP protocol, closing a connection whose client keeps it waiting for `timeout_s` inside a head or an answer,
    or sends a head without end."""
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class Bounded(HttpToolsProtocol):  # type: ignore[misc]
        _timer: asyncio.TimerHandle | None = None
        _in_head, _head_bytes = False, 0

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            one = transport.get_extra_info("socket")
            if one is not None and one.family in (socket.AF_INET, socket.AF_INET6):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, round(timeout_s * 1000)))
            self._watch()

        def data_received(self, data: bytes) -> None:
            self._head_bytes = self._head_bytes + len(data) if self._in_head else 0
            if self._head_bytes > HEAD_BYTES:
                self.send_400_response(f"the head must be at most {HEAD_BYTES} bytes")
                return
            super().data_received(data)
            self._watch()

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._in_head = True

        def on_headers_complete(self) -> None:
            self._in_head = False
            super().on_headers_complete()

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
