"""Forwards the requests that a worker does not answer itself to the scheduler's own HTTP server."""

from __future__ import annotations

import asyncio
import socket

from starlette.types import Receive, Scope, Send

from headway.gateway.errors import ApiError, scheduler_hangs
from headway.gateway.relay.writer import AsgiWriter, ResponseWriter, write_error
from headway.gateway.upstream.client import Client, Connection, UnixTransport
from headway.gateway.upstream.errors import EngineError

_HOP_BY_HOP = frozenset((b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"expect"))
_RESET = frozenset(("connection", "keep-alive", "transfer-encoding", "date"))
"""Names of response headers that this process sets itself."""


class Proxy:
    """An ASGI application that forwards each request to another application over a Unix socket, on a separate
    connection."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._client = Client("http://scheduler", transport=UnixTransport(path))
        self.is_silent = False
        """Whether the scheduler hangs."""
        self._waiting: set[Connection] = set()
        """Connections without a response so far."""

    def set_silent(self) -> None:
        """Answer the requests that wait for the hanging scheduler with an error."""
        self.is_silent = True
        for connection in self._waiting:
            connection.abort("the scheduler hangs")

    def is_listening(self) -> bool:
        """Whether a process listens on the socket."""
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(self._path) == 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = AsgiWriter(receive, send)
        if self.is_silent:
            await write_error(writer, scheduler_hangs())
            return
        try:
            connection = await self._client.connect()
        except EngineError:
            await write_error(writer, _unreachable())
            return
        head, is_chunked = _head(scope)
        connection.send(head, b"")
        has_left = asyncio.Event()
        sending = asyncio.create_task(_send_body(receive, connection, is_chunked, has_left))
        self._waiting.add(connection)
        try:
            await self._forward_response(connection, writer, has_body=scope["method"] != "HEAD")
        except EngineError:
            if not has_left.is_set():
                raise  # the server closes the client's connection, which marks the response as incomplete
        finally:
            self._waiting.discard(connection)
            sending.cancel()
            connection.abort("the response is complete")

    async def _forward_response(self, connection: Connection, writer: ResponseWriter, has_body: bool) -> None:
        try:
            while not connection.status:
                await connection.wait()
        except EngineError:
            await write_error(writer, scheduler_hangs() if self.is_silent else _unreachable())
            return
        self._waiting.discard(connection)
        headers = [
            (name.encode("latin-1"), value.encode("latin-1"))
            for name, value in connection.headers.items()
            if name not in _RESET
        ]
        writer.start(connection.status, headers)
        await writer.drain()
        while has_body and (data := await connection.read_part()):
            writer.write(data, more=True)
            await writer.drain()
        writer.write(b"")
        await writer.drain()


def _unreachable() -> ApiError:
    return ApiError(503, "the scheduler cannot be reached", "unavailable", retry_after_s=1)


def _head(scope: Scope) -> tuple[bytes, bool]:
    """(request line and headers, whether the body is sent in chunks because its length is unknown)."""
    headers = [(name, value) for name, value in scope["headers"] if name not in _HOP_BY_HOP]
    is_chunked = any(name == b"transfer-encoding" for name, _ in scope["headers"])
    target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
    lines = [scope["method"].encode() + b" " + target + b" HTTP/1.1", b"connection: close"]
    lines += [name + b": " + value for name, value in headers]
    lines += [b"transfer-encoding: chunked"] if is_chunked else []
    return b"\r\n".join(lines) + b"\r\n\r\n", is_chunked


async def _send_body(receive: Receive, connection: Connection, is_chunked: bool, has_left: asyncio.Event) -> None:
    """Forward the request's body. When the client leaves, abort the connection."""
    while (message := await receive())["type"] != "http.disconnect":
        data = message.get("body", b"")
        if is_chunked:
            last = b"" if message.get("more_body") else b"0\r\n\r\n"
            data = (b"%x\r\n%s\r\n" % (len(data), data) if data else b"") + last
        await connection.write(data)
    has_left.set()
    connection.abort("the client has left")
