"""Writers: the interfaces through which a response reaches its client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, Protocol, runtime_checkable

from starlette.responses import Response
from starlette.types import Receive, Send

from headway.gateway.errors import ApiError

Headers = Sequence[tuple[bytes, bytes]]


class ResponseWriter(Protocol):
    """The interface that relays write a response to."""

    def start(self, status: int, headers: Headers) -> None:
        """Set status and headers, which are sent with the first bytes of the body."""

    def write(self, body: bytes, more: bool = False) -> None:
        """Write a piece of the body. Without `more`, it is the last piece."""

    @property
    def is_full(self) -> bool:
        """Whether the client reads slowly. If so, await `drain` before the next write."""

    async def drain(self) -> None:
        """Wait until there is room for more."""


@runtime_checkable
class TokenWriter(ResponseWriter, Protocol):
    """A writer that gets the number of tokens of each event."""

    def write_tokens(self, event: bytes, num_tokens: int) -> None:
        """Write an event with this many answer tokens."""


class ClientWriter(ResponseWriter, Protocol):
    """Writes the response to a client that may disconnect, and holds the body of its request."""

    @property
    def has_begun(self) -> bool:
        """Whether `start` was called. The status can then no longer change."""

    @property
    def status(self) -> int:
        """HTTP status of the response; 0 before `start`."""

    def take_body(self) -> bytes | None:
        """The request's body if it is complete. None: the body comes through ASGI's `receive`."""

    def watch(self, on_disconnect: Callable[[], None]) -> None:
        """Call `on_disconnect` if the client disconnects before the end of its response."""

    def close(self) -> None:
        """Stop watching for a disconnect."""


class AsgiWriter:
    """Writes a response as ASGI messages. Implements `ClientWriter`."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self._unsent: list[MutableMapping[str, Any]] = []
        self._watcher: asyncio.Task[None] | None = None
        self.has_begun, self.status = False, 0

    def take_body(self) -> None:
        return None

    def start(self, status: int, headers: Headers) -> None:
        self.has_begun, self.status = True, status
        self._unsent.append({"type": "http.response.start", "status": status, "headers": headers})

    def write(self, body: bytes, more: bool = False) -> None:
        self._unsent.append({"type": "http.response.body", "body": body, "more_body": more})

    @property
    def is_full(self) -> bool:
        return bool(self._unsent)

    async def drain(self) -> None:
        messages, self._unsent = self._unsent, []
        for message in messages:
            await self._send(message)

    def watch(self, on_disconnect: Callable[[], None]) -> None:
        self._watcher = asyncio.create_task(self._watch(on_disconnect))

    async def _watch(self, on_disconnect: Callable[[], None]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        on_disconnect()

    def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()


class HookedWriter:
    """Passes a response on, after calling a hook with its status and headers. Implements `ClientWriter`."""

    def __init__(self, writer: ClientWriter, on_start: Callable[[int, Headers], Headers]) -> None:
        """`on_start(status, headers)` returns the headers to send."""
        self._writer, self._on_start = writer, on_start
        self.write, self.drain, self.take_body = writer.write, writer.drain, writer.take_body
        self.watch, self.close = writer.watch, writer.close

    def start(self, status: int, headers: Headers) -> None:
        self._writer.start(status, self._on_start(status, headers))

    @property
    def has_begun(self) -> bool:
        return self._writer.has_begun

    @property
    def status(self) -> int:
        return self._writer.status

    @property
    def is_full(self) -> bool:
        return self._writer.is_full


class BufferedWriter:
    """Stores a response that a cascade may discard. Implements `ResponseWriter`."""

    is_full = False

    def __init__(self) -> None:
        self._start: tuple[int, Headers] | None = None
        self._writes: list[tuple[bytes, bool, int]] = []

    def start(self, status: int, headers: Headers) -> None:
        self._start = status, headers

    def write(self, body: bytes, more: bool = False) -> None:
        self._writes.append((body, more, 0))

    def write_tokens(self, event: bytes, num_tokens: int) -> None:
        """Write an event with this many answer tokens. It may later be copied to a writer that paces tokens."""
        self._writes.append((event, True, num_tokens))

    async def drain(self) -> None:
        return

    async def copy_to(self, writer: ResponseWriter) -> None:
        """Write the response to another writer."""
        assert self._start is not None
        writer.start(*self._start)
        for body, more, num_tokens in self._writes:
            if isinstance(writer, TokenWriter) and more:
                writer.write_tokens(body, num_tokens)
            else:
                writer.write(body, more)
            await writer.drain()


async def write_error(writer: ResponseWriter, error: ApiError, request_id: bytes = b"") -> None:
    """Write an error as the whole response."""
    body = error.json()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if request_id:
        headers.append((b"x-request-id", request_id))
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % error.retry_after_s))
    writer.start(error.status, headers)
    writer.write(body)
    await writer.drain()


def error_response(error: ApiError) -> Response:
    """An error as a Starlette response."""
    headers = None if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
    return Response(error.json(), error.status, headers, "application/json")
