"""Paced emission: a client gets an answer's tokens evenly, even if an engine generates them unevenly.

This is the token pacer of PASCAL (II-C, IV-C): tokens that come in a burst are held back, and sent while the engine
pauses the request or serves others.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from time import monotonic

from headway.core.pacer import Emission
from headway.gateway.relay.request import ClientRequest
from headway.gateway.relay.writer import Headers, ResponseWriter


class PacedWriter:
    """Sends at most one answer token per `pace_s` seconds. Implements `ResponseWriter` and `TokenWriter`.

    Other data, such as reasoning, is sent as soon as the data before it is sent. The engine's answer is read as fast
    as the engine generates it, so the engine is not occupied longer than needed.
    """

    def __init__(self, writer: ResponseWriter, pace_s: float) -> None:
        self._writer, self._emission = writer, Emission(pace_s)
        self._kept: deque[tuple[float, bytes, bool]] = deque()
        """(when to send, bytes, whether more follows)."""
        self._last_s = 0.0
        """Send time of the last part that was written."""
        self._sending: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._is_ended = self._is_flushed = False

    def start(self, status: int, headers: Headers) -> None:
        self._writer.start(status, headers)

    @property
    def is_full(self) -> bool:
        return self._writer.is_full

    def write(self, body: bytes, more: bool = False) -> None:
        """Write after all data that is held back."""
        self._is_ended = not more
        self._push(body, more)

    def write_tokens(self, event: bytes, num_tokens: int) -> None:
        """Write an event with this many answer tokens."""
        if num_tokens:
            self._last_s = self._emission.send_s(monotonic(), num_tokens)
        self._push(event, True)

    def _push(self, body: bytes, more: bool) -> None:
        if not self._kept and (self._is_flushed or self._last_s <= monotonic()):
            self._writer.write(body, more)
            return
        self._kept.append((self._last_s, body, more))
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send_kept())

    async def _send_kept(self) -> None:
        """Send the held parts, each at its time."""
        while self._kept:
            wait_s = self._kept[0][0] - monotonic()
            if wait_s > 0 and not self._is_flushed:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), wait_s)
                continue
            _, body, more = self._kept.popleft()
            self._writer.write(body, more)
            await self._writer.drain()

    async def drain(self) -> None:
        """Wait until there is room for more data. After the end of the response: wait until all data is sent."""
        if self._is_ended and self._sending is not None:
            await self._sending
        await self._writer.drain()

    def flush(self) -> None:
        """Send all held and later data at once, because the client has left or the gateway ends."""
        self._is_flushed = True
        self._wake.set()


def paced(request: ClientRequest, writer: ResponseWriter, pace_s: float) -> ResponseWriter:
    """A writer for a request's response, at this pace if the response is a stream of tokens."""
    return PacedWriter(writer, pace_s) if request.stream and not request.is_passthrough else writer
