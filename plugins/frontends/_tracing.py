"""OpenTelemetry traces: one span for each request of the engine, made when it has ended."""

from __future__ import annotations

import logging
import time
from typing import Any

from engine.core.errors import ConfigError
from engine.core.serve.streams import Stream

log = logging.getLogger(__name__)

SPAN = "llm_request"
HINT = "traces need OpenTelemetry: pip install 'sixhooks[otel]'"


class Tracing:
    """Makes a span of each request that ends: child of the client's ``traceparent``, with the events ``queued``,
    ``started`` and ``first_token``. Attributes have the names that vLLM and OpenTelemetry's conventions for generative
    models use. No text and no token is in them.

    Args:
        provider: an OpenTelemetry ``TracerProvider``.
    """

    def __init__(self, provider: Any) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider, self._trace = provider, trace
        self._tracer = provider.get_tracer("sixhooks")
        self._context = TraceContextTextMapPropagator()
        self._failed = False

    @classmethod
    def to(cls, endpoint: str, service: str) -> Tracing:
        """Spans go to a collector over OTLP/HTTP, from a thread of its own and in batches; what it does not take is
        dropped. Raises ``ConfigError`` where the libraries are missing.

        Args:
            endpoint: e.g. ``http://127.0.0.1:4318/v1/traces``.
            service: what it is called there.
        """
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(f"otel: {HINT} ({error})") from error
        provider = TracerProvider(resource=Resource.create({"service.name": service}), shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        return cls(provider)

    def close(self) -> None:
        """Send what is left, for some seconds at most, and stop."""
        self._provider.shutdown()

    def ended(self, stream: Stream, reason: str) -> None:
        """A request has ended. Never raises: the first failure is logged."""
        try:
            self._span(stream, reason)
        except Exception:
            if not self._failed:
                log.exception("a request could not be traced; later failures are not logged")
            self._failed = True

    def _span(self, stream: Stream, reason: str) -> None:
        course, shift = stream.course, time.time() - time.monotonic()

        def at(moment: float) -> int:
            return int((moment + shift) * 1e9)

        context = self._context.extract({"traceparent": stream.note}) if stream.note else None
        kind = self._trace.SpanKind.SERVER
        span = self._tracer.start_span(SPAN, context, kind=kind, start_time=at(course.accepted))
        span.set_attributes(attributes_of(stream, reason))
        span.add_event("queued", timestamp=at(course.accepted))
        if course.waited is not None:
            reason_of_wait = {"reason": course.waited_for}
            span.add_event("started", reason_of_wait, timestamp=at(course.accepted + course.waited))
        if course.first is not None:
            span.add_event("first_token", timestamp=at(course.first))
        if reason == "error":
            span.set_status(self._trace.StatusCode.ERROR, str(stream.error or "the engine gave up on it"))
        span.end(end_time=at(course.ended or course.accepted))


def attributes_of(stream: Stream, reason: str) -> dict[str, str | int | float | tuple[str, ...]]:
    """What a span says of a request."""
    course = stream.course
    found: dict[str, str | int | float | tuple[str, ...]] = {
        "gen_ai.request.id": stream.external_id,
        "gen_ai.response.finish_reasons": (reason,),
        "gen_ai.usage.prompt_tokens": stream.num_prompt,
        "gen_ai.usage.completion_tokens": stream.num_output,
        "gen_ai.usage.cached_tokens": stream.cached_tokens,
    }
    if stream.tenant:
        found["tenant"] = stream.tenant
    if course.waited is not None:
        found["gen_ai.latency.time_in_queue"] = course.waited
    if course.first is not None:
        found["gen_ai.latency.time_to_first_token"] = course.first - course.accepted
    if course.ended is not None:
        found["gen_ai.latency.e2e"] = course.ended - course.accepted
    return found
