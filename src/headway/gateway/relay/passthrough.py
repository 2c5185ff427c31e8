"""Token counts of answers that are passed on unchanged: of /v1/responses and /v1/messages, embeddings, audio, images.

Sources: OpenAI's and Anthropic's documentation of these endpoints.
"""

from __future__ import annotations

import msgspec

from headway.gateway.errors import DECODE_ERRORS, ApiError
from headway.gateway.upstream.chunks import Count, PromptDetails

_LAST_EVENTS = frozenset(
    ("response.completed", "response.incomplete", "response.failed", "message_stop", "transcript.text.done")
)


_TRANSCRIPTION = "transcription.chunk"
"""Kind of vLLM's events of transcriptions, each with a piece of text."""


class _TokenCounts(msgspec.Struct):
    input_tokens: Count = 0
    output_tokens: Count = 0
    prompt_tokens: Count = 0
    completion_tokens: Count = 0
    input_tokens_details: PromptDetails | None = None
    """Of /v1/responses."""
    cache_read_input_tokens: Count | None = None
    """Of /v1/messages, whose `input_tokens` do not count them."""
    cache_creation_input_tokens: Count | None = None

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were in a prefix cache; 0 where the engine does not report them."""
        details = self.input_tokens_details
        return self.cache_read_input_tokens or (0 if details is None else details.cached_tokens or 0)

    @property
    def all_input_tokens(self) -> int:
        """Tokens of the prompt; 0: not reported."""
        cached = (self.cache_read_input_tokens or 0) + (self.cache_creation_input_tokens or 0)
        return self.input_tokens + cached if self.input_tokens else self.prompt_tokens


class _Answer(msgspec.Struct):
    usage: _TokenCounts | None = None


class _Event(msgspec.Struct):
    type: str = ""
    object: str = ""
    usage: _TokenCounts | None = None
    response: _Answer | None = None
    message: _Answer | None = None


_decode_event = msgspec.json.Decoder(_Event).decode
_decode_answer = msgspec.json.Decoder(_Answer).decode


class Passthrough:
    """Counts the tokens of one answer."""

    def __init__(self) -> None:
        self.has_ended = False
        """The last event has come."""
        self.prompt_tokens = self.generated_tokens = self.cached_tokens = 0
        """The engine's own counts; 0: not reported so far."""

    def measure(self, payload: bytes) -> tuple[int, bool]:
        """An event's approximate number of tokens, and whether they are reasoning."""
        try:
            event = _decode_event(payload)
        except DECODE_ERRORS:
            return 0, False
        self.has_ended |= event.type in _LAST_EVENTS
        for answer in (event, event.response, event.message):
            if answer is not None and answer.usage is not None:
                usage = answer.usage
                self.prompt_tokens = usage.all_input_tokens or self.prompt_tokens
                self.cached_tokens = usage.cached_tokens or self.cached_tokens
                self.generated_tokens = usage.output_tokens or usage.completion_tokens or self.generated_tokens
        is_delta = event.type.endswith((".delta", "_delta")) and event.type != "message_delta"
        is_delta |= event.object == _TRANSCRIPTION and event.usage is None
        is_reasoning = "reasoning" in event.type or b'"thinking_delta"' in payload
        return int(is_delta), is_delta and is_reasoning


def usage_of(data: bytes) -> tuple[int, int, int] | None:
    """Prompt, generated and cached tokens of an answer that was not streamed; None: not reported."""
    try:
        usage = _decode_answer(data).usage
    except DECODE_ERRORS:
        return None
    if usage is None:
        return None
    return usage.all_input_tokens, usage.output_tokens or usage.completion_tokens, usage.cached_tokens


def error_event(error: ApiError) -> bytes:
    """The event that ends a failed stream."""
    body = {"type": "error", **error.body(), "message": error.message, "code": error.code, "param": error.param}
    return b"event: error\ndata: " + msgspec.json.encode(body) + b"\n\n"
