"""One request of a connection and its response, through ASGI's `receive` and `send` or written directly, and the memory
of the connection: when it stops reading, and when writers must wait."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from starlette.types import Message, Scope
from uvicorn.protocols.http import httptools_impl

log = logging.getLogger("headway.gateway")
MAX_HELD_BYTES: Final = 1 << 16
"""Maximum number of received bytes that are held. Beyond it, reading pauses."""
MAX_UNREAD_BYTES = 1 << 16
"""Maximum number of answer bytes that the client has not read. Beyond it, writers and the next request wait."""
READ_BYTES = 1 << 18
"""Maximum number of bytes that the event loop reads at a time."""
TEXT_HEADERS: Final = "headway.headers"
"""The headers as texts in the scope of a request, if an earlier request had the same ones."""
_STATUS_LINE: Final[dict[int, bytes]] = httptools_impl.STATUS_LINE
_NOT_IN_HEADERS = bytes((*range(9), 11, 12, *range(14, 32), 127))
_header_lines: Final[dict[tuple[bytes, bytes], bytes]] = {}
"""Encoded header lines by name and value. Most responses have the same lines, except the request's id."""
_MAX_LINES: Final = 256
_MAX_LINE_BYTES: Final = 56
_LAST_STATUSES: Final = frozenset((408, 413))
"""Statuses after which the connection is closed, because more of a refused body may come."""
_WITHOUT_BODY: Final = frozenset((204, 304))
_MAX_PARTS: Final = 64
"""A body in more parts is joined, because short parts take several times their length."""
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_FAILED = b"Internal Server Error"
_FAILED_HEADERS = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"%d" % len(_FAILED))]


class ConnectionMemory:
    """The bytes held by one connection: requests sent ahead, the current request's body until the application takes it,
    and answers that the client has not read.

    Requests and body take at most `MAX_HELD_BYTES` and one read, answers at most `MAX_UNREAD_BYTES` and one write. No
    other code pauses or resumes reading.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.num_ahead = 0
        """Bytes of the next requests."""
        self.num_body = 0
        """Bytes of the current request's body."""
        self.read_paused = self.write_paused = False
        self._writable = asyncio.Event()
        self._writable.set()
        if transport.get_extra_info("ssl_object") is not None:  # such transports have larger limits by default
            transport.set_write_buffer_limits(high=MAX_UNREAD_BYTES)
            limit_reads: Any = getattr(transport, "set_read_buffer_limits", None)
            if limit_reads is not None:
                limit_reads(high=MAX_HELD_BYTES)

    @property
    def num_unread(self) -> int:
        """Bytes of answers that the client has not read."""
        return self._transport.get_write_buffer_size()

    @property
    def num_bytes(self) -> int:
        """All bytes that the connection holds."""
        return self.num_ahead + self.num_body + self.num_unread

    def keep_ahead(self, num_bytes: int) -> None:
        """Set the number of bytes of the next requests."""
        self.num_ahead = num_bytes
        if (num_bytes + self.num_body > MAX_HELD_BYTES) != self.read_paused:
            self._switch()

    def add_body(self, num_bytes: int) -> None:
        """Add held bytes of the current request's body; negative to release them."""
        self.num_body += num_bytes
        if (self.num_ahead + self.num_body > MAX_HELD_BYTES) != self.read_paused:
            self._switch()

    def _switch(self) -> None:
        """Pause or resume reading."""
        self.read_paused = not self.read_paused
        if self.read_paused:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        """The transport has more than `MAX_UNREAD_BYTES` to send."""
        self.write_paused = True
        self._writable.clear()

    def resume_writing(self) -> None:
        """The client has read most of its answers, or has left."""
        self.write_paused = False
        self._writable.set()

    async def drain(self) -> None:
        """Wait until writing may go on."""
        await self._writable.wait()


class ServedConnection(Protocol):
    """The connection of a request, as its cycle uses it."""

    def close_after_response(self) -> None:
        """Close the connection after this response, as soon as the rest of the request has come."""

    def end_response(self, cycle: HttpCycle, /) -> None:
        """The response is complete, so the next request may begin."""


class _DefaultHeaders:
    """The headers of all responses, which change once a second, and their lines."""

    def __init__(self) -> None:
        self.headers: Sequence[tuple[bytes, bytes]] = ()
        self.lines = b""


_defaults: Final = _DefaultHeaders()


class HttpCycle:
    """One request and its response. Implements `ClientWriter`: each part of the body is one write to the connection,
    and no task waits for the client to disconnect. Applications that take no writer use ASGI's messages."""

    def __init__(
        self,
        connection: ServedConnection,
        transport: asyncio.Transport,
        memory: ConnectionMemory,
        scope: Scope,
        default_headers: Sequence[tuple[bytes, bytes]],
        expects_100_continue: bool,
        keeps_alive: bool,
        body: bytes = b"",
    ) -> None:
        """`body`: the request's body if all of it has come with the head."""
        self._connection, self._transport, self._memory, self.scope = connection, transport, memory, scope
        self._default_headers = default_headers
        self.task: asyncio.Task[None] | None = None
        """The task of `run`, until its end."""
        self._expects_100_continue, self._keeps_alive = expects_100_continue, keeps_alive
        # The request's body.
        self._parts = [body] if body else []
        self._num_held = len(body)
        self._is_whole, self._is_passed = bool(body), False
        """(whether the whole body has come, whether `receive` has returned the body's end)."""
        self._news: asyncio.Event | None = None
        """An event that is set when something happens that `receive` waits for; None before the first wait."""
        # The response.
        self.has_begun = False
        """Whether `start` was called. The status can then no longer change."""
        self.status = 0
        self.is_complete = False
        self.num_written = 0
        """Number of written parts of the response."""
        self._is_gone = False
        """Whether the client has closed the connection, or the request is refused."""
        self._head = b""
        self._is_chunked = False
        self._has_body = True
        self._num_left = 0
        """Bytes of the body that are not written yet, if its length was announced."""
        self._on_disconnect: Callable[[], None] | None = None
        if body:
            memory.add_body(len(body))

    async def run(self, app: Callable[..., Any], takes_writer: bool, tasks: set[asyncio.Task[None]]) -> None:
        """Run the application. Its errors are logged, and answered with status 500. At the end, the task leaves
        `tasks`."""
        try:
            if takes_writer:
                await app(self.scope, self.receive, self.send, self)
            else:
                await app(self.scope, self.receive, self.send)
            if not (self.is_complete or self._is_gone):
                log.error("%s: the application returned without a complete response", self.scope["path"])
                self._fail()
        except (Exception, asyncio.CancelledError) as error:
            log.error("%s: the application failed", self.scope["path"], exc_info=error)
            self._fail()
        finally:
            self.scope = {}  # the connection keeps this object until the next request
            if self.task is not None:
                tasks.discard(self.task)
                self.task = None

    def _has_ended(self) -> bool:
        return self.is_complete or self._is_gone

    def _fail(self) -> None:
        if self._has_ended():
            return
        self._keeps_alive = False
        if self.has_begun and not self._head:
            self._connection.close_after_response()
        else:
            self.start(500, _FAILED_HEADERS)
            self.write(_FAILED)

    # Called by the connection.

    def add_body(self, body: bytes) -> None:
        """A part of the request's body has come."""
        parts = self._parts
        parts.append(body)
        if len(parts) > _MAX_PARTS:
            self._parts = [b"".join(parts)]
        self._num_held += len(body)
        self._memory.add_body(len(body))
        if self._news is not None:
            self._news.set()

    def end_body(self) -> None:
        """All bytes of the request's body have been added."""
        self._is_whole = True
        if self._news is not None:
            self._news.set()

    def disconnect(self) -> None:
        """The client has closed the connection, or the request is refused."""
        self._is_gone = True
        self._expects_100_continue = False
        if self._news is not None:
            self._news.set()
        on_disconnect, self._on_disconnect = self._on_disconnect, None
        if on_disconnect is not None and not self.is_complete:
            on_disconnect()

    def refuse(self, status: int) -> None:
        """Answer the rest of the request with `status`, unless the response has begun."""
        if not self.has_begun:
            self.status = status
        self.disconnect()

    def shut_down(self) -> None:
        """Close the connection after this response."""
        self._keeps_alive = False

    def send_interim(self) -> bool:
        """Send an interim response before the final response; clients of HTTP/1.1 ignore it. Returns False if the
        client must not get an interim response."""
        if self.scope.get("http_version") != "1.1":
            return False
        self._transport.write(_CONTINUE)
        self._expects_100_continue = False
        return True

    # The request's body.

    def take_body(self) -> bytes | None:
        """The request's body if all of it has come. None: the body comes through `receive`."""
        return self.take_parts() if self._is_whole and not self._expects_100_continue else None

    def take_parts(self) -> bytes:
        """Take the received part of the body. The cycle keeps nothing of it."""
        if not self._num_held:
            return b""
        self._memory.add_body(-self._num_held)
        parts, self._parts, self._num_held = self._parts, [], 0
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def receive(self) -> Message:
        """ASGI's `receive`: the next part of the body, or the disconnect of a client that has left or has its
        response."""
        if self._expects_100_continue and not self._is_gone:
            self._transport.write(_CONTINUE)
            self._expects_100_continue = False
        while not (self._parts or self._has_ended() or (self._is_whole and not self._is_passed)):
            news = self._news = self._news or asyncio.Event()
            await news.wait()
            news.clear()
        if self._has_ended():
            return {"type": "http.disconnect"}
        self._is_passed = self._is_whole
        return {"type": "http.request", "body": self.take_parts(), "more_body": not self._is_whole}

    # The response.

    async def send(self, message: Message) -> None:
        """ASGI's `send`: the head, or a part of the body. Raises RuntimeError for a message out of order."""
        await self.drain()
        if self._is_gone:
            return
        kind = message["type"]
        if kind == "http.response.start" and not self.has_begun:
            headers = [(name.lower(), value) for name, value in message.get("headers", ())]
            self.start(message["status"], [each for each in headers if each[0] != b"transfer-encoding"])
            if self._is_chunked:  # the first part may come much later
                head, self._head = self._head, b""
                self.num_written += 1
                self._transport.write(head)
        elif kind == "http.response.body" and self.has_begun:
            if not self.is_complete:
                self.write(message.get("body", b""), message.get("more_body", False))
        else:
            raise RuntimeError(f"{kind} out of turn")

    @property
    def is_full(self) -> bool:
        """Whether the client reads too slowly. If so, await `drain`."""
        return self._memory.write_paused and not self._is_gone

    async def drain(self) -> None:
        """Wait until the client has read, or has disconnected."""
        if self._memory.write_paused and not self._is_gone:
            await self._memory.drain()

    def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Set status and headers, which are sent with the first part of the body. Without a content-length the body is
        chunked."""
        if _defaults.headers is not self._default_headers:
            _defaults.headers = self._default_headers
            _defaults.lines = b"".join(map(_header_line, self._default_headers))
        lines = [_STATUS_LINE[status], _defaults.lines]
        length: bytes | None = None
        closes = False
        for header in headers:
            name, value = header
            line = None
            if name == b"content-length":
                length = value
            elif name == b"connection":
                closes = value.lower().find(b"close") >= 0
            if name != b"x-request-id":
                line = _header_lines.get(header)
            lines.append(line or _header_line(header))
        has_body = self.scope["method"] != "HEAD" and status not in _WITHOUT_BODY
        is_chunked = has_body and length is None
        if is_chunked:
            lines.append(b"transfer-encoding: chunked\r\n")
        if not self._is_whole or self._parts or status in _LAST_STATUSES:
            self._keeps_alive = False  # further parts of the body may come
        if closes:
            self._keeps_alive = False
        elif not self._keeps_alive:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        self.has_begun, self.status, self._expects_100_continue = True, status, False
        self._is_chunked, self._has_body = is_chunked, has_body
        self._num_left = int(length) if has_body and length is not None else 0
        self._head = b"".join(lines)

    def write(self, body: bytes, more: bool = False) -> None:
        """Write a part of the body. Without `more`, it is the last part. Raises RuntimeError if the body's length
        differs from the announced length."""
        if self._is_gone:
            return
        pieces = [self._head]
        if self._is_chunked:
            if body:
                pieces += (b"%x\r\n" % len(body), body, b"\r\n")
            if not more:
                pieces.append(b"0\r\n\r\n")
        elif self._has_body:
            self._num_left -= len(body)
            if self._num_left < 0 or (self._num_left and not more):
                raise RuntimeError("the body is not as long as its content-length")
            pieces.append(body)
        self._head = b""
        if data := b"".join(pieces):
            self.num_written += 1
            self._transport.write(data)
        if not more:
            self.is_complete = True
            if self._news is not None:
                self._news.set()
            if not self._keeps_alive:
                self._connection.close_after_response()
            self._connection.end_response(self)

    def watch(self, on_disconnect: Callable[[], None]) -> None:
        """Call `on_disconnect` if the client disconnects before its response is complete."""
        self._on_disconnect = on_disconnect
        if self._is_gone:
            on_disconnect()

    def close(self) -> None:
        """Stop watching for a disconnect."""
        self._on_disconnect = None


def _header_line(header: tuple[bytes, bytes]) -> bytes:
    """The line of a header. Raises ValueError if it is not one line of text."""
    name, value = header
    line = name + b": " + value + b"\r\n"
    if name == b"x-request-id" and value.isalnum():
        return line
    text = line[:-2].decode("latin-1")
    if not (text.isascii() and text.isprintable()):  # most lines are; the exact check takes three times as long
        is_text = len(line.translate(None, _NOT_IN_HEADERS)) == len(line)
        if not is_text or not line.count(b"\n") == line.count(b"\r") == 1:
            raise ValueError("a response header is not a line of text")
    if len(line) <= _MAX_LINE_BYTES and name != b"x-request-id":
        if len(_header_lines) >= _MAX_LINES:
            _header_lines.clear()
        _header_lines[header] = line
    return line
