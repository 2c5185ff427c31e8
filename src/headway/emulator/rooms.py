"""Two engines find each other by the number of a room, as SGLang's do: one computes the prompt, the other answers.

Whoever comes first waits for the other. The prefill engine begins when the decode engine has made room for the KV cache
and has asked for it, at the prefill engine's bootstrap port; it says so when the prompt is computed, and sends the
cache. The decode engine's first token comes with it. Neither learns that the other one's client is gone: it waits until
its time is over, which is what SGLang's do (`SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT`, `..._WAITING_TIMEOUT`).
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

from msgspec import Struct

from headway.emulator.caches import Caches, GoneError

NOBODY = "2.2.2.2"
"""A bootstrap host that stands for no other engine: with it, one does without, as in SGLang's own health check."""
_PATH = "/rooms/"


class Meeting:
    """What a prefill engine knows of one room."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.asked: asyncio.Future[None] = loop.create_future()
        """The decode engine has made room."""
        self.computed: asyncio.Future[bool] = loop.create_future()
        """The prompt is; or its request has failed."""
        self.fetched: asyncio.Future[None] = loop.create_future()


class Rooms:
    """A prefill engine's bootstrap server."""

    def __init__(self, caches: Caches, timeout_s: float) -> None:
        self._caches, self._timeout_s = caches, timeout_s
        self._meetings: dict[str, Meeting] = {}

    async def listen(self, at: socket.socket) -> asyncio.Server:
        """From now on."""
        return await asyncio.start_server(self._serve, sock=at)

    def meeting(self, room: str) -> Meeting:
        """As it is, or a new one."""
        return self._meetings.setdefault(room, Meeting())

    def leave(self, room: str, failed: bool) -> None:
        """The prefill engine's part is over. Who asks for a room that nobody is in waits for somebody."""
        meeting = self._meetings.pop(room, None)
        if meeting is not None and failed and not meeting.computed.done():
            meeting.computed.set_result(False)
        self._caches.drop(room)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            method, path, _ = (await reader.readline()).decode("latin-1").split(" ")
            while (await reader.readline()).strip():
                pass
            found = await self._answer(method, path.removeprefix(_PATH))
            writer.write(b"HTTP/1.1 %d \r\nContent-Length: 0\r\n\r\n" % (200 if found else 404))
            await writer.drain()
        except (OSError, ValueError):
            return
        finally:
            writer.close()

    async def _answer(self, method: str, room: str) -> bool:
        if method == "GET":
            return await self._caches.send(room)
        if method == "DELETE":
            if room in self._meetings and not self._meetings[room].fetched.done():
                self._meetings[room].fetched.set_result(None)
            return self._caches.drop(room)
        meeting = self.meeting(room)
        if not meeting.asked.done():
            meeting.asked.set_result(None)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.shield(meeting.computed)
        except TimeoutError:
            self._meetings.pop(room, None)
            return False


class Room(Struct, frozen=True):
    """Where a decode engine gets a KV cache. Satisfies `caches.Source`."""

    host: str
    port: int
    number: str
    timeout_s: float

    async def ready(self) -> None:
        """Until the prompt is computed. GoneError where it is not."""
        await self._ask("POST")

    async def ask(self, method: str) -> None:
        """GET: have it sent. DELETE: it has been fetched. GoneError where it is not there, or nobody answers."""
        await self._ask(method)

    async def _ask(self, method: str) -> None:
        try:
            async with asyncio.timeout(self.timeout_s):
                reader, writer = await asyncio.open_connection(self.host, self.port)
                try:
                    head = f"{method} {_PATH}{self.number} HTTP/1.1\r\nHost: {self.host}\r\n\r\n"
                    writer.write(head.encode("latin-1"))
                    status = await reader.readline()
                finally:
                    writer.close()
        except TimeoutError:
            what = f"room {self.number} timed out after {self.timeout_s:g}s in KVPoll.WaitingForInput"
            raise GoneError(what) from None
        except (OSError, UnicodeEncodeError):
            raise GoneError(f"could not fetch prefill info from {self.host}:{self.port}") from None
        if status.split(b" ")[1:2] != [b"200"]:
            raise GoneError(f"KVTransferError(bootstrap_room={self.number}): prefill has failed")


async def within(future: asyncio.Future[None], timeout_s: float, what: str) -> None:
    """Wait for it. GoneError where it takes longer."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await asyncio.shield(future)
            return
    raise GoneError(f"timed out after {timeout_s:g}s in {what}")
