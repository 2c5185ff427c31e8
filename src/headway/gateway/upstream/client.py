"""HTTP/1.1 to one engine: kept connections, bodies as they come, and a close that the engine notices at once."""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from typing import cast
from urllib.parse import urlsplit

import httptools

from headway.core.errors import HeadwayError

_HIGH_BYTES = 1 << 18
"""Read and not yet passed on: beyond this the engine has to wait, so that a slow client costs no memory."""
_MOST_AROUND_BYTES = 1 << 18
"""Of an answer's headers, and of what else may come between pieces of its body."""


class EngineError(Exception):
    """The engine broke off, or spoke nonsense."""

    is_untouched = False
    """It has done nothing with the request."""


class UnreachableError(EngineError):
    """No connection to it can be had."""

    is_untouched = True


class BrokenOffError(EngineError):
    """Its side of the connection is closed, in the middle of an answer or before one."""


Sink = Callable[[bytes], bool]
"""Is given what comes of a body; False: that is enough for now."""


class Connection(asyncio.Protocol):
    """One connection, with one response at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Sink | None = None
        self.is_lost = False
        self.is_fresh = True
        self._begin()

    def _begin(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._parts: deque[bytes] = deque()
        self._buffered = 0
        self._is_paused = False
        self.status = 0
        self.headers: dict[str, str] = {}
        self.is_complete = False
        self._until_close = self._is_kept = self._is_interim = self._is_excess = False
        self._around = 0
        self._error: str | None = None
        self._is_broken_off = False
        self._fault: Exception | None = None
        """What a sink has raised."""

    # Protocol.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._around += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail("changed to another protocol")
        except httptools.HttpParserError as error:
            self._fail(f"spoke no HTTP ({error})")
        if self._is_excess:
            self._fail("said more than its answer")
        elif self._around > _MOST_AROUND_BYTES:
            self._fail("sent headers without end")
        if self._sink is not None and self._parts:
            self._give(self._sink)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        if self._until_close and exc is None:
            self.is_complete = True
        elif not self.is_complete and self._error is None:
            self._error, self._is_broken_off = "broke off the connection", True
        self._wake()

    # Parser.

    def on_message_begin(self) -> None:
        self._is_excess = self.is_complete

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.status:
            self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        self._is_interim = status < 200
        if self._is_interim or self._is_excess:
            if not self.status:
                self.headers = {}
            return
        self.status, self._around = status, 0
        framed = "content-length" in self.headers or "transfer-encoding" in self.headers
        self._until_close = not framed and self.status not in (204, 304)
        self._is_kept = self._parser.should_keep_alive()
        self._wake()

    def on_body(self, body: bytes) -> None:
        if self._is_excess:
            return
        self._around = 0
        self._parts.append(body)
        self._buffered += len(body)
        if self._buffered > _HIGH_BYTES and self._transport is not None and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()
        if self._sink is None:
            self._wake()

    def on_message_complete(self) -> None:
        if self._is_interim:  # 100 Continue and the like: the answer is still to come
            return
        self.is_complete = True
        self._wake()

    # For who asks.

    def send(self, head: bytes, body: bytes) -> None:
        """A request; what came before must be complete."""
        if self.status:
            self._begin()
            self.is_fresh = False
        assert self._transport is not None
        self._transport.write(head + body)

    async def answered(self) -> None:
        """Until status and headers are there. EngineError where none will come."""
        while not self.status:
            self._check()
            await self._wait()

    async def chunk(self) -> bytes:
        """What has come of the body, or what comes next; empty at its end. EngineError where it was cut off."""
        while not self._parts:
            if self.is_complete:
                return b""
            self._check()
            await self._wait()
        return self._take()

    async def pour(self, sink: Sink) -> bool:
        """Have `sink` given what has come of the body, and the rest as it comes: no task is woken for each piece.

        True: it has enough. False: the body is over. EngineError where that was cut off, and whatever `sink` raises.
        """
        self._sink = sink
        try:
            if self._parts:
                self._give(sink)
            while self._sink is not None and not self.is_complete:
                self._check()
                await self._wait()
            has_enough = self._sink is None
        finally:
            self._sink = None
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault
        return has_enough

    def _give(self, sink: Sink) -> None:
        try:
            if sink(self._take()):
                return
        except Exception as fault:
            self._fault = fault
        self._sink = None
        self._wake()

    def _take(self) -> bytes:
        data = self._parts.popleft() if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._buffered = 0
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return data

    @property
    def is_reusable(self) -> bool:
        """Another request can be sent on it: nobody is about to look at the last one's answer."""
        return self.is_complete and not self.is_lost and not self._parts and self._is_kept and self._waiter is None

    def abort(self, why: str) -> None:
        """Close at once; whoever waits hears why."""
        self._fail(why)

    def _fail(self, why: str) -> None:
        if not self.is_complete:
            self._error = self._error or why
        if self._transport is not None:
            self._transport.abort()
        self._wake()

    def _check(self) -> None:
        if self._error is not None:
            raise BrokenOffError(self._error) if self._is_broken_off else EngineError(self._error)

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Client:
    """All connections to one engine."""

    def __init__(self, url: str, connect_s: float = 5.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
            raise HeadwayError(f"{url!r} is no address of an engine; expected http://host:port")
        self._host = parts.hostname
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._ssl else 80)
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._authority = parts.netloc
        self._connect_s = connect_s
        self._idle: list[Connection] = []

    async def request(
        self,
        method: str,
        path: str,
        headers: str = "",
        body: bytes = b"",
        opened: Callable[[Connection], None] | None = None,
    ) -> Connection:
        """Send a request and wait for its status. `headers` are lines that end in CRLF. EngineError if none comes.

        `opened` is told of the connection before anything is sent, so that it can be closed while nothing comes.
        """
        length = f"Content-Length: {len(body)}\r\n" if body or method == "POST" else ""
        head = f"{method} {self._path}{path} HTTP/1.1\r\nHost: {self._authority}\r\n{length}{headers}\r\n"
        while True:
            connection = await self._connection()
            try:
                if opened is not None:
                    opened(connection)
                connection.send(head.encode("latin-1"), body)
                await connection.answered()
            except EngineError:
                if connection.is_fresh or not connection.is_lost:
                    raise
                continue  # the engine had closed an idle connection, and never saw the request
            except BaseException:
                connection.abort("given up")
                raise
            return connection

    async def _connection(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_lost:
                return connection
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_s):
                return await self._open(loop)
        except TimeoutError:
            raise UnreachableError(f"did not accept a connection within {self._connect_s:g} s") from None
        except OSError as error:
            raise UnreachableError(f"cannot be reached: {error.strerror or error}") from None

    async def _open(self, loop: asyncio.AbstractEventLoop) -> Connection:
        _, made = await loop.create_connection(lambda: Connection(loop), self._host, self._port, ssl=self._ssl)
        return made

    def give_back(self, connection: Connection) -> None:
        """The request is over: keep the connection if it is whole, else close it."""
        if connection.is_reusable:
            self._idle.append(connection)
        else:
            connection.abort("given up")

    async def fetch(self, path: str, timeout_s: float, body: bytes | None = None) -> tuple[int, bytes]:
        """Status and body of a GET, or of a POST of some JSON. EngineError if there is none in time."""
        sent = ("GET", path) if body is None else ("POST", path, "Content-Type: application/json\r\n", body)
        try:
            async with asyncio.timeout(timeout_s):
                connection = await self.request(*sent)
                try:
                    return connection.status, await read(connection, 1 << 22)
                finally:
                    self.give_back(connection)
        except TimeoutError:
            raise EngineError(f"no answer to {path} within {timeout_s:g} s") from None

    def close(self) -> None:
        """Close what is kept."""
        while self._idle:
            self._idle.pop().abort("closed")


async def read(connection: Connection, limit_bytes: int) -> bytes:
    """The whole body. EngineError where it is cut off, or larger."""
    parts, size = [], 0
    while part := await connection.chunk():
        parts.append(part)
        size += len(part)
        if size > limit_bytes:
            raise EngineError(f"sent more than {limit_bytes:,} bytes")
    return b"".join(parts)
