"""Answers that are passed on as they come: of /v1/responses and /v1/messages, whole or streamed, and embeddings.

Headway only counts in them: the sources are OpenAI's and Anthropic's documentation of these endpoints.
"""

from __future__ import annotations

import msgspec

from headway.gateway.errors import DECODE_ERRORS, ApiError
from headway.gateway.upstream import sse

_ENDS = frozenset(("response.completed", "response.incomplete", "response.failed", "message_stop"))


class _Counts(msgspec.Struct):
    input_tokens: sse.Count = 0
    output_tokens: sse.Count = 0


class _State(msgspec.Struct):
    usage: _Counts | None = None


class _Event(msgspec.Struct):
    type: str = ""
    usage: _Counts | None = None
    response: _State | None = None
    message: _State | None = None


_decode = msgspec.json.Decoder(_Event).decode


class _Usage(msgspec.Struct):
    input_tokens: sse.Count = 0
    output_tokens: sse.Count = 0
    prompt_tokens: sse.Count = 0
    completion_tokens: sse.Count = 0


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


class Passthrough:
    """One answer."""

    def __init__(self) -> None:
        self.is_over = False
        """Its last event has come."""
        self.read_tokens = self.written_tokens = 0
        """As its engine counts them; 0: not said yet."""

    def hear(self, payload: bytes) -> tuple[int, bool]:
        """An event: how many tokens it brings, about, and whether they are thoughts."""
        try:
            part = _decode(payload)
        except DECODE_ERRORS:
            return 0, False
        self.is_over |= part.type in _ENDS
        for whole in (part, part.response, part.message):
            if whole is not None and whole.usage is not None:
                self.read_tokens = whole.usage.input_tokens or self.read_tokens
                self.written_tokens = whole.usage.output_tokens or self.written_tokens
        is_delta = part.type.endswith((".delta", "_delta")) and part.type != "message_delta"
        thinks = "reasoning" in part.type or b'"thinking_delta"' in payload
        return int(is_delta), is_delta and thinks

    @staticmethod
    def whole(data: bytes) -> tuple[int, int] | None:
        """Tokens read and written, by a whole answer."""
        try:
            usage = msgspec.json.decode(data, type=_Answer).usage
        except DECODE_ERRORS:
            return None
        if usage is None:
            return None
        return usage.input_tokens or usage.prompt_tokens, usage.output_tokens or usage.completion_tokens

    @staticmethod
    def error(error: ApiError) -> bytes:
        """The event that ends a stream that broke."""
        body = {"type": "error", **error.body(), "message": error.message, "code": error.code, "param": error.param}
        return b"event: error\ndata: " + msgspec.json.encode(body) + b"\n\n"
