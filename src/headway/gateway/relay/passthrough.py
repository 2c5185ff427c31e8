"""Token counts of answers that are passed on unchanged: /v1/responses and /v1/messages, embeddings, audio, images.

Sources: OpenAI's and Anthropic's documentation of these endpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from headway.gateway.errors import DECODE_ERRORS, ApiError
from headway.gateway.upstream import loose_json, sse
from headway.gateway.upstream.chunks import Usage
from headway.gateway.upstream.errors import EngineError, error_in, reported

_LAST_EVENTS = frozenset(
    (
        "response.completed",
        "response.incomplete",
        "response.failed",
        "response.cancelled",
        "message_stop",
        "transcript.text.done",
        "speech.audio.done",
        "error",
    )
)
_FIRST_EVENTS = frozenset(
    (
        "response.created",
        "response.queued",
        "response.in_progress",
        "message_start",
    )
)
"""Events that come before the engine begins to compute."""
_TRANSCRIPTION = "transcription.chunk"
"""The kind of vLLM's transcription events, each with a piece of text."""


class _Event(msgspec.Struct):
    """The fields of an event. Most events have no token counts."""

    type: str = ""
    object: str = ""
    usage: Any = None
    response: Any = None
    message: Any = None
    error: Any = None


_decode_event = msgspec.json.Decoder(_Event).decode


class Passthrough:
    """Counts the tokens of one answer."""

    def __init__(self) -> None:
        self.has_ended = False
        """Whether the last event of the stream has come."""
        self.prompt_tokens = self.generated_tokens = self.cached_tokens = 0
        """Counts reported by the engine; 0: not reported so far."""
        self.is_first = False
        """Whether the last event came before any computation."""
        self.unread = ""
        """The part of the last event that could not be read."""
        self.error: EngineError | None = None
        """The error that the last event reports."""
        self.id: str | None = None
        """Id of a response; empty until it is known."""

    def measure(self, payload: bytes) -> tuple[int, bool]:
        """An event's approximate number of tokens, and whether they are reasoning."""
        self.unread, self.error, self.is_first = "", None, False
        try:
            event = _decode_event(payload)
        except DECODE_ERRORS:
            return self._measure_loosely(payload)
        kind = event.type
        if event.error or kind in ("error", "response.failed") or event.object == "error":
            value = loose_json.parse(payload)
            if isinstance(value, dict) and (error := error_in(value)) is not None:
                self.has_ended, self.error = True, reported(error, value)
                return 0, False
        if kind in _LAST_EVENTS:
            self.has_ended = True
        elif kind in _FIRST_EVENTS:
            self.is_first = True
        if event.response is not None or event.message is not None or event.usage is not None:
            self._take_usages(event.usage, event.response, event.message)
        is_delta = kind.endswith((".delta", "_delta")) and kind != "message_delta"
        is_delta |= event.object == _TRANSCRIPTION and event.usage is None
        is_reasoning = "reasoning" in kind or b'"thinking_delta"' in payload
        return int(is_delta), is_delta and is_reasoning

    def _measure_loosely(self, payload: bytes) -> tuple[int, bool]:
        """`measure` for an event whose fields have unexpected types."""
        value = loose_json.parse(payload)
        if not isinstance(value, dict):
            self.unread = loose_json.NOT_JSON if value is loose_json.UNREAD else loose_json.NOT_OBJECT
            return 0, False
        if (error := error_in(value)) is not None:
            self.has_ended, self.error = True, reported(error, value)
            return 0, False
        kind = value.get("type")
        self.has_ended |= isinstance(kind, str) and kind in _LAST_EVENTS
        self._take_usages(value.get("usage"), value.get("response"), value.get("message"))
        is_strict = isinstance(kind, str) and isinstance(value.get("object", ""), str)
        self.unread = "" if is_strict else loose_json.OTHER_FIELDS
        is_delta = isinstance(kind, str) and kind.endswith((".delta", "_delta")) and kind != "message_delta"
        return int(is_delta), is_delta and "reasoning" in str(kind)

    def _take_usages(self, usage: Any, response: Any, message: Any) -> None:
        for answer in (response, message):
            if isinstance(answer, dict):
                self._take_usage(answer.get("usage"))
        if isinstance(response, dict) and isinstance(response.get("id"), str):
            self.id = response["id"]
        self._take_usage(usage)

    def _take_usage(self, usage: Any) -> None:
        if isinstance(usage, dict):
            counts = loose_json.usage_of(usage)
            self.prompt_tokens = counts.prompt_tokens or self.prompt_tokens
            self.cached_tokens = counts.cached_tokens or self.cached_tokens
            self.generated_tokens = counts.completion_tokens or self.generated_tokens

    def measure_whole(self, data: bytes) -> Usage | None:
        """Token counts of an answer that was not streamed; None if not reported. Raises EngineError if it is an
        error."""
        value = sse.decoded(data)
        self.unread = "" if isinstance(value, dict | list) else loose_json.NOT_OBJECT
        if value is loose_json.UNREAD:
            self.unread = loose_json.NOT_JSON
        if not isinstance(value, dict):
            return None
        if value.get("object") != "response" and (error := error_in(value)) is not None:
            raise reported(error, value)
        answer_id = value.get("id")
        self.id = answer_id if isinstance(answer_id, str) else None
        return usage_in(value)


def usage_in(value: Mapping[str, Any]) -> Usage | None:
    """Token counts in an answer of any endpoint; None if not reported."""
    for name in ("usage", "meta"):  # Cohere's `meta`
        if isinstance(counts := value.get(name), dict):
            return loose_json.usage_of(counts)
    return loose_json.usage_of(value) if "input_tokens" in value else None


def error_event(error: ApiError) -> bytes:
    """The event that ends a failed stream."""
    body = {"type": "error", **error.body(), "message": error.message, "code": error.code, "param": error.param}
    return b"event: error\ndata: " + msgspec.json.encode(body) + b"\n\n"
