"""What an engine says in place of an answer, as OpenAI's clients read it."""

from __future__ import annotations

from typing import Any

import msgspec

from headway.gateway import sse
from headway.gateway.errors import ApiError

_LONGEST = 1000
"""Characters of what is not understood that a client is told."""


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
