"""KV caches that one emulated engine keeps for another, and fetches from another: as vLLM's NIXL connector has it.

Who has computed a prompt for somebody else keeps its blocks until they have been fetched, or for so long. Who decodes
sets blocks aside, fetches, says that it has, and goes on from there. A copy takes as long as it would at either end:
what one engine sends shares its link, and so does what one fetches. Caches are asked for over HTTP, at the engine's own
address; a GET is answered when all has been sent.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, Protocol

from msgspec import Struct

from headway.catalog.costs import costs
from headway.control.live import Live
from headway.core.fleet import Pool
from headway.perf import memory
from headway.sim.fabric import Fabric
from headway.sim.kernel import COMMAND, Kernel
from headway.sim.replica import Replica

PATH = "/emulator/kv"
NETWORK = "mooncake-h800"
"""Whose measured latency a transfer has."""
_LONGEST_S = 600.0
"""An engine that has not answered by then is gone."""


class Link(Struct, frozen=True):
    """How caches get from one engine to another."""

    bytes_per_s: float = 12.5e9
    """Of one engine, each way."""
    keep_s: float = 480.0
    """What nobody has fetched by then is dropped; vLLM's own default."""
    recomputes: bool = False
    """A prompt whose cache is gone is computed here; else the request fails, as vLLM's does unless told otherwise."""


class GoneError(Exception):
    """The cache that was to be fetched is not there."""


class Source(Protocol):
    """Where a cache is."""

    async def ready(self) -> None:
        """Until it can be sent. GoneError where it cannot be."""

    async def ask(self, method: str) -> None:
        """GET: have it sent. DELETE: it has been fetched. GoneError where it is not there, or nobody answers."""


class Remote(Struct, frozen=True):
    """Where a cache is, in a request's `kv_transfer_params`. Satisfies `Source`."""

    remote_engine_id: str
    remote_host: str
    remote_port: int
    remote_request_id: str
    do_remote_prefill: bool = False

    async def ready(self) -> None:
        """It is there, or gone."""

    async def ask(self, method: str) -> None:
        """GET: have it sent. DELETE: it has been fetched. GoneError where it is not there, or nobody answers."""
        try:
            async with asyncio.timeout(_LONGEST_S):
                reader, writer = await asyncio.open_connection(self.remote_host, self.remote_port)
                try:
                    head = f"{method} {PATH}/{self.remote_request_id} HTTP/1.1\r\nHost: {self.remote_host}\r\n"
                    writer.write(f"{head}Connection: close\r\n\r\n".encode("latin-1"))
                    status = await reader.readline()
                finally:
                    writer.close()
        except (OSError, TimeoutError, UnicodeEncodeError):
            raise GoneError(f"{self.remote_engine_id} does not answer") from None
        if status.split(b" ")[1:2] != [b"200"]:
            raise GoneError(f"{self.remote_engine_id} has no cache of {self.remote_request_id}")


class Caches:
    """One engine's. `run` does what is due, and says what time it is."""

    def __init__(self, pool: Pool, link: Link, kernel: Kernel, replica: Replica, run: Callable[[], float]) -> None:
        self.link = link
        self._kernel, self._replica, self._run = kernel, replica, run
        self._bytes_per_token = memory.kv_bytes_per_token(pool.model, pool.engine.kv_dtype_bytes)
        self._fabric = Fabric(kernel, lambda _: link.bytes_per_s, costs().kv_transfer[NETWORK].latency_s)
        self._kept: dict[str, tuple[int, int]] = {}
        """Tokens and blocks, by request."""
        self._flows = count(1)
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._thanks: set[asyncio.Task[None]] = set()
        self.num_fetching = 0
        """Requests that wait for room, or for their cache."""

    def keep(self, request: str, live: Live, now: float) -> None:
        """A prompt has been computed for another engine; its blocks were free for no time at all."""
        replica = self._replica
        blocks = replica.batch.kv.blocks(live.prompt_tokens)
        self._kept[request] = live.prompt_tokens, blocks
        replica.transit.pin(blocks)
        replica.transit.num_arriving += 1  # whoever waits for room waits for this
        self._kernel.at(now + self.link.keep_s, COMMAND, live.id, self._expire, request)

    def _expire(self, now: float, request: str) -> None:
        self._drop(request, now)

    async def send(self, request: str) -> bool:
        """Whether it is there; then it has been sent."""
        if request not in self._kept:
            return False
        await self._copy(self._kept[request][0], is_sent=True)
        return True

    def drop(self, request: str) -> bool:
        """It has been fetched. Whether it was there."""
        found = self._drop(request, self._run())
        self._run()
        return found

    def _drop(self, request: str, now: float) -> bool:
        _, blocks = self._kept.pop(request, (0, 0))
        if blocks:
            self.give_up(blocks, now)
        return blocks > 0

    def give_up(self, blocks: int, now: float) -> None:
        """What was set aside, or kept, is not needed any more."""
        self._replica.transit.num_arriving -= 1
        self._replica.transit.unreserve(blocks, now)

    async def fetch(self, remote: Source, prompt_tokens: int) -> int:
        """Blocks set aside, in which the cache is now: for `land`. GoneError where it cannot be had; they are free."""
        blocks = self._replica.batch.kv.blocks(prompt_tokens + 1)
        self.num_fetching += 1
        try:
            await self._room(blocks)
            try:
                await remote.ready()
                copying = asyncio.create_task(self._copy(prompt_tokens, is_sent=False))
                try:
                    await remote.ask("GET")
                    await copying
                finally:
                    copying.cancel()
            except BaseException:
                self.give_up(blocks, self._run())
                self._run()
                raise
        finally:
            self.num_fetching -= 1
        self._thank(remote)
        return blocks

    def _thank(self, remote: Source) -> None:
        """Who has kept it may let it go. The request does not wait for that."""
        thanks = asyncio.create_task(_thanked(remote))
        self._thanks.add(thanks)
        thanks.add_done_callback(self._thanks.discard)

    def land(self, live: Live, blocks: int, now: float, has_token: bool = False) -> None:
        """A request goes on from a cache that is in these blocks. The prompt's last token is computed once more.

        `has_token`: it is not, as the first token has come with the cache.
        """
        live.swapped_tokens = live.prompt_tokens if has_token else max(live.prompt_tokens - 1, 1)
        live.generated_tokens = int(has_token)
        self._replica.transit.num_arriving -= 1
        self._replica.receive(live, blocks, now)

    async def _room(self, blocks: int) -> None:
        """Wait for so many blocks, behind those that wait already."""
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((blocks, granted))
        self._run()
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self.give_up(blocks, self._run())
            raise

    def grant(self, now: float) -> None:
        """Blocks for those that wait for them, as far as they go."""
        while self._waiting:
            blocks, granted = self._waiting[0]
            if not granted.done() and not self._replica.transit.reserve(blocks, now):
                return
            self._waiting.popleft()
            if not granted.done():
                self._replica.transit.num_arriving += 1
                granted.set_result(None)

    async def _copy(self, tokens: int, is_sent: bool) -> None:
        """As long as it takes over the own link, which all that is sent shares, and all that is fetched."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        number = next(self._flows)
        ends = (0, number) if is_sent else (number, 0)
        num_bytes = tokens * self._bytes_per_token
        flow = self._fabric.send(number, *ends, num_bytes, self._run(), partial(_settle, done))
        self._run()
        try:
            await done
        except asyncio.CancelledError:
            self._fabric.stop(flow, self._run())
            raise


async def _thanked(remote: Source) -> None:
    with suppress(GoneError):  # then it is let go of by and by
        await remote.ask("DELETE")


def _settle(done: asyncio.Future[None], _: Any) -> None:
    if not done.done():
        done.set_result(None)
