"""HTTP/1.1 towards clients: uvicorn's protocol, with limits on what a request may begin with, and with a short way
back for an application that knows of it: one write for each piece of an answer, and no task that waits for the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

DIRECT = "headway.direct"
"""The extension of an ASGI scope that holds a request's `Direct`."""
_MOST_HEAD_BYTES = 64 << 10
"""A request's first line and headers."""
_HEAD_S = 30.0
"""They have to be there by then."""
_IN_NO_HEADER = bytes((*range(9), 11, 12, *range(14, 32), 127))


class TransportWriter:
    """A request's answer, written to its connection at once. ASGI's `send` of the same request is not used then."""

    def __init__(self, protocol: Guarded, cycle: RequestResponseCycle) -> None:
        self._protocol, self._cycle = protocol, cycle
        self._head = b""
        self._is_chunked = self._is_gone = False
        self._when_gone: Callable[[], None] | None = None

    def take_body(self) -> bytes | None:
        """The request's, if all of it is there and has not been taken; else it comes by ASGI's `receive`."""
        cycle = self._cycle
        if cycle.more_body or cycle.waiting_for_100_continue:
            return None
        self._protocol.flow.resume_reading()  # a long body has stopped it, and that the client leaves is to be seen
        body, cycle.body = bytes(cycle.body), bytearray()
        return body

    @property
    def has_begun(self) -> bool:
        """It has been started."""
        return self._cycle.response_started

    @property
    def is_full(self) -> bool:
        """The client does not keep up: `drain` waits for it."""
        return self._protocol.flow.write_paused and not self._is_gone

    async def drain(self) -> None:
        """Until there is room, or the client is gone."""
        if self.is_full:
            await self._protocol.flow.drain()

    def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """What the answer begins with; it goes with the first of its body. Chunked, if it says no length."""
        cycle = self._cycle
        lines = [*cycle.default_headers, *headers]
        self._is_chunked = all(name != b"content-length" for name, _ in headers)
        if self._is_chunked:
            lines.append((b"transfer-encoding", b"chunked"))
        if not cycle.keep_alive:
            lines.append((b"connection", b"close"))
        head = b"".join([b"%b: %b\r\n" % line for line in lines])
        is_text = len(head.translate(None, _IN_NO_HEADER)) == len(head)
        if not is_text or not head.count(b"\n") == head.count(b"\r") == len(lines):
            raise ValueError("an answer's header is no line of text")
        cycle.response_started = True
        self._head = STATUS_LINE[status] + head + b"\r\n"

    def write(self, body: bytes, more: bool = False) -> None:
        """Some of the body, or, without `more`, the last of it."""
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
        """As uvicorn does it."""
        cycle = self._cycle
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            self._protocol.transport.close()
        cycle.on_response()

    def watch(self, gone: Callable[[], None]) -> None:
        """Call this if the client leaves before it has all of its answer."""
        self._when_gone = gone
        self._protocol.flow.resume_reading()  # which the end of a long body may have stopped
        if self._is_gone:
            gone()

    def close(self) -> None:
        """Whoever waited for the client to leave does not any more."""
        self._when_gone = None

    def left(self) -> None:
        """The client has closed the connection."""
        self._is_gone = self._cycle.disconnected = True
        if self._when_gone is not None and not self._cycle.response_complete:
            self._when_gone()


class Guarded(HttpToolsProtocol):
    """uvicorn's protocol, which by itself waits for ever for a request's headers, and takes any amount of them."""

    _head_bytes = 0
    _is_in_head = True
    _timer: asyncio.TimerHandle | None = None
    _direct: TransportWriter | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._timer = self.loop.call_later(_HEAD_S, self._late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel()
        super().connection_lost(exc)
        if self._direct is not None:
            self._direct.left()
            self._direct = None

    def data_received(self, data: bytes) -> None:
        if self._is_in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes and not self.transport.is_closing():
            self._unfinished()

    def on_headers_complete(self) -> None:
        self._is_in_head, self._head_bytes = False, 0
        self._cancel()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_in_head = True
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._direct = TransportWriter(self, cycle)
        cycle.scope["extensions"] = {DIRECT: self._direct}  # type: ignore[dict-item]  # of our own
        super()._start_asgi_task(cycle, app)

    def _unfinished(self) -> None:
        if self._head_bytes > _MOST_HEAD_BYTES:
            self._refuse(b"431 Request Header Fields Too Large", "the headers are too long", "headers_too_long")
        elif self._timer is None:
            self._timer = self.loop.call_later(_HEAD_S, self._late)

    def _late(self) -> None:
        self._timer = None
        if self._head_bytes:
            self._refuse(b"408 Request Timeout", "the request was not there in time", "timeout")
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """What cannot be read."""
        self._refuse(b"400 Bad Request", msg, "invalid_http")

    def _refuse(self, status: bytes, message: str, code: str) -> None:
        self.transport.write(_refusal(status, message, code))
        self.transport.close()

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _refusal(status: bytes, message: str, code: str) -> bytes:
    """An error, as OpenAI's clients read it, to who has not come as far as being understood."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    body = msgspec.json.encode({"error": error})
    head = b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
    return head % (status, len(body)) + body
