"""Builds the request for an engine: a client's request in the engine's dialect, continued after the tokens so far."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from headway.gateway.relay.continuation import CannotResumeError, ResumedStream
from headway.gateway.relay.metering import ResponseMeter
from headway.gateway.relay.request import ClientRequest
from headway.gateway.scheduling import vllm_disaggregation
from headway.gateway.scheduling.in_flight import InFlightRequest
from headway.gateway.scheduling.scheduler import Scheduler
from headway.gateway.upstream.engine import EngineEndpoint
from headway.gateway.upstream.errors import EngineError
from headway.gateway.upstream.hints import add_order

_RENDER_S = 1.0
"""Time that the first attempt's engine still gets to render the chat, after another engine needs the prompt."""


class RequestBuilder:
    """Builds the engines' requests for one client request, attempt by attempt."""

    # Initial values are set in the class, because most requests keep them.
    resumed: ResumedStream | None = None
    """Rewrites the current engine's stream if it continues an earlier engine's stream."""
    hidden_fields: tuple[str, ...] = ()
    """Fields of chunks that the client did not request."""
    is_prefill = False
    """Whether the current attempt computes the prompt for another replica."""
    kv_params: vllm_disaggregation.Params | None = None
    """Location of the KV cache at the prefill replica."""
    rendering: asyncio.Task[None] | None = None
    """Task in which an engine renders the chat."""

    def __init__(
        self,
        request: ClientRequest,
        in_flight: InFlightRequest,
        meter: ResponseMeter,
        scheduler: Scheduler,
        sends_priority: bool,
    ) -> None:
        self._request, self._live, self._in_flight = request, in_flight.live, in_flight
        self._meter, self._scheduler, self._sends_priority = meter, scheduler, sends_priority

    def start_model(self, meter: ResponseMeter) -> None:
        """Start again with another model, whose response `meter` counts."""
        if self.rendering is not None:  # the old rendering used the other model's template
            self.rendering.cancel()
        self.rendering = self.resumed = self.kv_params = None
        self.is_prefill, self.hidden_fields, self._meter = False, (), meter

    async def learn_prompt(self, replica: EngineEndpoint) -> None:
        """Let the engine render the chat as a prompt if it returns no token ids. Rendering starts when the chat is
        sent, because the engine may be gone or busy when the prompt is needed. The result is awaited when the prompt is
        needed."""
        partial, request = self._meter.partial, self._request
        if not partial.tokens:
            if request.stream and request.can_resume and self.rendering is None:
                self.rendering = asyncio.create_task(self._render(replica))
        elif partial.token_ids is None:
            if self.rendering is not None:
                await asyncio.wait({self.rendering}, timeout=_RENDER_S)
            if partial.prompt is None:
                partial.prompt = await replica.render_chat(request.body)

    async def learn_end_of_reasoning(self, replica: EngineEndpoint) -> None:
        """Ask the engine that will continue for the text of tokens that may have ended the reasoning. Raises
        EngineError if the engine is gone. Raises CannotResumeError without a reply, because the answer could then be
        taken for reasoning.
        """
        partial = self._meter.partial
        if ids := partial.unread_ids():
            text = await replica.text_of(ids)
            if text is None:
                raise CannotResumeError
            partial.read_ids(text)

    async def _render(self, replica: EngineEndpoint) -> None:
        with suppress(EngineError):  # the next replica's engine is asked when the prompt is needed
            self._meter.partial.prompt = await replica.render_chat(self._request.body)

    def build(self, replica: EngineEndpoint) -> tuple[str, dict[str, Any] | None]:
        """The path and the body for a replica. If the body is None, the answer is complete except for the end of its
        stream.

        CannotResumeError if the replica cannot continue the answer.
        """
        request, partial, adapter = self._request, self._meter.partial, replica.adapter
        path, body = request.path, dict(request.body)
        num_repeated = self._meter.forget_silent_tokens() if partial.tokens else 0
        if self.resumed is not None:
            num_repeated += self.resumed.num_repeated
        self.resumed, self.hidden_fields, self.is_prefill = None, (), False
        if partial.tokens:
            limits = replica.max_context_tokens, self._live.prompt_tokens
            if partial.finish_reason is not None or partial.tokens_left(*limits) <= 0:
                return path, None
            path, body = partial.resume_request(adapter, *limits)
        if partial.head:
            self.resumed = ResumedStream(request, partial, path, num_repeated)
        if request.stream:
            is_exact = adapter.gives_token_ids or adapter.has_slots
            self._meter.limit(request.max_tokens or replica.max_context_tokens, is_exact)
        body["model"] = self._live.lora or replica.reported_model or request.model or replica.model
        reservation = self._in_flight.reservation
        if reservation is not None and reservation.slot is not None:
            body["id_slot"] = reservation.slot
        if self._sends_priority or replica.engine_ordering or "priority" in body:
            add_order(
                body, request, self._live, replica, self._sends_priority, partial.tokens, self._scheduler.clock.now
            )
        if self._meter.confidence is not None and path == request.path:
            body["logprobs"] = body.get("logprobs") or (True if request.is_chat else 1)
        if request.stream and not request.is_passthrough:
            body["stream"] = True
            body["stream_options"] = {**(request.body.get("stream_options") or {}), "include_usage": True}
            if request.can_resume and adapter.token_options:
                body |= adapter.token_options
                if not any(request.body.get(name) for name in adapter.token_options):
                    self.hidden_fields = adapter.token_fields
        return path, self._phase_body(body) if adapter.transfers_kv else body

    def _phase_body(self, body: dict[str, Any]) -> dict[str, Any]:
        """The body for a replica that may run only one phase of the request."""
        in_flight = self._in_flight
        self.is_prefill = in_flight.is_prefill_only and self._request.can_be_split
        if self.is_prefill:
            return vllm_disaggregation.prefill_body(body)
        return vllm_disaggregation.decode_body(body, self.kv_params if in_flight.has_stored_kv else None)
