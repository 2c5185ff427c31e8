"""Bodies that are read whole, or as a form: none is longer than it may be, and none stops coming for long."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive

from headway.gateway.errors import ApiError

_SHORT_BYTES = 1 << 16
"""A few words."""


async def short(request: Request, pause_s: float) -> bytes:
    """A body of a few words. ApiError where it is longer, or does not come."""
    too_long = ApiError(413, f"the body is longer than {_SHORT_BYTES:,} bytes", "body_too_long")
    return await Request(request.scope, limited(request.receive, _SHORT_BYTES, pause_s, too_long)).body()


def limited(receive: Receive, most: int, pause_s: float, too_long: ApiError) -> Receive:
    """A body as it comes. ApiError where it is too long, or where nothing comes for so many seconds."""
    size = 0

    async def within() -> Message:
        nonlocal size
        try:
            async with asyncio.timeout(pause_s):
                message = await receive()
        except TimeoutError:
            raise ApiError(408, f"nothing more of the body came within {pause_s:g} s", "body_timeout") from None
        size += len(message.get("body", b""))
        if size > most:
            raise too_long
        return message

    return within


async def left(request: Request, error: Exception) -> Response:
    """A client that left before its request was whole: nobody reads this."""
    assert isinstance(error, ClientDisconnect)
    return Response(status_code=499)
