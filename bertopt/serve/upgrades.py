"""Requests that offer another protocol, as Java's HTTP client does with HTTP/2: they are answered in HTTP/1.1, as RFC 9110 has it.

httptools takes what follows such a head for the other protocol: it ends the request without its body, and would read the body as the
next request. Here a second parser reads the body, after a head with the same length or encoding.
"""

from __future__ import annotations

from typing import Any

import httptools

_FRAMING = (b"content-length", b"transfer-encoding")
_CALLBACKS = ("on_message_begin", "on_url", "on_header", "on_headers_complete", "on_body", "on_message_complete")


class Parser:
    """httptools' parser for uvicorn's `protocol`, of a server that changes to no other one."""

    def __init__(self, protocol: Any, parser: Any) -> None:
        self._protocol, self._parser = protocol, parser

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)

    def should_upgrade(self) -> bool:
        return False

    def feed_data(self, data: bytes) -> None:
        """Raises httptools.HttpParserError for what is no HTTP."""
        while data:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                data = data[offer.args[0] :]
                self._go_on()

    def _go_on(self) -> None:
        """Have what comes read as the body of the request whose head was the last."""
        framing = b"".join(b"%s: %s\r\n" % header for header in self._protocol.headers if header[0] in _FRAMING)
        if not framing:
            return
        callbacks = _Callbacks(self._protocol)
        self._parser = httptools.HttpRequestParser(callbacks)
        self._parser.feed_data(b"POST / HTTP/1.1\r\n%s\r\n" % framing)
        callbacks.muted = False
        # httptools said that the request is complete; its task has not begun.
        self._protocol.cycle.more_body = not callbacks.complete


class _Callbacks:
    """What a parser calls: `protocol`, but for the head that is not the client's."""

    def __init__(self, protocol: Any) -> None:
        self.muted, self.complete = True, False
        for name in _CALLBACKS:
            setattr(self, name, self._unless_muted(name, getattr(protocol, name)))

    def _unless_muted(self, name: str, call: Any) -> Any:
        def called(*arguments: bytes) -> None:
            if not self.muted:
                call(*arguments)
            elif name == "on_message_complete":
                self.complete = True

        return called
