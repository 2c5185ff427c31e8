"""A transport without sockets: the engine on its other side is a coroutine function of the test."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

from headway.gateway.upstream.client import Connection
from scripted import DONE, OK, Exchange, event, read_request

Serve = Callable[[Exchange], Awaitable[None]]


class _Pipe(asyncio.Transport):
    """The client's transport, and the server's way back."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection
        self._paused: list[bytes] | None = None
        self._is_closed = False
        self.requests = asyncio.StreamReader()

    def write(self, data: Any) -> None:
        if not self._is_closed:
            self.requests.feed_data(bytes(data))

    def deliver(self, data: bytes) -> None:
        """Pass bytes of a response to the client, in the next iteration of the event loop."""
        if self._paused is not None:
            self._paused.append(data)
        elif not self._is_closed:
            asyncio.get_running_loop().call_soon(self._connection.data_received, data)

    def pause_reading(self) -> None:
        self._paused = []

    def resume_reading(self) -> None:
        held, self._paused = self._paused or [], None
        for data in held:
            self.deliver(data)

    def is_closing(self) -> bool:
        return self._is_closed

    def abort(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self.requests.feed_eof()
            asyncio.get_running_loop().call_soon(self._connection.connection_lost, None)

    close = abort


class _Back:
    """What an exchange needs of an `asyncio.StreamWriter`."""

    def __init__(self, pipe: _Pipe) -> None:
        self.transport = pipe
        self.write, self.close, self.is_closing = pipe.deliver, pipe.abort, pipe.is_closing

    async def drain(self) -> None:
        """The client takes all."""


class InMemoryTransport:
    """Opens connections to `serve`, which is called with each request. Satisfies `client.Transport`."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_connections = 0

    async def connect(self) -> Connection:
        self.num_connections += 1
        connection = Connection()
        pipe = _Pipe(connection)
        connection.connection_made(pipe)
        self._tasks.add(asyncio.create_task(self._serve_all(pipe)))
        return connection

    async def _serve_all(self, pipe: _Pipe) -> None:
        with suppress(asyncio.IncompleteReadError):
            while True:
                await self._serve(await read_request(pipe.requests, _Back(pipe)))


def run(story: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine, in an event loop of its own, within 10 s."""

    async def limited() -> Any:
        async with asyncio.timeout(10):
            return await story

    return asyncio.run(limited())


def streaming(*events: Any, end: bytes | None = DONE, bodies: list[Any] | None = None) -> Serve:
    """Streams these events, each read by itself; without `end`, the connection is closed."""

    async def serve(exchange: Exchange) -> None:
        if bodies is not None:
            bodies.append(exchange.json())
        exchange.send(OK)
        for each in events:
            exchange.send(event(each))
            await asyncio.sleep(0)
        if end is None:
            await asyncio.sleep(0)
            exchange.close()
        else:
            exchange.send(end)

    return serve


def answering(body: Any, status: int = 200) -> Serve:
    """Answers each request with this."""

    async def serve(exchange: Exchange) -> None:
        exchange.answer(body, status)

    return serve
