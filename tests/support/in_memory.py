"""A transport without sockets: the server on its other side is a coroutine function of the test."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httptools

from headway.gateway.upstream.client import Connection


class ServerExchange:
    """One request as the server sees it, and the way back."""

    def __init__(self, pipe: _Pipe) -> None:
        self._pipe = pipe
        self.path = ""
        self.headers: dict[str, str] = {}
        self.body = b""

    def send(self, data: bytes) -> None:
        """Send bytes of the response."""
        self._pipe.deliver(data)

    def answer(self, body: bytes, status: int = 200, content_type: str = "application/json") -> None:
        """Send a whole response."""
        head = f"HTTP/1.1 {status} Status\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
        self.send(head.encode() + body)

    def close(self) -> None:
        """Close the connection."""
        self._pipe.abort()

    async def wait_closed(self) -> None:
        """Wait until either side has closed the connection."""
        await self._pipe.closed.wait()


class _Pipe(asyncio.Transport):
    """The client's transport; parses the requests that are written to it."""

    def __init__(self, connection: Connection, serve: Serve) -> None:
        super().__init__()
        self._connection, self._serve = connection, serve
        self._parser = httptools.HttpRequestParser(self)
        self._tasks: list[asyncio.Task[None]] = []
        self._paused: list[bytes] | None = None
        self.closed = asyncio.Event()

    # Requests, as the parser reads them.

    def on_message_begin(self) -> None:
        self._exchange = ServerExchange(self)

    def on_url(self, url: bytes) -> None:
        self._exchange.path += url.decode()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._exchange.headers[name.decode().lower()] = value.decode()

    def on_body(self, body: bytes) -> None:
        self._exchange.body += body

    def on_message_complete(self) -> None:
        self._tasks.append(asyncio.create_task(self._serve(self._exchange)))  # type: ignore[arg-type]

    # The client's side.

    def write(self, data: Any) -> None:
        if not self.closed.is_set():
            self._parser.feed_data(bytes(data))

    def deliver(self, data: bytes) -> None:
        """Pass bytes of a response to the client, in the next iteration of the event loop."""
        if self._paused is not None:
            self._paused.append(data)
        elif not self.closed.is_set():
            asyncio.get_running_loop().call_soon(self._connection.data_received, data)

    def pause_reading(self) -> None:
        self._paused = []

    def resume_reading(self) -> None:
        held, self._paused = self._paused or [], None
        for data in held:
            self.deliver(data)

    def is_closing(self) -> bool:
        return self.closed.is_set()

    def abort(self) -> None:
        if not self.closed.is_set():
            self.closed.set()
            asyncio.get_running_loop().call_soon(self._connection.connection_lost, None)

    close = abort


Serve = Callable[[ServerExchange], Awaitable[None]]


class InMemoryTransport:
    """Opens connections to `serve`, which is called with each request. Satisfies `client.Transport`."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self.num_connections = 0

    async def connect(self) -> Connection:
        self.num_connections += 1
        connection = Connection()
        connection.connection_made(_Pipe(connection, self._serve))
        return connection
