"""Failures of engines, and the errors that clients get because of them."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from headway.gateway.errors import DECODE_ERRORS, ApiError

_RETRYABLE = frozenset((408, 429))
_MAX_QUOTED_CHARS = 1000
"""Of an error body in an unknown format."""


class EngineError(Exception):
    """The engine ended its answer early or sent an invalid one."""

    is_untouched = False
    """The engine did not start to process the request."""


class UnreachableError(EngineError):
    """No connection to the engine can be opened."""

    is_untouched = True


class BrokenOffError(EngineError):
    """The engine closed the connection before the end of its answer."""


class NoAnswerError(EngineError):
    """The engine did not answer in time."""


class InvalidAnswerError(EngineError):
    """The engine answered with what is no completion."""


class RefusedError(EngineError):
    """The engine answered with an error status."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"answered {status}: {body[:300].decode(errors='replace')}")
        self.status, self.body = status, body
        self.is_untouched = status in (429, 503)


class UnconfirmedRefusalError(RefusedError):
    """The engine refused a request that another replica may answer."""


class TooLongError(RefusedError):
    """The engine refused a request that its context cannot hold; that of another model may."""


_TOO_LONG = re.compile(rb"context[ _](?:length|size|window)|maximum model length|prompt is too long", re.IGNORECASE)
"""What vLLM, SGLang, llama.cpp, OpenAI and Anthropic say of such a request."""


def is_too_long(status: int, body: bytes) -> bool:
    """Whether a refusal says that the request does not fit the model's context."""
    return status in (400, 413) and _TOO_LONG.search(body[:_MAX_QUOTED_CHARS]) is not None


def is_retryable(status: int) -> bool:
    """Whether another engine may answer better. Redirects count: an engine has no reason to send one."""
    return status in _RETRYABLE or status >= 500 or 300 <= status < 400


class _Message(msgspec.Struct):
    message: str


class _OpenAiError(msgspec.Struct):
    error: _Message


class _OtherError(msgspec.Struct):
    """vLLM before 0.10 has `message`, and FastAPI's own errors have `detail`."""

    message: Any = None
    detail: Any = None


def openai_error(status: int, data: bytes) -> bytes:
    """An engine's error body: unchanged if it is OpenAI's error object, else converted to one."""
    try:
        msgspec.json.decode(data, type=_OpenAiError)
    except DECODE_ERRORS:
        message = _message(data)[:_MAX_QUOTED_CHARS] or f"the engine answered {status}"
        return ApiError(status, message, "engine_refused").json()
    return data


def _message(data: bytes) -> str:
    text = data.decode(errors="replace")
    try:
        error = msgspec.json.decode(data, type=_OtherError)
    except DECODE_ERRORS:
        return text
    return next((value for value in (error.message, error.detail) if isinstance(value, str)), text)


def client_error(name: str, error: EngineError | None) -> ApiError:
    """The error for a client whose request failed at the replica `name`."""
    if isinstance(error, RefusedError) and error.status in (429, 503):
        return ApiError(error.status, f"{name} {error}", "engine_overloaded", retry_after_s=1)
    return ApiError(502, f"{name} {error}", "engine_error")
