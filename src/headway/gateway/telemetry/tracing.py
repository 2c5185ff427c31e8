"""What a request goes through, as OpenTelemetry's spans: one for the request, and within it one for each time that it
is held, each attempt and each judgement.

The names of attributes are those of OpenTelemetry's semantic conventions for generative AI; Headway's own begin with
`headway.`. Where spans go, how many are kept and what the service is called is up to the OTEL_* variables.
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
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from headway import __version__
from headway.core.record import Outcome
from headway.gateway.relay.relay import Relay
from headway.gateway.relay.request import CHAT, COMPLETIONS, EMBEDDINGS, ClientRequest
from headway.gateway.upstream.engine import EngineEndpoint
from headway.gateway.upstream.errors import EngineError

_OPERATIONS = {CHAT: "chat", COMPLETIONS: "text_completion", EMBEDDINGS: "embeddings"}
_SAMPLING = (
    "temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "seed",
)  # fmt: skip
_MOST = 1 << 63
"""Attributes are numbers of 64 bits; with a longer one, all spans that go out with it would be lost."""
_CONTEXT = TraceContextTextMapPropagator()


class Tracing:
    """One gateway's spans, on their way to wherever they are kept."""

    def __init__(self) -> None:
        named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        self._provider = TracerProvider(resource=Resource.create({} if named else {"service.name": "headway"}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self.tracer = self._provider.get_tracer("headway", __version__)

    def exchange(self, ask: ClientRequest, *more: Any) -> Relay:
        """A request whose way is traced."""
        return _Traced(self, ask, *more)

    def close(self) -> None:
        """Send what has not been sent."""
        self._provider.shutdown()


class _Traced(Relay):
    def __init__(self, tracing: Tracing, ask: ClientRequest, *more: Any) -> None:
        super().__init__(ask, *more)
        self._tracer = tracing.tracer
        lines = [line for line in ask.passed_on.split("\r\n") if line]
        own = ("traceparent:", "tracestate:")
        carried = dict(line.split(": ", 1) for line in lines if line.startswith(own))
        self._plain = "".join(
            f"{line}\r\n" for line in self._headers.split("\r\n") if line and not line.startswith(own)
        )
        self._epoch_ns = time_ns() - round(self._driver.now * 1e9)
        self._since_s = self._live.arrival_s
        """It has waited since then, when it is not at a replica."""
        self._operation = _OPERATIONS.get(ask.path, "chat")
        self._request_span = self._tracer.start_span(
            f"{self._operation} {ask.model}", _CONTEXT.extract(carried), SpanKind.SERVER, self._asked(),
            start_time=self._ns(self._since_s),
        )  # fmt: skip
        self._context = set_span_in_context(self._request_span)

    def _ns(self, time_s: float) -> int:
        return self._epoch_ns + round(time_s * 1e9)

    def _asked(self) -> dict[str, Any]:
        ask, live = self._ask, self._live
        asked = {
            "gen_ai.operation.name": self._operation, "gen_ai.provider.name": "headway",
            "gen_ai.request.model": ask.model, "headway.request_id": self._ticket.request_id, "headway.tier": live.tier,
        }  # fmt: skip
        if ask.max_tokens is not None:
            asked["gen_ai.request.max_tokens"] = ask.max_tokens
        if ask.session is not None:
            asked["gen_ai.conversation.id"] = ask.session
        for name in _SAMPLING:
            if isinstance(value := ask.body.get(name), int | float) and abs(value) < _MOST:
                asked[f"gen_ai.request.{name}"] = value
        return asked

    async def run(self) -> None:
        try:
            await super().run()
        finally:
            self._end()

    def _end(self) -> None:
        span, live, ticket = self._request_span, self._live, self._ticket
        outcome = Outcome.CANCELLED if ticket.outcome is None else ticket.outcome
        if ticket.replica is None or not self._live.generated_tokens:
            self._held(self._driver.now)
        self._used(span)
        span.set_attributes({
            "headway.outcome": outcome.name.lower(), "headway.attempts": live.attempt + 1, "headway.moves": live.moves,
        })  # fmt: skip
        if live.placed_s == live.placed_s:
            span.set_attribute("headway.held_s", live.placed_s - live.arrival_s)
        if live.first_token_s == live.first_token_s:
            span.add_event("first token", timestamp=self._ns(live.first_token_s))
        if outcome is Outcome.REJECTED:
            span.set_attribute("error.type", "rejected" if self._trouble is None else type(self._trouble).__name__)
            span.set_status(Status(StatusCode.ERROR, None if self._trouble is None else str(self._trouble)[:300]))
        span.end()

    def _used(self, span: Span) -> None:
        live = self._live
        span.set_attributes({
            "gen_ai.response.model": live.model, "gen_ai.usage.input_tokens": live.prompt_tokens,
            "gen_ai.usage.output_tokens": live.generated_tokens,
        })  # fmt: skip
        if self._said.finish is not None:
            span.set_attribute("gen_ai.response.finish_reasons", [self._said.finish])

    def _held(self, until_s: float) -> None:
        """It has waited until then."""
        if until_s > self._since_s:
            span = self._tracer.start_span("hold", self._context, start_time=self._ns(self._since_s))
            span.end(self._ns(until_s))
        self._since_s = until_s

    async def _attempt(self, replica: EngineEndpoint) -> None:
        live = self._live
        self._held(live.enqueued_s)
        place = urlsplit(replica.url)
        at: dict[str, Any] = {
            "gen_ai.operation.name": self._operation, "gen_ai.provider.name": replica.adapter.api,
            "gen_ai.request.model": live.model, "server.address": place.hostname or "",
            "server.port": place.port or (443 if place.scheme == "https" else 80),
            "headway.replica": replica.name, "headway.pool": replica.pool, "headway.attempt": live.attempt,
        }  # fmt: skip
        start_ns = self._ns(live.enqueued_s)
        span = self._tracer.start_span("attempt", self._context, SpanKind.CLIENT, at, start_time=start_ns)
        told: dict[str, str] = {}
        _CONTEXT.inject(told, set_span_in_context(span))
        self._headers = self._plain + "".join(f"{name}: {value}\r\n" for name, value in told.items())
        try:
            await super()._attempt(replica)
        except EngineError as error:
            if self._ticket.move_target is not None:
                span.set_attribute("headway.moves_to", self._ticket.move_target.name)
            else:
                span.set_attribute("error.type", type(error).__name__)
                span.set_status(Status(StatusCode.ERROR, str(error)[:300]))
            raise
        finally:
            self._used(span)
            span.end()
            self._since_s = self._driver.now

    async def _judge(self) -> None:
        live = self._live
        num_known, model = len(live.quality), live.model
        with self._tracer.start_as_current_span(
            "judge", self._context, attributes={"gen_ai.response.model": model}
        ) as span:
            await super()._judge()
            if len(live.quality) > num_known:
                span.set_attribute("headway.score", live.quality[-1][1])
            span.set_attribute("headway.accepted", self._ticket.outcome is Outcome.FINISHED)
        self._since_s = self._driver.now
