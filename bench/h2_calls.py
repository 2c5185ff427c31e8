"""gRPC calls by hand-made HTTP/2 frames: a client that costs next to nothing, as Envoy's does, to measure a server.

It reads no headers but sees where a stream ends; it heeds flow control, and answers pings and settings.
"""

from __future__ import annotations

import asyncio
import struct
from typing import Any, cast

DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 3, 4, 6, 8
ACK = END_STREAM = 1
END_HEADERS = 4
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_INITIAL_WINDOW, _WINDOW, _FRAME_BYTES = 65_535, 0x7FFF_FFFF, 16_384
_INITIAL_WINDOW_SIZE = 4
"""The setting's number."""


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def _field(name: str, value: str) -> bytes:
    """A header that is neither indexed nor compressed."""
    return b"\0" + bytes((len(name),)) + name.encode() + bytes((len(value),)) + value.encode()


class Call:
    """One call: a stream of messages each way."""

    def __init__(self, connection: Connection, id: int) -> None:
        self._connection, self._id = connection, id
        self.window = connection.initial_window
        self._received = b""
        self._messages: list[bytes] = []
        self._reading: asyncio.Future[None] | None = None
        self._has_begun = self._is_over = False

    async def write(self, *messages: bytes) -> None:
        connection, parts = self._connection, []
        if not self._has_begun:
            parts.append(_frame(HEADERS, END_HEADERS, self._id, connection.head))
            self._has_begun = True
        for message in messages:
            data, at = b"\0" + struct.pack(">I", len(message)) + message, 0
            while at < len(data):
                if not (size := min(len(data) - at, _FRAME_BYTES, connection.window, self.window)):
                    connection.transport.write(b"".join(parts))
                    parts = []
                    await connection.more_room()
                    continue
                parts.append(_frame(DATA, 0, self._id, data[at : at + size]))
                at, connection.window, self.window = at + size, connection.window - size, self.window - size
        connection.transport.write(b"".join(parts))

    def done_writing(self) -> None:
        self._connection.transport.write(_frame(DATA, END_STREAM, self._id))

    async def read(self) -> bytes | None:
        """The next message; None: the call is over."""
        while not self._messages:
            if self._is_over:
                return None
            self._reading = asyncio.get_running_loop().create_future()
            await self._reading
        return self._messages.pop(0)

    def received(self, data: bytes) -> None:
        self._received += data
        while len(self._received) >= 5:
            end = 5 + int.from_bytes(self._received[1:5])
            if len(self._received) < end:
                break
            self._messages.append(self._received[5:end])
            self._received = self._received[end:]
        self._wake()

    def ended(self) -> None:
        self._is_over = True
        self._wake()

    def _wake(self) -> None:
        if self._reading is not None and not self._reading.done():
            self._reading.set_result(None)


class Connection(asyncio.Protocol):
    """A connection for calls of one method."""

    def __init__(self, method: str) -> None:
        fields = {":method": "POST", ":scheme": "http", ":path": method, ":authority": "picker",
                  "content-type": "application/grpc", "te": "trailers"}  # fmt: skip
        self.head = b"".join(_field(*each) for each in fields.items())
        self.window = self.initial_window = _INITIAL_WINDOW
        self._next_id, self._buffer = 1, b""
        self._calls: dict[int, Call] = {}
        self._room = asyncio.Event()
        self.is_ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def call(self) -> Call:
        call = self._calls[self._next_id] = Call(self, self._next_id)
        self._next_id += 2
        return call

    async def more_room(self) -> None:
        """Wait until the server lets more be sent."""
        self._room.clear()
        await self._room.wait()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        settings = struct.pack(">HI", _INITIAL_WINDOW_SIZE, _WINDOW)
        window = struct.pack(">I", _WINDOW - _INITIAL_WINDOW)
        self.transport.write(_PREFACE + _frame(SETTINGS, 0, 0, settings) + _frame(WINDOW_UPDATE, 0, 0, window))

    def data_received(self, data: bytes) -> None:
        data, at = self._buffer + data, 0
        while len(data) - at >= 9:
            end = at + 9 + int.from_bytes(data[at : at + 3])
            if len(data) < end:
                break
            self._take(data[at + 3], data[at + 4], int.from_bytes(data[at + 5 : at + 9]), data[at + 9 : end])
            at = end
        self._buffer = data[at:]

    def _take(self, kind: int, flags: int, id: int, payload: bytes) -> None:
        call = self._calls.get(id)
        if kind == DATA and call is not None:
            call.received(payload)
        elif (kind == HEADERS and flags & END_STREAM) or kind == RST_STREAM:
            if call is not None:
                del self._calls[id]
                call.ended()
        elif kind == SETTINGS and not flags & ACK:
            self._apply(payload)
            self.transport.write(_frame(SETTINGS, ACK, 0))
            if not self.is_ready.done():
                self.is_ready.set_result(None)
        elif kind == PING and not flags & ACK:
            self.transport.write(_frame(PING, ACK, 0, payload))
        elif kind == WINDOW_UPDATE:
            target: Any = self if id == 0 else call
            if target is not None:
                target.window += int.from_bytes(payload)
            self._room.set()

    def _apply(self, settings: bytes) -> None:
        for name, value in struct.iter_unpack(">HI", settings):
            if name == _INITIAL_WINDOW_SIZE:
                for call in self._calls.values():
                    call.window += value - self.initial_window
                self.initial_window = value
                self._room.set()
