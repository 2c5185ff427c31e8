"""What engines say in place of an answer: whether another one might do better, and what clients are told of it."""

from __future__ import annotations

from typing import Any

import msgspec

from headway.gateway.errors import ApiError
from headway.gateway.relay import sse
from headway.gateway.upstream.client import EngineError

AGAIN = frozenset((408, 429))
"""What an engine answers when another one might do better, beside what begins with 5."""
_LONGEST = 1000
"""Characters of what is not understood that a client is told."""


def is_no_answer(status: int) -> bool:
    """Another engine might do better; or it sends clients elsewhere, which engines do not."""
    return status in AGAIN or status >= 500 or 300 <= status < 400


class RefusedError(EngineError):
    """The engine answered with an error."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"answered {status}: {body[:300].decode(errors='replace')}")
        self.status = status
        self.is_untouched = status in (429, 503)


class _Error(msgspec.Struct):
    message: str


class _Told(msgspec.Struct):
    error: _Error


class _Otherwise(msgspec.Struct):
    """vLLM before 0.10 has `message`, and FastAPI's own errors have `detail`."""

    message: Any = None
    detail: Any = None


def refusal(status: int, data: bytes) -> bytes:
    """OpenAI's error object as it came; anything else becomes one."""
    try:
        msgspec.json.decode(data, type=_Told)
    except sse.NONSENSE:
        return ApiError(status, _message(data)[:_LONGEST] or f"the engine answered {status}", "engine_refused").json()
    return data


def _message(data: bytes) -> str:
    try:
        told = msgspec.json.decode(data, type=_Otherwise)
    except sse.NONSENSE:
        return data.decode(errors="replace")
    return next((word for word in (told.message, told.detail) if isinstance(word, str)), data.decode(errors="replace"))


def for_client(name: str, trouble: EngineError | None) -> ApiError:
    """What a client is told of the trouble that a replica of this name had."""
    if isinstance(trouble, RefusedError) and trouble.status in (429, 503):
        return ApiError(trouble.status, f"{name} {trouble}", "engine_overloaded", retry_after_s=1)
    return ApiError(502, f"{name} {trouble}", "engine_error")


def reported(error: object) -> str:
    """An error that came as an answer."""
    return f"reported an error: {msgspec.json.encode(error)[:300].decode(errors='replace')}"
