"""Where answers go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Send

from headway.gateway.errors import ApiError

Headers = Sequence[tuple[bytes, bytes]]


class ResponseWriter(Protocol):
    """One request's answer, on its way to whoever asked."""

    def start(self, status: int, headers: Headers) -> None:
        """What it begins with; that goes with the first of its body."""

    def write(self, body: bytes, more: bool = False) -> None:
        """Some of the body, or, without `more`, the last of it."""

    @property
    def is_full(self) -> bool:
        """What was written has not all gone: `drain` before there is more."""

    async def drain(self) -> None:
        """Until there is room."""


class ClientReply(ResponseWriter, Protocol):
    """A reply to a client, who may leave."""

    @property
    def has_begun(self) -> bool:
        """It has been started."""

    def take_body(self) -> bytes | None:
        """The request's, if all of it is there and has not been taken; else it comes by ASGI's `receive`."""

    def watch(self, gone: Callable[[], None]) -> None:
        """Call this if the client leaves before it has all of its answer."""

    def close(self) -> None:
        """Whoever waited for the client to leave does not any more."""


class AsgiWriter:
    """A reply as ASGI's messages, for whatever server there is. Satisfies `ClientReply`."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self._written: list[MutableMapping[str, Any]] = []
        self._watcher: asyncio.Task[None] | None = None
        self.has_begun = False

    def take_body(self) -> None:
        """It comes in messages."""

    def start(self, status: int, headers: Headers) -> None:
        """To be sent."""
        self.has_begun = True
        self._written.append({"type": "http.response.start", "status": status, "headers": headers})

    def write(self, body: bytes, more: bool = False) -> None:
        """To be sent."""
        self._written.append({"type": "http.response.body", "body": body, "more_body": more})

    @property
    def is_full(self) -> bool:
        """Something is to be sent."""
        return bool(self._written)

    async def drain(self) -> None:
        """Send it."""
        written, self._written = self._written, []
        for message in written:
            await self._send(message)

    def watch(self, gone: Callable[[], None]) -> None:
        """By a task."""
        self._watcher = asyncio.create_task(self._watch(gone))

    async def _watch(self, gone: Callable[[], None]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        gone()

    def close(self) -> None:
        """End the task."""
        if self._watcher is not None:
            self._watcher.cancel()


async def answer(reply: ResponseWriter, error: ApiError, request_id: bytes = b"") -> None:
    """An error as a whole answer."""
    body = error.json()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if request_id:
        headers.append((b"x-request-id", request_id))
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % error.retry_after_s))
    reply.start(error.status, headers)
    reply.write(body)
    await reply.drain()


def error_response(error: ApiError) -> Response:
    """The same, as a response."""
    headers = None if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
    return Response(error.json(), error.status, headers, "application/json")
