"""OpenTelemetry traces of requests: where the extra `traces` is installed, and the environment names where to send them."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bertopt._version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

#: OpenTelemetry's own variables. Without one nothing is traced or sent.
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
#: Where a request's span is kept in its ASGI scope.
SPAN = "bertopt.span"
#: Routes that are called every few seconds and run no model, as whole URLs: hosts and models may have these names.
UNTRACED = r"^\w+://[^/]*/(health|metrics|v2/health/live|v2/health/ready)$"


def provider() -> TracerProvider | None:
    """Return what sends spans as `OTEL_*` variables say; None where they name no endpoint, or the extra is not installed."""
    if not any(map(os.environ.get, ENDPOINTS)):
        return None
    try:
        import opentelemetry.instrumentation.asgi  # noqa: F401
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        logging.getLogger("bertopt.serve").warning("no traces: %s is missing; pip install 'bertopt[traces]'", error.name)
        return None
    # The environment's OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES come before these.
    named = {"service.name": os.environ.get("OTEL_SERVICE_NAME", "bertopt"), "service.version": __version__}
    made = TracerProvider(resource=Resource.create(named))
    made.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return made


def traced(app: Any, sends: TracerProvider) -> Any:
    """Return the ASGI application `app` with a span for each request, a child of the one that its `traceparent` names."""
    from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware

    def keep(span: Any, scope: dict[str, Any]) -> None:
        scope[SPAN] = span

    return OpenTelemetryMiddleware(
        app, excluded_urls=UNTRACED, server_request_hook=keep, tracer_provider=sends, exclude_spans=["receive", "send"]
    )  # fmt: skip


def describe(scope: Mapping[str, Any], request_id: str, seen: Mapping[str, Any]) -> None:
    """Add to a request's span, where there is one, its id and its model, texts and tokens."""
    if SPAN in scope:
        scope[SPAN].set_attributes({"bertopt.request_id": request_id, **{f"bertopt.{name}": value for name, value in seen.items()}})
