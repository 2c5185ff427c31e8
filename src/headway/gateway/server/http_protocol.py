"""HTTP/1.1 towards clients: uvicorn's protocol, with limits on a request's headers, and with a direct writer.

An application with `takes_writer` is called with a `TransportWriter` as a fourth argument: one write to the connection
for each part of an answer, and no task that waits for the client to leave.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from headway.gateway.errors import ApiError

_MAX_HEAD_BYTES = 64 << 10
"""Of a request's first line and headers."""
_HEAD_TIMEOUT_S = 30.0
_NOT_IN_HEADERS = bytes((*range(9), 11, 12, *range(14, 32), 127))


class TransportWriter:
    """Writes a response to the connection directly, in place of ASGI's `send`. Satisfies `ClientWriter`."""

    def __init__(self, protocol: LimitedHttpProtocol, cycle: RequestResponseCycle) -> None:
        self._protocol, self._cycle = protocol, cycle
        self._head = b""
        self._is_chunked = self._is_gone = False
        self._on_disconnect: Callable[[], None] | None = None

    def take_body(self) -> bytes | None:
        """The request's body, if all of it has come; otherwise None, and ASGI's `receive` returns it."""
        cycle = self._cycle
        if cycle.more_body or cycle.waiting_for_100_continue:
            return None
        self._protocol.flow.resume_reading()  # stopped by a long body; a disconnect would go unseen
        body, cycle.body = bytes(cycle.body), bytearray()
        return body

    @property
    def has_begun(self) -> bool:
        return self._cycle.response_started

    @property
    def is_full(self) -> bool:
        """Whether the client reads too slowly; `drain` waits for it."""
        return self._protocol.flow.write_paused and not self._is_gone

    async def drain(self) -> None:
        """Wait until the client has read, or has disconnected."""
        if self.is_full:
            await self._protocol.flow.drain()

    def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Set status and headers, which go out with the first part of the body; chunked without a content-length."""
        cycle = self._cycle
        lines = [*cycle.default_headers, *headers]
        self._is_chunked = all(name != b"content-length" for name, _ in headers)
        if self._is_chunked:
            lines.append((b"transfer-encoding", b"chunked"))
        if not cycle.keep_alive:
            lines.append((b"connection", b"close"))
        head = b"".join([b"%b: %b\r\n" % line for line in lines])
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
        self._protocol.transport.write(head + body)
        if not more:
            self._end()

    def _end(self) -> None:
        """Complete the response, with uvicorn's own bookkeeping."""
        cycle = self._cycle
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            self._protocol.transport.close()
        cycle.on_response()

    def watch(self, gone: Callable[[], None]) -> None:
        """Call `gone` if the client disconnects before its response is complete."""
        self._on_disconnect = gone
        self._protocol.flow.resume_reading()  # stopped by the end of a long body
        if self._is_gone:
            gone()

    def close(self) -> None:
        self._on_disconnect = None

    def disconnected(self) -> None:
        """The client has closed the connection."""
        self._is_gone = self._cycle.disconnected = True
        if self._on_disconnect is not None and not self._cycle.response_complete:
            self._on_disconnect()


class LimitedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits on the time and the length of a request's headers, of which uvicorn has none."""

    _head_bytes = 0
    _is_in_head = True
    _timer: asyncio.TimerHandle | None = None
    _writer: TransportWriter | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn narrows it, too
        super().connection_made(transport)
        self._timer = self.loop.call_later(_HEAD_TIMEOUT_S, self._time_out)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        super().connection_lost(exc)
        if self._writer is not None:
            self._writer.disconnected()
            self._writer = None

    def data_received(self, data: bytes) -> None:
        if self._is_in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes and not self.transport.is_closing():
            self._check_head()

    def on_headers_complete(self) -> None:
        self._is_in_head, self._head_bytes = False, 0
        self._cancel_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_in_head = True
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if getattr(app, "takes_writer", False):
            self._writer = TransportWriter(self, cycle)
            app = partial(app, writer=self._writer)
        super()._start_asgi_task(cycle, app)

    def _check_head(self) -> None:
        if self._head_bytes > _MAX_HEAD_BYTES:
            self._refuse(431, "the headers are too long", "headers_too_long")
        elif self._timer is None:
            self._timer = self.loop.call_later(_HEAD_TIMEOUT_S, self._time_out)

    def _time_out(self) -> None:
        self._timer = None
        if self._head_bytes:
            self._refuse(408, "the request was not there in time", "timeout")
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg, "invalid_http")

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Answer a request that could not be parsed."""
        body = ApiError(status, message, code).json()
        head = b"Content-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
