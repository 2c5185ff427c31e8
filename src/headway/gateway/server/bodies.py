"""Reads request bodies within limits of length and time."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.types import Message, Receive

from headway.gateway.errors import ApiError
from headway.gateway.relay.writer import ClientWriter
from headway.gateway.settings import Settings

_SHORT_BYTES = 1 << 16


async def read_body(
    writer: ClientWriter, receive: Receive, headers: dict[str, str], settings: Settings
) -> bytes | None:
    """The body of a request for an engine; None if the client has left. ApiError if it is too long, or late."""
    max_bytes, length = settings.max_body_bytes, headers.get("content-length", "")
    if length.isdigit() and (len(length) > 18 or int(length) > max_bytes):
        raise _too_long(max_bytes)
    body = writer.take_body()
    if body is None:
        return await _receive_body(receive, settings)
    if len(body) > max_bytes:
        raise _too_long(max_bytes)
    return body


async def _receive_body(receive: Receive, settings: Settings) -> bytes | None:
    parts, size = [], 0
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                part = message.get("body", b"")
                size += len(part)
                if size > settings.max_body_bytes:
                    raise _too_long(settings.max_body_bytes)
                parts.append(part)
                if not message.get("more_body"):
                    return parts[0] if len(parts) == 1 else b"".join(parts)
    except TimeoutError:
        what = f"the body was not there within {settings.body_timeout_s:g} s"
        raise ApiError(408, what, "body_timeout") from None


def _too_long(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body is longer than {max_bytes:,} bytes", "body_too_long")


async def read_short_body(request: Request, timeout_s: float) -> bytes:
    """A body of at most 64 KiB. ApiError if it is longer, or does not come."""
    receive = bounded(request.receive, _SHORT_BYTES, timeout_s, _too_long(_SHORT_BYTES))
    return await Request(request.scope, receive).body()


def bounded(receive: Receive, max_bytes: int, timeout_s: float, too_long: ApiError) -> Receive:
    """`receive`, with ApiError for a body that is too long, or of which nothing comes for `timeout_s`."""
    size = 0

    async def receive_bounded() -> Message:
        nonlocal size
        try:
            async with asyncio.timeout(timeout_s):
                message = await receive()
        except TimeoutError:
            raise ApiError(408, f"nothing more of the body came within {timeout_s:g} s", "body_timeout") from None
        size += len(message.get("body", b""))
        if size > max_bytes:
            raise too_long
        return message

    return receive_bounded
