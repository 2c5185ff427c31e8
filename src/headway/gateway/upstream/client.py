"""An HTTP/1.1 client of one server: kept connections, bodies in parts, and a close that the server notices at once."""

from __future__ import annotations

import asyncio
import re
import select
import ssl
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Final, Protocol, cast
from urllib.parse import urlsplit

import httptools

from headway.core.errors import HeadwayError
from headway.gateway import descriptors
from headway.gateway.framing import BLANK_LINE, RepeatedHead, take_chunks
from headway.gateway.upstream.errors import (
    BrokenOffError,
    EngineError,
    ExhaustedError,
    NoAnswerError,
    UnreachableError,
)

_MAX_BUFFERED_BYTES: Final = 1 << 18
"""Maximum number of body bytes that are read but not consumed. Beyond it, reading pauses, so that a slow client costs
no memory."""
_SHORT_BODY_BYTES: Final = 1 << 16
"""Shorter bodies are copied, to send them together with their heads."""
_MAX_OVERHEAD_BYTES: Final = 1 << 18
"""Maximum bytes of headers, or of framing between two pieces of a body."""
_MAX_IDLE_CONNECTIONS: Final = 256
"""Maximum number of idle connections kept to one server. Without a limit, a burst of streams would leave one open
connection for each stream."""
_STALE_S = 0.05
"""If the server closes a kept connection this soon after a request, it had closed it before the request came."""
_MAX_STATUS_BYTES, _STATUS_BODY_S = 1 << 16, 0.5
"""(maximum body bytes, maximum time for the body) of an answer of which only the status matters."""
_CLOSED = getattr(select, "POLLRDHUP", 0)
"""The event of a connection that the server has closed. Connections that broke are always reported."""
JSON = "Content-Type: application/json\r\n"

OnData = Callable[[list[bytes]], bool]
"""Takes pieces of a body; False pauses the stream."""
_CLIENT_KEY = re.compile(r"(?im)^(?:authorization|x-api-key):.*\r\n")


class Connection(asyncio.Protocol):
    """One connection, with one response at a time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()  # looking it up for each wait would be a system call
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._on_data: OnData | None = None
        self._can_write: asyncio.Event | None = None
        self.is_lost = False
        self.is_fresh = True
        """Whether no earlier request was sent on the connection."""
        self._parser: httptools.HttpResponseParser | None = None
        """Set while the connection is open, because parser and connection refer to each other."""
        self._repeated = RepeatedHead()
        self._kept_status = 0
        self._kept_headers: dict[str, str] = {}
        """Status and headers of the repeated head."""
        self._reset()

    def _reset(self) -> None:
        self._parts: list[bytes] = []
        self._buffered = 0
        self._is_paused = False
        self.status = 0
        self.headers: dict[str, str] = {}
        self.is_complete = False
        self.is_longer = False
        """Whether non-HTTP data follows the answer, so that its length may be wrong."""
        self._until_close = self._keeps_alive = self._is_interim = self._is_excess = False
        self._is_between_chunks = False
        """Whether the next byte is the first of a chunk."""
        self._overhead = 0
        self._error: EngineError | None = None
        self._callback_error: Exception | None = None

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        if self._parser is None:
            return
        start = 0
        if self._is_between_chunks:
            start = self._take_chunks(data, 0)
        elif not self.status and not self._overhead:
            start = self._take_first(data)
        if start < len(data):
            self._parse(data[start:])
        if self._on_data is not None and self._parts:
            self._deliver()

    def _parse(self, data: bytes) -> bool:
        """Have the parser read the data. False if the connection was aborted."""
        assert self._parser is not None
        self._overhead += len(data)
        self._is_between_chunks = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.abort("changed to another protocol")
            return False
        except httptools.HttpParserError as error:
            self.is_longer = self.is_complete
            self.abort(f"spoke no HTTP ({error})")
            return False
        if self._is_excess:
            self.abort("said more than its answer")
            return False
        if self._overhead > _MAX_OVERHEAD_BYTES:
            self.abort("sent headers without end")
            return False
        if self._is_between_chunks and not data.endswith(b"\r\n"):
            self._is_between_chunks = False  # a part of the next chunk's size has come
        return True

    def _take_first(self, data: bytes) -> int:
        """Take the first bytes of a response: the head, and what follows if it has a usual form. Returns their end."""
        end = data.find(BLANK_LINE) + 4
        if end < 4 or end == len(data):
            return 0
        length = self._repeated.body_length(data, 0, end) if self._repeated.is_known else 0
        if length and len(data) - end == length <= _MAX_BUFFERED_BYTES:
            self._take_repeated(data[end:])
            return len(data)
        if not self._parse(data[:end]):
            return len(data)
        if self._is_between_chunks:
            return self._take_chunks(data, end)
        if self._parse(data[end:]) and self.is_complete and self._keeps_alive and "content-length" in self.headers:
            self._keep_head(data, end)
        return len(data)

    def _take_chunks(self, data: bytes, start: int) -> int:
        """Take the whole chunks at `data[start:]`, which need no parser. Returns their end."""
        num_parts = len(self._parts)
        end = take_chunks(data, start, self._parts)
        if len(self._parts) > num_parts:
            self._overhead = 0
            self._buffered += end - start
            self._note_body()
        return end

    def _take_repeated(self, body: bytes) -> None:
        """Take a whole response whose head repeats the kept one."""
        self.status, self.headers = self._kept_status, self._kept_headers.copy()
        self.headers["content-length"] = str(len(body))
        self._parts, self._buffered = [body], len(body)
        self._keeps_alive = self.is_complete = True
        if self._waiter is not None:
            self._wake()

    def _keep_head(self, data: bytes, end: int) -> None:
        """Keep the head `data[:end]` of a whole response that the parser has read from `data`."""
        length = self.headers["content-length"].encode("latin-1")
        if self._buffered == len(data) - end and self._repeated.learn(data, 0, end, length):
            self._kept_status, self._kept_headers = self.status, self.headers.copy()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost, self._parser = True, None
        if self._until_close and exc is None:
            self.is_complete = True
        elif not self.is_complete and self._error is None:
            self._error = BrokenOffError("broke off the connection")
        self.resume_writing()
        self._wake()

    def pause_writing(self) -> None:
        self._can_write = asyncio.Event()

    def resume_writing(self) -> None:
        if self._can_write is not None:
            self._can_write.set()
            self._can_write = None

    # Called by the parser.

    def on_message_begin(self) -> None:
        self._is_excess = self.is_complete

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.status:
            self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        status = self._parser.get_status_code()
        self._is_interim = status < 200
        if self._is_interim or self._is_excess:
            if not self.status:
                self.headers = {}
            return
        self.status, self._overhead = status, 0
        is_framed = "content-length" in self.headers or "transfer-encoding" in self.headers
        self._until_close = not is_framed and self.status not in (204, 304)
        self._keeps_alive = self._parser.should_keep_alive()
        self._is_between_chunks = self.headers.get("transfer-encoding", "").lower() == "chunked"
        if self._waiter is not None:
            self._wake()

    def on_body(self, body: bytes) -> None:
        if self._is_excess:
            return
        self._overhead = 0
        self._parts.append(body)
        self._buffered += len(body)
        self._note_body()

    def _note_body(self) -> None:
        """Pause reading if too much is not consumed, and wake the waiting task."""
        if self._buffered > _MAX_BUFFERED_BYTES and self._transport is not None and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()
        if self._on_data is None and self._waiter is not None:
            self._wake()

    def on_chunk_header(self) -> None:
        self._is_between_chunks = False

    def on_chunk_complete(self) -> None:
        self._is_between_chunks = True

    def on_message_complete(self) -> None:
        self._is_between_chunks = False
        if self._is_interim:  # an interim response such as 100 Continue: the answer is still to come
            return
        self.is_complete = True
        if self._waiter is not None:
            self._wake()

    # Called by users.

    def send(self, head: bytes, body: bytes) -> None:
        """Send a request. The response to the previous request must be complete."""
        if self.status:
            self._reset()
            self.is_fresh = False
        assert self._transport is not None
        if len(body) < _SHORT_BODY_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)

    async def write(self, data: bytes) -> None:
        """Send more of a request's body, once the transport has room for it."""
        if self._can_write is not None:
            await self._can_write.wait()
        if self._transport is not None and not self.is_lost:
            self._transport.write(data)

    async def read_part(self) -> bytes:
        """The body's next bytes, empty at its end. Raises EngineError if the body is cut off."""
        while not self._parts:
            if self.is_complete:
                return b""
            await self.wait()
        return self.take_parts()

    def take_parts(self) -> bytes:
        """The received part of the body that was not taken yet."""
        parts = self._take_pieces()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _take_pieces(self) -> list[bytes]:
        parts, self._parts, self._buffered = self._parts, [], 0
        if self._is_paused:
            self._resume_reading()
        return parts

    async def read(self, limit_bytes: int) -> bytes:
        """The whole body. Raises EngineError if it is truncated or longer than the limit."""
        if self.is_complete and self._buffered <= limit_bytes:
            return self.take_parts()
        parts, size = [], 0
        while part := await self.read_part():
            parts.append(part)
            size += len(part)
            if size > limit_bytes:
                raise EngineError(f"sent more than {limit_bytes:,} bytes")
        return b"".join(parts)

    async def read_beginning(self, limit_bytes: int, timeout_s: float) -> bytes:
        """The first bytes of the body, about `limit_bytes`, as far as they come within the timeout."""
        parts, size = [], 0
        with suppress(TimeoutError, EngineError):
            async with asyncio.timeout(timeout_s):
                while size <= limit_bytes and (part := await self.read_part()):
                    parts.append(part)
                    size += len(part)
        return b"".join(parts)

    async def read_tail(self, timeout_s: float) -> None:
        """Drop the end of a response, so that the connection can be kept if the end comes in time."""
        try:
            async with asyncio.timeout(timeout_s):
                while await self.read_part():
                    pass
        except (TimeoutError, EngineError):
            return

    async def stream_to(self, on_data: OnData) -> bool:
        """Call `on_data` with the body so far, then with the pieces of each read as it comes, without waking a task for
        it.

        Returns True if `on_data` stopped the stream, False at the end of the body. Raises EngineError if the body is
        cut off. Passes on the errors of `on_data`.
        """
        self._on_data = on_data
        try:
            if self._parts:
                self._deliver()
            while self._on_data is not None and not self.is_complete:
                await self.wait()
            is_stopped = self._on_data is None
        finally:
            self._on_data = None
        error, self._callback_error = self._callback_error, None
        try:
            if error is not None:
                raise error
        finally:
            error = None  # the error refers to this frame
        return is_stopped

    def _deliver(self) -> None:
        """Call the stream's `on_data` with the parts so far."""
        try:
            assert self._on_data is not None
            if self._on_data(self._take_pieces()):
                return
        except Exception as error:
            self._callback_error = error
        self._on_data = None
        if self._waiter is not None:
            self._wake()

    def _resume_reading(self) -> None:
        self._is_paused = False
        if self._transport is not None:
            self._transport.resume_reading()

    @property
    def is_reusable(self) -> bool:
        """Whether another request can be sent: the last response is complete and read, and no task waits for it."""
        is_waited_for = self._waiter is not None and not self._waiter.done()
        return self.is_complete and not self.is_lost and not self._parts and self._keeps_alive and not is_waited_for

    @property
    def has_answered(self) -> bool:
        """Whether a byte of the current response has come."""
        return bool(self.status or self._overhead)

    def abort(self, reason: str) -> None:
        """Close at once. Tasks that wait on the response get an EngineError with the reason: a BrokenOffError if the
        server had closed the connection before, and the event loop has not read that yet."""
        if not self.is_complete and self._error is None:
            self._error = (BrokenOffError if self._is_broken_off() else EngineError)(reason)
        if self._transport is not None:
            self._transport.abort()
        self._wake()

    def _is_broken_off(self) -> bool:
        """Whether the server has closed the connection."""
        opened = None if self._transport is None else self._transport.get_extra_info("socket")
        if opened is None or opened.fileno() < 0:
            return False
        poll = select.poll()
        poll.register(opened.fileno(), _CLOSED)
        return bool(poll.poll(0))

    def wait(self) -> asyncio.Future[None]:
        """Completes at the next change. Raises EngineError if the connection has failed."""
        if self._error is not None:
            raise type(self._error)(*self._error.args)
        self._waiter = waiter = self._loop.create_future()
        return waiter

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class Transport(Protocol):
    """Opens connections to one server."""

    async def connect(self) -> Connection:
        """A new connection. Raises OSError if the server does not accept one."""


class TcpTransport:
    """Connects to a host's port, with TLS if `tls` is given."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> None:
        self._host, self.port, self._tls = host, port, tls

    async def connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        return (await loop.create_connection(Connection, self._host, self.port, ssl=self._tls))[1]


class UnixTransport:
    """Connects to a Unix socket."""

    def __init__(self, path: str) -> None:
        self.path = path

    async def connect(self) -> Connection:
        return (await asyncio.get_running_loop().create_unix_connection(Connection, self.path))[1]


class Client:
    """All connections to one server. `transport` replaces the TCP connection given by the URL."""

    def __init__(
        self,
        url: str,
        connect_s: float = 5.0,
        transport: Transport | None = None,
        api_key: str = "",
        keeps_keys: bool = False,
    ) -> None:
        """`api_key` is sent in place of the client's key. `keeps_keys`: never send the client's key."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
            raise HeadwayError(f"{url!r} is no address of an engine; expected http://host:port")
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._transport = transport or TcpTransport(parts.hostname, parts.port or (443 if tls else 80), tls)
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._authority = parts.netloc
        self._connect_s = connect_s
        self._authorization = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._drops_client_key = keeps_keys or bool(api_key)
        self._idle: list[Connection] = []

    async def request(
        self,
        method: str,
        path: str,
        headers: str = "",
        body: bytes = b"",
        on_connection: Callable[[Connection], None] | None = None,
        may_resend: Callable[[], bool] = lambda: True,
    ) -> Connection:
        """Send a request and wait for its status. `headers` are lines that end in CRLF. Raises EngineError if no status
        comes. `on_connection` is called before anything is sent, so that the caller can abort the connection while it
        waits. A request is sent a second time, on a new connection, only if the server closed a kept connection at once
        and without a byte of an answer, and `may_resend()` returns True, because the server may have begun to process
        the request nevertheless.
        """
        if self._drops_client_key:
            headers = _CLIENT_KEY.sub("", headers) + self._authorization
        length = f"Content-Length: {len(body)}\r\n" if body or method == "POST" else ""
        head = f"{method} {self._path}{path} HTTP/1.1\r\nHost: {self._authority}\r\n{length}{headers}\r\n"
        data = head.encode("latin-1")
        connection, sent_s = self._take_idle() or await self._open(), monotonic()
        broken = await self._send(connection, data, body, on_connection)
        if broken is None:
            return connection
        if not _was_stale(connection, sent_s):
            raise BrokenOffError(broken)
        try:
            connection = await self._open()
        except UnreachableError as refused:  # the request was sent, so this failure is no failure to connect
            raise BrokenOffError(f"{broken}, and {refused}") from None
        if not may_resend():
            connection.abort("given up")
            raise BrokenOffError(broken)
        broken = await self._send(connection, data, body, on_connection)
        if broken is not None:
            raise BrokenOffError(broken)
        return connection

    @staticmethod
    async def _send(
        connection: Connection, head: bytes, body: bytes, on_connection: Callable[[Connection], None] | None
    ) -> str | None:
        """Send a request on this connection and wait for its status. Returns the way in which the connection broke;
        None if it did not."""
        try:
            if on_connection is not None:
                on_connection(connection)
            connection.send(head, body)
            while not connection.status:
                await connection.wait()
        except BrokenOffError as error:
            return str(error)
        except EngineError:
            raise
        except BaseException:
            connection.abort("given up")
            raise
        return None

    async def connect(self) -> Connection:
        """An idle connection, otherwise a new connection. Raises UnreachableError if the server does not accept a
        connection in time, ExhaustedError if this process cannot open one."""
        return self._take_idle() or await self._open()

    def _take_idle(self) -> Connection | None:
        """An idle connection, from now on in use; None if there is none."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_lost:
                return connection
        return None

    async def _open(self) -> Connection:
        """A new connection, with the errors of `connect`."""
        try:
            async with asyncio.timeout(self._connect_s):
                return await self._transport.connect()
        except TimeoutError:
            raise UnreachableError(f"did not accept a connection within {self._connect_s:g} s") from None
        except OSError as error:
            if descriptors.is_used_up(error):
                raise ExhaustedError("cannot be reached: this process has no file descriptors left") from None
            raise UnreachableError(f"cannot be reached: {error.strerror or error}") from None

    def release(self, connection: Connection) -> None:
        """Keep a connection for the next request, if its response is complete and there is room. Close any other
        connection."""
        if connection.is_reusable and len(self._idle) < _MAX_IDLE_CONNECTIONS:
            self._idle.append(connection)
        else:
            connection.abort("given up")

    async def fetch(
        self, path: str, timeout_s: float, body: bytes | None = None, headers: str = JSON
    ) -> tuple[int, bytes]:
        """Status and body of a GET, or of a POST if there is a body. Raises EngineError if there is no answer in
        time."""
        sent = ("GET", path) if body is None else ("POST", path, headers, body)
        try:
            async with asyncio.timeout(timeout_s):
                connection = await self.request(*sent)
                try:
                    return connection.status, await connection.read(1 << 22)
                finally:
                    self.release(connection)
        except TimeoutError:
            raise NoAnswerError(f"no answer to {path} within {timeout_s:g} s") from None

    async def fetch_status(self, path: str, timeout_s: float) -> tuple[int, bytes]:
        """Status of a GET, and the part of its body that comes soon. Raises EngineError without a status in time."""
        try:
            async with asyncio.timeout(timeout_s):
                connection = await self.request("GET", path)
        except TimeoutError:
            raise NoAnswerError(f"no answer to {path} within {timeout_s:g} s") from None
        try:
            if connection.is_complete:
                return connection.status, connection.take_parts()
            return connection.status, await connection.read_beginning(_MAX_STATUS_BYTES, _STATUS_BODY_S)
        finally:
            self.release(connection)

    def close(self) -> None:
        """Close the idle connections. Connections in use belong to their requests."""
        while self._idle:
            self._idle.pop().abort("closed")


def _was_stale(connection: Connection, sent_s: float) -> bool:
    """Whether the server had closed a kept connection before a request was sent on it at `sent_s`."""
    return not connection.is_fresh and not connection.has_answered and monotonic() - sent_s < _STALE_S
