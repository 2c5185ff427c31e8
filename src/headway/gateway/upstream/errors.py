"""Failures of engines, and the resulting errors for clients."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from headway.gateway.errors import DECODE_ERRORS, ApiError

_RETRYABLE = frozenset((408, 429))
NOT_IMPLEMENTED = 501
_MAX_QUOTED_CHARS = 1000
"""Characters of an error body in an unknown format that are quoted."""


class EngineError(Exception):
    """The engine ended its answer early, or reported an error."""

    is_untouched = False
    """Whether the engine did not start to process the request."""
    after_tokens = 0
    """Tokens of the answer that the engine had sent before."""


def without_frames(error: EngineError) -> EngineError:
    """The error, ready to be stored. The frames of its traceback are removed, because they may refer to the object that
    stores the error and to the whole request. Such a reference cycle lives until the garbage collector runs."""
    error.__traceback__ = error.__context__ = error.__cause__ = None
    return error


class UnreachableError(EngineError):
    """No connection to the engine can be opened."""

    is_untouched = True


class ExhaustedError(EngineError):
    """This process has no file descriptor left for a connection. The engine has no part in this failure."""

    is_untouched = True


class BrokenOffError(EngineError):
    """The engine closed the connection before the end of its answer."""


class NoAnswerError(EngineError):
    """The engine did not answer in time."""


class RefusedError(EngineError):
    """The engine answered with an error status."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"answered {status}: {body[:300].decode(errors='replace')}")
        self.status, self.body = status, body
        self.is_untouched = status in (429, 503)


class UnconfirmedRefusalError(RefusedError):
    """The engine refused a request that another replica may answer."""


class ReportedRefusalError(RefusedError):
    """The engine refused a request in an answer with status 200 whose text names a status from 400 to 499."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(status, body)
        self.args = (f"reported an error: {body[:300].decode(errors='replace')}",)


class TooLongError(RefusedError):
    """The engine refused a request that exceeds its context. Another model may have a longer context."""


_TOO_LONG = re.compile(rb"context[ _](?:length|size|window)|maximum model length|prompt is too long", re.IGNORECASE)
"""Phrases for a request that is too long, in vLLM, SGLang, llama.cpp, and OpenAI's and Anthropic's APIs."""


def is_too_long(status: int, body: bytes) -> bool:
    """Whether a refusal says that the request does not fit the model's context."""
    return status in (400, 413) and _TOO_LONG.search(body[:_MAX_QUOTED_CHARS]) is not None


def is_retryable(status: int) -> bool:
    """Whether another engine may answer better. A redirect counts, because an engine has no reason to send a redirect.
    A 501 does not count, because the engine reports that it lacks the feature."""
    return status in _RETRYABLE or (status >= 500 and status != NOT_IMPLEMENTED) or 300 <= status < 400


_STATUS_FIELDS = ("code", "status", "status_code", "http_code", "http_status", "http_status_code")
_STATUS_WORDS = (
    (401, ("authentication", "unauthorized", "invalidapikey")), (403, ("permission", "forbidden")),
    (404, ("notfound",)), (413, ("toolarge",)), (422, ("unprocessable",)),
    (429, ("ratelimit", "toomanyrequests", "insufficientquota")),
    (503, ("overloaded", "unavailable")),
    (400, ("badrequest", "invalid", "validation", "contextlength", "contextwindow", "exceedcontext", "contentfilter",
           "contentpolicy")),
)  # fmt: skip
"""Statuses by words in the types and codes of errors, without `_` and in lower case, from OpenAI's and Anthropic's APIs
and from vLLM, SGLang, llama.cpp, TGI and Google's services."""


def error_in(value: Mapping[str, Any]) -> Any:
    """The error that an answer or an event reports; None if there is none."""
    if error := value.get("error"):
        if isinstance(error, Mapping) and isinstance(inner := error.get("error"), Mapping):
            error = inner
        return error if not isinstance(error, Mapping) or any(error.values()) else None
    if value.get("object") == "error" or value.get("type") == "error":
        return value
    if value.get("type") == "response.failed" and isinstance(response := value.get("response"), Mapping):
        return response.get("error") or value
    is_bare = "choices" not in value and isinstance(value.get("detail"), str | list) and len(value) == 1
    return value if is_bare else None


def status_of(error: Any) -> int:
    """The status that an error object implies; 500 if it names none."""
    if not isinstance(error, Mapping):
        return 500
    for name in _STATUS_FIELDS:
        code = error.get(name)
        if isinstance(code, str) and code.strip().isdigit():
            code = int(code.strip()[:4])
        if isinstance(code, int | float) and 400 <= code < 600:
            return int(code)
    names = [error.get(name) for name in ("code", "type", "error_type", "err_type", "status")]
    words = " ".join(name.lower().replace("_", "") for name in names if isinstance(name, str))
    if any(each in words for each in ("internal", "servererror", "apierror")):
        return 500
    return next((status for status, parts in _STATUS_WORDS if any(part in words for part in parts)), 500)


def reported(error: Any, beside: Mapping[str, Any] | None = None) -> EngineError:
    """The exception for an error in an answer with status 200. `beside`: the object that contains the error as a
    field."""
    status = status_of(error)
    if status >= 500 and beside is not None:
        status = status_of(beside)
    # Python's encoder, because Python's decoder may have decoded this
    text = json.dumps(error, separators=(",", ":"))
    if 400 <= status < 500:
        return ReportedRefusalError(status, b'{"error":%b}' % text.encode())
    return EngineError(f"reported an error: {text[:300]}")


class _Message(msgspec.Struct):
    message: str


class _OpenAiError(msgspec.Struct):
    error: _Message


class _OtherError(msgspec.Struct):
    """Other formats: vLLM before 0.10 has `message`, FastAPI's own errors have `detail`, and TGI's `error` is a
    text."""

    message: Any = None
    detail: Any = None
    error: Any = None


def openai_error(status: int, data: bytes) -> bytes:
    """An engine's error body, converted to OpenAI's error object unless it already is one."""
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
    inner = error.error.get("message") if isinstance(error.error, dict) else error.error
    values = error.message, error.detail, inner
    return next((value for value in values if isinstance(value, str)), text)


def client_error(name: str, error: EngineError | None) -> ApiError:
    """The error for a client whose request failed at the replica `name`."""
    if isinstance(error, ReportedRefusalError) and error.status != 429:
        return ApiError(error.status, _message(openai_error(error.status, error.body)), "engine_refused")
    if isinstance(error, RefusedError) and error.status in (429, 503):
        return ApiError(error.status, f"{name} {error}", "engine_overloaded", retry_after_s=1)
    if isinstance(error, ExhaustedError):
        return exhausted()
    return ApiError(502, f"{name} {error}", "engine_error")


def exhausted() -> ApiError:
    """The error for a client if no connection to an engine can be opened here."""
    message = "the gateway has too many connections to open one more to an engine"
    return ApiError(503, message, "too_many_connections", retry_after_s=1)
