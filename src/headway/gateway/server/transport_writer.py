"""Writes answers to a client's connection directly. Apart from the protocol, as this module is compiled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

_HEADER_LINE = b"%b: %b\r\n"
_NOT_IN_HEADERS = bytes((*range(9), 11, 12, *range(14, 32), 127))
_LAST_STATUSES = frozenset((408, 413))
"""Of answers after which more of a refused body may come: the connection is closed."""


class TransportWriter:
    """Writes a response to the connection directly, in place of ASGI's `send`. Satisfies `ClientWriter`."""

    def __init__(self, transport: asyncio.Transport, flow: FlowControl, cycle: RequestResponseCycle) -> None:
        self._transport, self._flow, self._cycle = transport, flow, cycle
        self._head = b""
        self._is_chunked = self._is_gone = False
        self._on_disconnect: Callable[[], None] | None = None

    def take_body(self) -> bytes | None:
        """The request's body, if all of it has come; otherwise None, and ASGI's `receive` returns it."""
        cycle = self._cycle
        if cycle.more_body or cycle.waiting_for_100_continue:
            return None
        if self._flow.read_paused:
            self._flow.resume_reading()  # stopped by a long body; a disconnect would go unseen
        body, cycle.body = bytes(cycle.body), bytearray()
        return body

    @property
    def has_begun(self) -> bool:
        return self._cycle.response_started

    @property
    def is_full(self) -> bool:
        """Whether the client reads too slowly; `drain` waits for it."""
        return self._flow.write_paused and not self._is_gone

    async def drain(self) -> None:
        """Wait until the client has read, or has disconnected."""
        if self.is_full:
            await self._flow.drain()

    def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Set status and headers, which go out with the first part of the body; chunked without a content-length."""
        cycle = self._cycle
        lines = [*cycle.default_headers, *headers]
        self._is_chunked = b"content-length" not in dict(headers)
        if self._is_chunked:
            lines.append((b"transfer-encoding", b"chunked"))
        begin_response(cycle, status)
        if not cycle.keep_alive:
            lines.append((b"connection", b"close"))
        head = b"".join(map(_HEADER_LINE.__mod__, lines))
        is_text = len(head.translate(None, _NOT_IN_HEADERS)) == len(head)
        if not is_text or not head.count(b"\n") == head.count(b"\r") == len(lines):
            raise ValueError("a response header is not a line of text")
        cycle.response_started = True
        self._head = STATUS_LINE[status] + head + b"\r\n"

    def write(self, body: bytes, more: bool = False) -> None:
        """Write a part of the body; without `more`, it is the last part."""
        if self._is_gone:
            return
        if self._is_chunked:
            body = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            body = body if more else body + b"0\r\n\r\n"
        head, self._head = self._head, b""
        self._transport.write(head + body)
        if not more:
            self._end()

    def _end(self) -> None:
        """Complete the response, with uvicorn's own bookkeeping."""
        cycle = self._cycle
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()

    def watch(self, on_disconnect: Callable[[], None]) -> None:
        """Call `on_disconnect` if the client disconnects before its response is complete."""
        self._on_disconnect = on_disconnect
        if self._flow.read_paused:
            self._flow.resume_reading()  # stopped by the end of a long body
        if self._is_gone:
            on_disconnect()

    def close(self) -> None:
        self._on_disconnect = None

    def disconnected(self) -> None:
        """The client has closed the connection, or its request is refused."""
        self._is_gone = self._cycle.disconnected = True
        if self._on_disconnect is not None and not self._cycle.response_complete:
            self._on_disconnect()


def begin_response(cycle: RequestResponseCycle, status: int) -> None:
    """Close the connection after this response if the request's body has not been read, or more of it may come."""
    if cycle.more_body or cycle.body or status in _LAST_STATUSES:
        cycle.keep_alive = False
