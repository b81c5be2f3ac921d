"""Traces of requests for OpenTelemetry, where they are wished for: one span a request, made when its answer is out.

Where spans go, and which, is said by the variables of OpenTelemetry (``OTEL_EXPORTER_OTLP_ENDPOINT``,
``OTEL_TRACES_SAMPLER``, ``OTEL_SERVICE_NAME`` ...). A collector that is away costs spans, never an answer.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from nepcore import __version__
from nepserve.settings import SettingsError

if TYPE_CHECKING:
    from nepserve.settings import Settings

    from .door import Call


class Tracer:
    """Makes spans of requests, and sends them from a thread of its own.

    Raises:
        ImportError: The packages of ``nepserve[otel]`` are not installed.
    """

    def __init__(self) -> None:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        named = Resource({SERVICE_NAME: "nepserve", SERVICE_VERSION: __version__}).merge(
            OTELResourceDetector().detect()
        )
        self._provider = TracerProvider(resource=named, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("nepserve", __version__)
        self._context = TraceContextTextMapPropagator()
        self._server, self._error = trace.SpanKind.SERVER, trace.Status(trace.StatusCode.ERROR)

    def note(self, call: Call, seconds: float) -> None:
        """Make the span of a request that took ``seconds`` until now; a child of the client's, if it named one."""
        end = time.time_ns()
        carrier = {
            name: call.headers[name.encode()].decode("latin-1")
            for name in ("traceparent", "tracestate")
            if name.encode() in call.headers
        }
        route = call.route or "other"
        attributes: dict[str, str | int | float] = {
            "http.request.method": call.method,
            "http.route": route,
            "http.response.status_code": call.status,
            "nepserve.request_id": call.id,
            "nepserve.client": call.client,
        }
        if call.model:
            attributes["nepserve.model"] = call.model
        if call.answer is not None:
            for name in ("queue", "pack", "device", "unpack"):
                attributes[f"nepserve.{name}_ms"] = 1000.0 * getattr(call.answer, f"{name}_seconds")
            attributes["nepserve.batch_atoms"] = call.answer.batch_atoms
        span = self._tracer.start_span(
            f"{call.method} {route}",
            self._context.extract(carrier) if carrier else None,
            self._server,
            attributes,
            start_time=end - int(1e9 * seconds),
        )
        if call.status >= 500:
            span.set_status(self._error)
        if call.note:
            span.set_attribute("nepserve.note", call.note)
        span.end(end)

    def close(self) -> None:
        """Send what there is."""
        self._provider.shutdown()


def tracer_of(settings: Settings) -> Tracer | None:
    """Who is told of requests; None without ``tracing``.

    Raises:
        SettingsError: What it needs is not installed.
    """
    if not settings.tracing:
        return None
    try:
        return Tracer()
    except ImportError as error:
        raise SettingsError(f"tracing needs OpenTelemetry ({error}): pip install 'nepserve[otel]'") from None
