"""What a worker does not answer itself is passed on to the scheduler's own HTTP side, and its answer back."""

from __future__ import annotations

import asyncio
import socket

from starlette.types import Receive, Scope, Send

from headway.gateway.errors import ApiError
from headway.gateway.relay.writer import AsgiWriter, ResponseWriter, answer
from headway.gateway.upstream.client import Connection, EngineError

_ONE_HOP = frozenset((b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"expect"))
"""Headers that are between two neighbours."""
_OWN = frozenset(("connection", "keep-alive", "transfer-encoding", "date"))
"""Of answers, those that this process makes anew."""
_GONE = ApiError(503, "the scheduler cannot be reached", "unavailable", retry_after_s=1)
_HANGS = ApiError(503, "the scheduler does not answer", "unavailable", retry_after_s=5)


class _Upstream(Connection):
    """A connection that can be written to bit by bit."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._can_write = asyncio.Event()
        self._can_write.set()
        self.is_left = False
        """By its client."""

    def pause_writing(self) -> None:
        self._can_write.clear()

    def resume_writing(self) -> None:
        self._can_write.set()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._can_write.set()

    async def write(self, data: bytes) -> None:
        """When there is room for it."""
        await self._can_write.wait()
        if self._transport is not None and not self.is_lost:
            self._transport.write(data)


class Proxy:
    """An ASGI application, at whose other end is another one's Unix socket."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.is_silent = False
        """The other one hangs."""
        self._waiting: set[_Upstream] = set()
        """Connections on which no answer has begun."""

    def silent(self) -> None:
        """It hangs: who waits for it need not."""
        self.is_silent = True
        for upstream in self._waiting:
            upstream.abort("it hangs")

    def is_heard(self) -> bool:
        """Somebody listens at the other end."""
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(self._path) == 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop, reply = asyncio.get_running_loop(), AsgiWriter(receive, send)
        if self.is_silent:
            await answer(reply, _HANGS)
            return
        try:
            _, upstream = await loop.create_unix_connection(lambda: _Upstream(loop), self._path)
        except OSError:
            await answer(reply, _GONE)
            return
        head, is_chunked = _head(scope)
        upstream.send(head, b"")
        sending = asyncio.create_task(_send(receive, upstream, is_chunked))
        self._waiting.add(upstream)
        try:
            await self._answer(upstream, reply, has_body=scope["method"] != "HEAD")
        except EngineError:
            if not upstream.is_left:
                raise  # the client's connection is closed, so that it does not take this for the end
        finally:
            self._waiting.discard(upstream)
            sending.cancel()
            upstream.abort("the answer is out")

    async def _answer(self, upstream: _Upstream, reply: ResponseWriter, has_body: bool) -> None:
        try:
            await upstream.answered()
        except EngineError:
            await answer(reply, _HANGS if self.is_silent else _GONE)
            return
        self._waiting.discard(upstream)
        headers = [(name.encode("latin-1"), value.encode("latin-1"))
                   for name, value in upstream.headers.items() if name not in _OWN]  # fmt: skip
        reply.start(upstream.status, headers)
        await reply.drain()
        while has_body and (data := await upstream.chunk()):
            reply.write(data, more=True)
            await reply.drain()
        reply.write(b"")
        await reply.drain()


def _head(scope: Scope) -> tuple[bytes, bool]:
    """The request's first line and headers; and whether its body is sent in chunks, as its length is not known."""
    kept = [(name, value) for name, value in scope["headers"] if name not in _ONE_HOP]
    is_chunked = any(name == b"transfer-encoding" for name, _ in scope["headers"])
    target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
    lines = [scope["method"].encode() + b" " + target + b" HTTP/1.1", b"connection: close"]
    lines += [name + b": " + value for name, value in kept]
    lines += [b"transfer-encoding: chunked"] if is_chunked else []
    return b"\r\n".join(lines) + b"\r\n\r\n", is_chunked


async def _send(receive: Receive, upstream: _Upstream, is_chunked: bool) -> None:
    """The request's body; then wait for its client to leave."""
    while (message := await receive())["type"] != "http.disconnect":
        data = message.get("body", b"")
        if is_chunked:
            last = b"" if message.get("more_body") else b"0\r\n\r\n"
            data = (b"%x\r\n%s\r\n" % (len(data), data) if data else b"") + last
        await upstream.write(data)
    upstream.is_left = True
    upstream.abort("the client is gone")
