"""Reads request bodies with limits on length and time."""

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
from headway.gateway.relay.json_body import LONG_BYTES
from headway.gateway.relay.writer import ClientWriter
from headway.gateway.settings import Settings

_SHORT_BYTES = 1 << 16
_RETRY_AFTER_S = 1
_ANY_ZLIB = zlib.MAX_WBITS | 32
"""Accept the headers of gzip and of zlib."""


class BodyMemory:
    """The bytes of request bodies in one process, from reading to the end of the request.

    Bodies of at most `LONG_BYTES` are counted apart, so that a client that sends long bodies slowly does not block
    short bodies. One key gets at most half of the room for long bodies and half of the room for short bodies, so that
    it does not block other keys.
    """

    def __init__(self) -> None:
        self._num_bytes = [0, 0]
        """(bytes of short bodies, bytes of long bodies)."""
        self._num_owned: dict[tuple[str, bool], int] = {}
        """Bytes by key and size class, if there are keys."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all bodies that requests currently hold."""
        return sum(self._num_bytes)

    def resize(self, before: int, after: int, max_bytes: int, owner: str = "") -> None:
        """Change a held body from `before` to `after` bytes; 0: the body is not held. Raises ApiError (503) if other
        bodies leave no room. `owner`: the client's key; empty without one."""
        was_long, is_long = before > LONG_BYTES, after > LONG_BYTES
        others = self._num_bytes[is_long] - (before if was_long == is_long else 0)
        owned = self._num_owned.get((owner, is_long), 0) - (before if was_long == is_long else 0) if owner else 0
        if after > before:
            if others and others + after > max_bytes:
                raise _no_room(f"the bodies of all requests would be longer than {max_bytes:,} bytes")
            if owned and owned + after > max_bytes // 2:
                raise _no_room(f"the bodies of this key's requests would be longer than {max_bytes // 2:,} bytes")
        self._num_bytes[was_long] -= before
        self._num_bytes[is_long] += after
        if owner:
            self._own(owner, was_long, -before)
            self._own(owner, is_long, after)

    def _own(self, owner: str, is_long: bool, growth: int) -> None:
        num = self._num_owned.pop((owner, is_long), 0) + growth
        if num:
            self._num_owned[owner, is_long] = num

    def free(self, num_bytes: int, owner: str = "") -> None:
        """Release a body of this length."""
        is_long = num_bytes > LONG_BYTES
        self._num_bytes[is_long] -= num_bytes
        if owner:
            self._own(owner, is_long, -num_bytes)


def _no_room(message: str) -> ApiError:
    return ApiError(503, message, "bodies_too_long", retry_after_s=_RETRY_AFTER_S)


async def read_body(
    writer: ClientWriter,
    receive: Receive,
    headers: dict[str, str],
    settings: Settings,
    memory: BodyMemory,
    owner: str = "",
) -> bytes | None:
    """The body of a request for an engine; None if the client has left. Raises ApiError if it is too long or too late.

    The caller frees its memory.
    """
    max_bytes, length = settings.max_body_bytes, headers.get("content-length", "")
    if length.isdigit() and (len(length) > 18 or int(length) > max_bytes):
        raise _too_long(max_bytes)
    body = writer.take_body()
    if body is None:
        return await _read_slowly(receive, int(length) if length.isdigit() else 0, settings, memory, owner)
    if len(body) > max_bytes:
        raise _too_long(max_bytes)
    memory.resize(0, len(body), settings.max_bodies_bytes, owner)
    return body


async def _read_slowly(
    receive: Receive, length: int, settings: Settings, memory: BodyMemory, owner: str
) -> bytes | None:
    """Reads a body that is still arriving. Its declared length is 0 if no length was declared."""
    size, max_bytes = 0, settings.max_body_bytes
    memory.resize(0, length, settings.max_bodies_bytes, owner)  # refuses the body before any of it comes
    memory.free(length, owner)

    async def receive_counted() -> Message:
        nonlocal size
        message = await receive()
        new_size = size + len(message.get("body", b""))
        if new_size > max_bytes:
            raise _too_long(max_bytes)
        memory.resize(size, new_size, settings.max_bodies_bytes, owner)
        size = new_size
        return message

    body = None
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            body = await _whole(receive_counted)
    except TimeoutError:
        what = f"the body was not there within {settings.body_timeout_s:g} s"
        raise ApiError(408, what, "body_timeout") from None
    except ClientDisconnect:
        pass
    finally:
        if body is None:
            memory.free(size, owner)
    return body


async def _whole(receive: Receive) -> bytes:
    """A body as one bytes object, even if it comes in short parts. ClientDisconnect if the client leaves before its
    end."""
    body = bytearray()
    while await _add_part(body, receive):
        pass
    return bytes(body)


async def _add_part(body: bytearray, receive: Receive) -> bool:
    """Add the next part. Returns whether more parts follow. No other memory is kept."""
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    body += message.get("body", b"")
    return bool(message.get("more_body", False))


def decompressed(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """A body without its content encoding. Raises ApiError if the encoding is unknown, the data is damaged, or the
    content is too long."""
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
    """A body of at most 64 KiB as a value of this type. For another body, raises ApiError with a message that begins
    with `expected`."""
    receive = limited(request.receive, _SHORT_BYTES, timeout_s, partial(_too_long, _SHORT_BYTES))
    try:
        return msgspec.json.decode(await _whole(receive), type=type)
    except DECODE_ERRORS as error:
        raise ApiError(400, f"{expected}: {error}", "invalid_type") from None


def limited(receive: Receive, max_bytes: int, pause_s: float, too_long: Callable[[], ApiError]) -> Receive:
    """`receive` with limits: raises the error from `too_long` for a longer body, and ApiError if no data comes for
    `pause_s`."""
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
