"""The request for an engine: a client's request in the engine's dialect, continued after the tokens so far."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from headway.gateway.relay.continuation import ResumedStream
from headway.gateway.relay.partial_answer import THINK, THINK_END, PartialAnswer
from headway.gateway.relay.request import CHAT, COMPLETIONS, ClientRequest
from headway.gateway.scheduling import vllm_disaggregation
from headway.gateway.scheduling.in_flight import InFlightRequest
from headway.gateway.upstream.dialects import Adapter
from headway.gateway.upstream.engine import EngineEndpoint
from headway.gateway.upstream.errors import EngineError
from headway.gateway.upstream.hints import add_order

_RENDER_S = 1.0
"""Time that the first attempt's engine still gets to render the chat, after another engine needs the prompt."""
_SAMPLING_OPTIONS = (
    "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "logit_bias", "user",
    "skip_special_tokens", "priority", "cache_salt", "vllm_xargs",
)  # fmt: skip
_CHAT_OPTIONS = frozenset(
    (
        "messages",
        "chat_template_kwargs",
        "reasoning_format",
        "max_completion_tokens",
        "stream",
        "stream_options",
    )
)


class CannotResumeError(Exception):
    """The answer cannot be continued on this engine."""


class EngineRequest:
    """The request of one attempt."""

    resumed: ResumedStream | None = None
    """Rewrites the engine's stream if it continues an earlier engine's stream."""
    hidden_fields: tuple[str, ...] = ()
    """Fields of chunks that the client did not request."""
    is_prefill = False
    """Whether the attempt computes the prompt for another replica."""

    def __init__(self, path: str, body: dict[str, Any]) -> None:
        self.path, self.body = path, body


def build(
    request: ClientRequest,
    partial: PartialAnswer,
    in_flight: InFlightRequest,
    replica: EngineEndpoint,
    kv_params: vllm_disaggregation.Params | None,
    before: EngineRequest | None,
    sends_priority: bool,
    now: float,
) -> EngineRequest | None:
    """The request for a replica; None if the answer is complete except for the end of its stream. `kv_params`: location
    of the KV cache at the prefill replica. `before`: the request of the attempt before.

    CannotResumeError if the replica cannot continue the answer.
    """
    adapter, live, reservation = replica.adapter, in_flight.live, in_flight.reservation
    made = EngineRequest(request.path, dict(request.body))
    if partial.tokens or partial.head:
        num_repeated = partial.begin_attempt() if partial.tokens else 0
        if before is not None and before.resumed is not None:
            num_repeated += before.resumed.num_repeated
        if partial.tokens:
            limits = replica.max_context_tokens, live.prompt_tokens
            if partial.finish_reason is not None or partial.tokens_left(*limits) <= 0:
                return None
            made.path, made.body = resume_request(request, partial, adapter, *limits)
        if partial.head:
            made.resumed = ResumedStream(request, partial, made.path, num_repeated)
    body = made.body
    if request.stream:
        is_exact = adapter.gives_token_ids or adapter.has_slots
        partial.limit(request.max_tokens or replica.max_context_tokens, is_exact)
    body["model"] = live.lora or replica.reported_model or request.model or replica.model
    if reservation is not None and reservation.slot is not None:
        body["id_slot"] = reservation.slot
    if sends_priority or replica.engine_ordering or "priority" in body:
        add_order(body, request, live, replica, sends_priority, partial.tokens, now)
    if partial.confidence is not None and made.path == request.path:
        body["logprobs"] = body.get("logprobs") or (True if request.is_chat else 1)
    if request.stream and not request.is_passthrough:
        body["stream"] = True
        body["stream_options"] = {**(request.body.get("stream_options") or {}), "include_usage": True}
        if request.can_resume and adapter.token_options:
            body |= adapter.token_options
            if not any(request.body.get(name) for name in adapter.token_options):
                made.hidden_fields = adapter.token_fields
    if adapter.transfers_kv:
        made.is_prefill = in_flight.assignment.is_prefill_only and request.can_be_split
        if made.is_prefill:
            made.body = vllm_disaggregation.prefill_body(body)
        else:
            made.body = vllm_disaggregation.decode_body(body, kv_params if in_flight.assignment.has_stored_kv else None)
    return made


def resume_request(
    request: ClientRequest, partial: PartialAnswer, adapter: Adapter, context_tokens: int, prompt_tokens: int
) -> tuple[str, dict[str, Any]]:
    """Path and body of the request that continues the answer. CannotResumeError if it cannot be continued."""
    if not request.can_resume:
        raise CannotResumeError
    if partial.goes_on_from_ids:
        prompt: Any = [*(partial.prompt_ids or ()), *(partial.token_ids or ())]
    elif partial.prompt is not None:
        prompt = partial.prompt + _raw_text(partial, partial.prompt)
    elif request.is_chat and adapter.continue_options is not None and not partial.reasoning:
        answer = {"role": "assistant", "content": "".join(partial.text)}
        body = {**request.body, **adapter.continue_options, "messages": [*request.body["messages"], answer]}
        body.pop("max_completion_tokens", None)
        if request.max_tokens is not None:
            body["max_tokens"] = request.max_tokens - partial.tokens
        return CHAT, body
    else:
        raise CannotResumeError
    if adapter.template is None:
        body = {name: request.body[name] for name in _SAMPLING_OPTIONS if name in request.body}
    else:  # the engine accepts the other options, too, but outputs the think tags only if they are preserved
        body = {name: request.body[name] for name in request.body if name not in _CHAT_OPTIONS}
        body["preserved_tokens"] = [THINK, THINK_END]
    return COMPLETIONS, {**body, "prompt": prompt, "max_tokens": partial.tokens_left(context_tokens, prompt_tokens)}


def _raw_text(partial: PartialAnswer, prompt: str) -> str:
    """The answer so far as the model wrote it, with the usual white space around reasoning, which engines strip."""
    text, reasoning = "".join(partial.text), "".join(partial.reasoning)
    if not reasoning:
        return text
    start = "" if prompt.rstrip().endswith(THINK) else f"{THINK}\n"
    return f"{start}{reasoning}\n{THINK_END}\n\n{text}" if text else start + reasoning


async def learn_prompt(request: ClientRequest, partial: PartialAnswer, replica: EngineEndpoint) -> None:
    """Let the engine render the chat as a prompt if it returns no token ids. Rendering starts when the chat is sent,
    because the engine may be gone or busy when the prompt is needed. The result is awaited when the prompt is
    needed."""
    if not partial.tokens:
        if request.stream and request.can_resume and partial.rendering is None:
            partial.rendering = asyncio.create_task(_render(request, partial, replica))
    elif partial.token_ids is None:
        if partial.rendering is not None:
            await asyncio.wait({partial.rendering}, timeout=_RENDER_S)
        if partial.prompt is None:
            partial.prompt = await replica.render_chat(request.body)


async def _render(request: ClientRequest, partial: PartialAnswer, replica: EngineEndpoint) -> None:
    with suppress(EngineError):  # the next replica's engine is asked when the prompt is needed
        partial.prompt = await replica.render_chat(request.body)


async def learn_end_of_reasoning(partial: PartialAnswer, replica: EngineEndpoint) -> None:
    """Ask the engine that will continue for the text of tokens that may have ended the reasoning. Raises EngineError if
    the engine is gone. Raises CannotResumeError without a reply, because the answer could then be taken for
    reasoning."""
    if ids := partial.unread_ids():
        text = await replica.text_of(ids)
        if text is None:
            raise CannotResumeError
        partial.read_ids(text)
