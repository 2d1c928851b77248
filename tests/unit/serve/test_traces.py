"""Traces of requests: sent where the environment says so, and nowhere else."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from bertopt.serve import traces
from tests.support.serving import InProcess


class Collector(HTTPServer):
    """Keeps what OpenTelemetry's exporter sends."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.services: set[str] = set()
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        sent = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
        assert isinstance(self.server, Collector)
        for of_service in sent.resource_spans:
            self.server.services |= {one.value.string_value for one in of_service.resource.attributes if one.key == "service.name"}
            self.server.spans += [span for scope in of_service.scope_spans for span in scope.spans]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def collector() -> Iterator[Collector]:
    server = Collector()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*traces.ENDPOINTS, "OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"):
        monkeypatch.delenv(name, raising=False)


def test_nothing_is_traced_unless_the_environment_says_where_to() -> None:
    assert traces.provider() is None


def test_a_missing_extra_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(traces.ENDPOINTS[1], "http://127.0.0.1:9")
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.instrumentation.asgi", None)
    monkeypatch.setattr(logging.getLogger("bertopt.serve"), "propagate", True)  # a server in another test sets up its own log
    caplog.set_level("WARNING", logger="bertopt.serve")
    assert traces.provider() is None
    assert "pip install 'bertopt[traces]'" in caplog.text


def test_a_span_for_each_request(embedder: InProcess, collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(traces.ENDPOINTS[1], collector.url)
    sends = traces.provider()
    assert sends is not None
    monkeypatch.setattr(embedder, "app", traces.traced(embedder.app, sends))
    parent = f"00-{'ab' * 16}-{'cd' * 8}-01"
    assert embedder.post("/embed", {"inputs": ["a cat", "two cats"]}, traceparent=parent, **{"x-request-id": "r1"}).status_code == 200
    assert embedder.post("/embed", {"inputs": []}).status_code == 422
    assert embedder.get("/models/health/info", host="metrics.example.com", **{"x-request-id": "r3"}).status_code == 404
    assert embedder.get("/metrics").status_code == embedder.get("/v2/health/live").status_code == embedder.get("/health").status_code == 200
    sends.shutdown()

    right, wrong, named = collector.spans
    assert {one.value.string_value for one in named.attributes if one.key == "bertopt.request_id"} == {"r3"}
    assert collector.services == {"bertopt"}
    assert right.trace_id.hex() == "ab" * 16 and right.parent_span_id.hex() == "cd" * 8
    seen = {one.key: one.value.string_value or one.value.int_value for one in right.attributes}
    assert (seen["bertopt.request_id"], seen["bertopt.model"], seen["bertopt.texts"]) == ("r1", "tiny", 2)
    assert seen["bertopt.tokens"] > 4 and right.end_time_unix_nano > right.start_time_unix_nano
    assert {one.value.int_value for one in wrong.attributes if one.key.endswith("status_code")} == {422}
