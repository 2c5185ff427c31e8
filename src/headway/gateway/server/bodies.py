"""Reads request bodies within limits of length and time."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive

from headway.gateway.errors import DECODE_ERRORS, ApiError
from headway.gateway.relay.writer import ClientWriter
from headway.gateway.settings import Settings

_SHORT_BYTES = 1 << 16
_ANY_ZLIB = zlib.MAX_WBITS | 32
"""Accept the headers of gzip and of zlib."""


async def read_body(
    writer: ClientWriter, receive: Receive, headers: dict[str, str], settings: Settings
) -> bytes | None:
    """The body of a request for an engine; None if the client has left. ApiError if it is too long, or late."""
    max_bytes, length = settings.max_body_bytes, headers.get("content-length", "")
    if length.isdigit() and (len(length) > 18 or int(length) > max_bytes):
        raise _too_long(max_bytes)
    body = writer.take_body()
    if body is None:
        try:
            async with asyncio.timeout(settings.body_timeout_s):
                limited_receive = _size_limited(receive, max_bytes, partial(_too_long, max_bytes))
                return await Request({"type": "http"}, limited_receive).body()
        except TimeoutError:
            what = f"the body was not there within {settings.body_timeout_s:g} s"
            raise ApiError(408, what, "body_timeout") from None
        except ClientDisconnect:
            return None
    if len(body) > max_bytes:
        raise _too_long(max_bytes)
    return body


def decompressed(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """A body without its content encoding. ApiError if it is unknown or damaged, or the content is too long."""
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise ApiError(415, f"content-encoding {encoding[:32]!r}: expected gzip or deflate", "unsupported_encoding")
    decoder = zlib.decompressobj(_ANY_ZLIB)
    try:
        content = decoder.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise ApiError(400, f"the body is not valid {encoding}: {error}", "invalid_encoding") from None
    if len(content) > max_bytes:
        raise _too_long(max_bytes)
    if not decoder.eof or decoder.unused_data:
        raise ApiError(400, f"the body is not one whole {encoding} stream", "invalid_encoding")
    return content


async def read_json(request: Request, timeout_s: float, type: Any, expected: str) -> Any:
    """A body of at most 64 KiB as a value of this type. ApiError, which begins with `expected`, for other bodies."""
    receive = limited(request.receive, _SHORT_BYTES, timeout_s, partial(_too_long, _SHORT_BYTES))
    try:
        return msgspec.json.decode(await Request(request.scope, receive).body(), type=type)
    except DECODE_ERRORS as error:
        raise ApiError(400, f"{expected}: {error}", "invalid_type") from None


def limited(receive: Receive, max_bytes: int, pause_s: float, too_long: Callable[[], ApiError]) -> Receive:
    """`receive`, with the error of `too_long` for a longer body, and ApiError if nothing comes for `pause_s`."""
    receive = _size_limited(receive, max_bytes, too_long)

    async def receive_in_time() -> Message:
        try:
            async with asyncio.timeout(pause_s):
                return await receive()
        except TimeoutError:
            raise ApiError(408, f"nothing more of the body came within {pause_s:g} s", "body_timeout") from None

    return receive_in_time


def _size_limited(receive: Receive, max_bytes: int, too_long: Callable[[], ApiError]) -> Receive:
    size = 0

    async def receive_limited() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > max_bytes:
            raise too_long()
        return message

    return receive_limited


def _too_long(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body is longer than {max_bytes:,} bytes", "body_too_long")
