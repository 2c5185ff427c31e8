"""SGLang's bootstrap rooms. The prefill engine and the decode engine of a request find each other by a room number.

The first engine to enter the room waits for the other engine. The prefill engine begins when the decode engine has
reserved blocks for the KV cache and has asked for the cache at the prefill engine's bootstrap port. At this port the
prefill engine reports the end of the prefill, and sends the cache with the first token. An engine does not notice that
the other engine's client has left, and waits until its own timeout, as SGLang's engines do
(`SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT`, `..._WAITING_TIMEOUT`).
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

from msgspec import Struct

from headway.emulator.kv_exchange import KvExchange, KvGoneError, request_status
from headway.gateway.upstream.errors import EngineError, UnreachableError

FAKE_BOOTSTRAP_HOST = "2.2.2.2"
"""A bootstrap host without an engine. The request runs on one engine alone, as in SGLang's own health check."""
_PATH = "/rooms/"


class Room:
    """The state of one room at the prefill engine."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.requested: asyncio.Future[None] = loop.create_future()
        """Set when the decode engine has reserved blocks."""
        self.prefilled: asyncio.Future[bool] = loop.create_future()
        """True when the prompt is computed, False when the request has failed."""
        self.fetched: asyncio.Future[None] = loop.create_future()


class BootstrapServer:
    """A prefill engine's bootstrap server."""

    def __init__(self, kv: KvExchange, timeout_s: float) -> None:
        self._kv, self._timeout_s = kv, timeout_s
        self._rooms: dict[str, Room] = {}

    async def listen(self, listener: socket.socket) -> asyncio.Server:
        """Serve connections from now on."""
        return await asyncio.start_server(self._serve, sock=listener)

    def enter(self, number: str) -> Room:
        """The room with this number; created if it does not exist."""
        return self._rooms.setdefault(number, Room())

    def leave(self, number: str, has_failed: bool) -> None:
        """Close a room: the prefill engine's part is over."""
        room = self._rooms.pop(number, None)
        if room is not None and has_failed and not room.prefilled.done():
            room.prefilled.set_result(False)
        self._kv.drop(number)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            method, path, _ = (await reader.readline()).decode("latin-1").split(" ")
            while (await reader.readline()).strip():
                pass
            is_found = await self._answer(method, path.removeprefix(_PATH))
            writer.write(b"HTTP/1.1 %d \r\nContent-Length: 0\r\n\r\n" % (200 if is_found else 404))
            await writer.drain()
        except (OSError, ValueError):
            return
        finally:
            writer.close()

    async def _answer(self, method: str, number: str) -> bool:
        if method == "GET":
            return await self._kv.send(number)
        if method == "DELETE":
            if number in self._rooms and not self._rooms[number].fetched.done():
                self._rooms[number].fetched.set_result(None)
            return self._kv.drop(number)
        room = self.enter(number)
        if not room.requested.done():
            room.requested.set_result(None)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.shield(room.prefilled)
        except TimeoutError:
            self._rooms.pop(number, None)
            return False


class BootstrapRoom(Struct, frozen=True):
    """The room from which a decode engine fetches a KV cache. Implements `kv_exchange.KvSource`."""

    host: str
    port: int
    number: str
    timeout_s: float

    async def wait_until_ready(self) -> None:
        await self.request("POST")

    async def request(self, method: str) -> None:
        host = f"[{self.host}]" if ":" in self.host else self.host
        try:
            status = await request_status(f"http://{host}:{self.port}", method, f"{_PATH}{self.number}", self.timeout_s)
        except TimeoutError:
            what = f"room {self.number} timed out after {self.timeout_s:g}s in KVPoll.WaitingForInput"
            raise KvGoneError(what) from None
        except UnreachableError:
            raise KvGoneError(f"could not fetch prefill info from {self.host}:{self.port}") from None
        except EngineError:
            status = 0
        if status != 200:
            raise KvGoneError(f"KVTransferError(bootstrap_room={self.number}): prefill has failed")


async def wait_for(future: asyncio.Future[None], timeout_s: float, state: str) -> None:
    """Wait for a future. Raises KvGoneError after `timeout_s`. `state` is SGLang's name for the wait."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await asyncio.shield(future)
            return
    raise KvGoneError(f"timed out after {timeout_s:g}s in {state}")
