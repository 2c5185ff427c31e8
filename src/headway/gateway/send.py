"""Answers to clients, as ASGI messages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.responses import Response

from headway.gateway.errors import ApiError

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


async def answer(send: Send, error: ApiError, request_id: bytes = b"") -> None:
    """An error as a whole answer."""
    body = error.json()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if request_id:
        headers.append((b"x-request-id", request_id))
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % error.retry_after_s))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def error_response(error: ApiError) -> Response:
    """The same, as a response."""
    headers = None if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
    return Response(error.json(), error.status, headers, "application/json")
