"""Traces requests as OpenTelemetry spans: one per request, with inner spans for holds, attempts and judgements.

Attribute names follow OpenTelemetry's semantic conventions for generative AI; Headway's own begin with `headway.`. The
OTEL_* variables set the destination of spans, how many are kept, and the service's name.
"""

from __future__ import annotations

import os
from time import time_ns
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from headway import __version__
from headway.core.record import Outcome
from headway.gateway.relay.relay import Relay
from headway.gateway.relay.request import CHAT, COMPLETIONS, EMBEDDINGS, ClientRequest
from headway.gateway.scheduling.in_flight import InFlightRequest
from headway.gateway.upstream.engine import EngineEndpoint
from headway.gateway.upstream.errors import EngineError

_OPERATIONS = {CHAT: "chat", COMPLETIONS: "text_completion", EMBEDDINGS: "embeddings"}
_SAMPLING_OPTIONS = ("temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "seed")
_LIMIT = 1 << 63
"""Maximum of an attribute, which is a 64-bit number. A larger number would fail the export of its whole batch of
spans."""
_CONTEXT = TraceContextTextMapPropagator()


class Tracing:
    """Exports the spans of one gateway process."""

    def __init__(self) -> None:
        named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        self._provider = TracerProvider(resource=Resource.create({} if named else {"service.name": "headway"}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("headway", __version__)

    def relay(self, request: ClientRequest, in_flight: InFlightRequest, *args: Any) -> Relay:
        """A traced `Relay`, with the same arguments."""
        return TracedRelay(self._tracer, request, in_flight, *args)

    def close(self) -> None:
        """Export the remaining spans."""
        self._provider.shutdown()


class TracedRelay(Relay):
    """Relays one client request, with spans."""

    def __init__(self, tracer: Tracer, request: ClientRequest, in_flight: InFlightRequest, *args: Any) -> None:
        super().__init__(request, in_flight, *args)
        self._tracer = tracer
        lines = [line for line in request.engine_headers.split("\r\n") if line]
        context_headers = ("traceparent:", "tracestate:")
        carrier = dict(line.split(": ", 1) for line in lines if line.startswith(context_headers))
        self._untraced_headers = "".join(
            f"{line}\r\n" for line in self._headers.split("\r\n") if line and not line.startswith(context_headers)
        )
        self._epoch_ns = time_ns() - round(self._scheduler.clock.now * 1e9)
        self._held_since_s = self._live.arrival_s
        """Time at which the last attempt or judgement ended."""
        self._operation = _OPERATIONS.get(request.path, "chat")
        self._request_span = self._tracer.start_span(
            f"{self._operation} {request.model}",
            _CONTEXT.extract(carrier),
            SpanKind.SERVER,
            self._request_attributes(),
            start_time=self._ns(self._held_since_s),
        )
        self._context = set_span_in_context(self._request_span)

    def _ns(self, time_s: float) -> int:
        return self._epoch_ns + round(time_s * 1e9)

    def _request_attributes(self) -> dict[str, Any]:
        request = self._request
        attributes = {
            "gen_ai.operation.name": self._operation,
            "gen_ai.provider.name": "headway",
            "gen_ai.request.model": request.model,
            "headway.request_id": self.in_flight.request_id,
            "headway.tier": self._live.tier,
        }
        if request.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = request.max_tokens
        if request.session is not None:
            attributes["gen_ai.conversation.id"] = request.session
        for name in _SAMPLING_OPTIONS:
            if isinstance(value := request.body.get(name), int | float) and abs(value) < _LIMIT:
                attributes[f"gen_ai.request.{name}"] = value
        return attributes

    async def run(self) -> None:
        try:
            await super().run()
        finally:
            self._end()

    def _end(self) -> None:
        span, live, in_flight = self._request_span, self._live, self.in_flight
        outcome = Outcome.CANCELLED if in_flight.outcome is None else in_flight.outcome
        if in_flight.replica is None or not live.generated_tokens:
            self._end_hold(self._scheduler.clock.now)
        self._set_response_attributes(span)
        span.set_attributes(
            {
                "headway.outcome": outcome.name.lower(),
                "headway.attempts": live.attempt + 1,
                "headway.moves": live.moves,
            }
        )
        if live.placed_s == live.placed_s:
            span.set_attribute("headway.held_s", live.placed_s - live.arrival_s)
        if live.first_token_s == live.first_token_s:
            span.add_event("first token", timestamp=self._ns(live.first_token_s))
        if outcome is Outcome.REJECTED:
            error = self._attempts.error
            span.set_attribute("error.type", "rejected" if error is None else type(error).__name__)
            span.set_status(Status(StatusCode.ERROR, None if error is None else str(error)[:300]))
        span.end()

    def _set_response_attributes(self, span: Span) -> None:
        live, finish_reason = self._live, self.partial.finish_reason
        span.set_attributes(
            {
                "gen_ai.response.model": live.model,
                "gen_ai.usage.input_tokens": live.prompt_tokens,
                "gen_ai.usage.output_tokens": live.generated_tokens,
            }
        )
        if finish_reason is not None:
            span.set_attribute("gen_ai.response.finish_reasons", [finish_reason])

    def _end_hold(self, time_s: float) -> None:
        """Add the span of a hold that ended at this time."""
        if time_s > self._held_since_s:
            span = self._tracer.start_span("hold", self._context, start_time=self._ns(self._held_since_s))
            span.end(self._ns(time_s))
        self._held_since_s = time_s

    async def _attempt(self, replica: EngineEndpoint) -> None:
        live = self._live
        self._end_hold(live.enqueued_s)
        url = urlsplit(replica.url)
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": self._operation,
            "gen_ai.provider.name": replica.adapter.api,
            "gen_ai.request.model": live.model,
            "server.address": url.hostname or "",
            "server.port": url.port or (443 if url.scheme == "https" else 80),
            "headway.replica": replica.name,
            "headway.pool": replica.pool,
            "headway.attempt": live.attempt,
        }
        start_ns = self._ns(live.enqueued_s)
        span = self._tracer.start_span("attempt", self._context, SpanKind.CLIENT, attributes, start_time=start_ns)
        carrier: dict[str, str] = {}
        _CONTEXT.inject(carrier, set_span_in_context(span))
        self._headers = self._untraced_headers + "".join(f"{name}: {value}\r\n" for name, value in carrier.items())
        try:
            await super()._attempt(replica)
        except EngineError as error:
            if self.in_flight.move_target is not None:
                span.set_attribute("headway.moves_to", self.in_flight.move_target.name)
            else:
                span.set_attribute("error.type", type(error).__name__)
                span.set_status(Status(StatusCode.ERROR, str(error)[:300]))
            raise
        finally:
            self._set_response_attributes(span)
            span.end()
            self._held_since_s = self._scheduler.clock.now

    async def _judge(self) -> None:
        live = self._live
        num_scores, model = len(live.quality), live.model
        with self._tracer.start_as_current_span(
            "judge", self._context, attributes={"gen_ai.response.model": model}
        ) as span:
            await super()._judge()
            if len(live.quality) > num_scores:
                span.set_attribute("headway.score", live.quality[-1][1])
            span.set_attribute("headway.accepted", self.in_flight.outcome is Outcome.FINISHED)
        self._held_since_s = self._scheduler.clock.now
