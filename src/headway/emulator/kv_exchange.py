"""Keeps KV caches for other emulated engines, and fetches KV caches from them, like vLLM's NIXL connector.

An engine that has computed a prompt for another engine keeps the blocks until they are fetched, or for `keep_s`. The
decode engine reserves blocks, fetches the cache, reports the fetch, and continues from the cache. All caches that an
engine sends share the engine's link, and so do all caches that it fetches. A copy takes the longer of the sender's
and the receiver's time. Caches are requested over HTTP at the engine's own address; a GET is answered when the whole
cache has been sent.
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
from headway.core.errors import HeadwayError
from headway.core.fleet import Pool
from headway.gateway.upstream.client import Client
from headway.gateway.upstream.errors import EngineError, UnreachableError
from headway.perf import memory
from headway.perf.copies import NETWORK
from headway.sim.fabric import Fabric
from headway.sim.kernel import COMMAND, Kernel
from headway.sim.replica import Replica

PATH = "/emulator/kv"
_TIMEOUT_S = 600.0


class KvLink(Struct, frozen=True):
    """The link over which caches move between engines."""

    bytes_per_s: float = 12.5e9
    """Bandwidth of one engine in each direction."""
    keep_s: float = 480.0
    """A cache that is not fetched is dropped after this time. The default is vLLM's."""
    recomputes: bool = False
    """Whether a prompt is computed again if its cache is gone. By default the request fails, as in vLLM."""


class KvGoneError(Exception):
    """The requested cache does not exist, or no longer exists."""


class KvSource(Protocol):
    """The place where a cache is kept."""

    async def wait_until_ready(self) -> None:
        """Wait until the cache can be sent. Raises KvGoneError if it can never be sent."""

    async def request(self, method: str) -> None:
        """GET: request the cache. DELETE: report that it was fetched. Raises KvGoneError if either fails."""


class VllmKvSource(Struct, frozen=True):
    """A request's `kv_transfer_params`, which locate its cache. Implements `KvSource`."""

    remote_engine_id: str
    remote_host: str
    remote_port: int
    remote_request_id: str
    do_remote_prefill: bool = False

    async def wait_until_ready(self) -> None:
        """Return at once: the prefill has ended."""

    async def request(self, method: str) -> None:
        url, path = f"http://{self.remote_host}:{self.remote_port}", f"{PATH}/{self.remote_request_id}"
        try:
            status = await request_status(url, method, path, _TIMEOUT_S)
        except (EngineError, TimeoutError):
            raise KvGoneError(f"{self.remote_engine_id} does not answer") from None
        if status != 200:
            raise KvGoneError(f"{self.remote_engine_id} has no cache of {self.remote_request_id}")


async def request_status(url: str, method: str, path: str, timeout_s: float) -> int:
    """Send a request to another engine. Returns the status. Raises EngineError, or TimeoutError."""
    async with asyncio.timeout(timeout_s):
        try:
            connection = await Client(url, timeout_s + 1.0).request(method, path)
        except (HeadwayError, ValueError):  # the address comes from a client
            raise UnreachableError(f"{url!r} is no address") from None
        connection.abort("the status is all that is needed")
        return connection.status


class KvExchange:
    """The caches that one engine keeps and fetches. `run` handles due events and returns the time."""

    def __init__(self, pool: Pool, link: KvLink, kernel: Kernel, replica: Replica, run: Callable[[], float]) -> None:
        self.link = link
        self._kernel, self._replica, self._run = kernel, replica, run
        self._bytes_per_token = memory.kv_bytes_per_token(pool.model, pool.engine.kv_dtype_bytes)
        self._fabric = Fabric(kernel, lambda _: link.bytes_per_s, costs().kv_transfer[NETWORK].latency_s)
        self._kept: dict[str, tuple[int, int]] = {}
        """Kept caches by name: (tokens, blocks)."""
        self._flows = count(1)
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        """Fetches that wait for free blocks: (blocks, future of the grant)."""
        self._reports: set[asyncio.Task[None]] = set()
        self.num_fetching = 0
        """Requests that wait for blocks or for their cache."""

    def keep(self, name: str, live: Live, now: float) -> None:
        """Keep the cache of a prompt that was computed for another engine. The replica has just freed its blocks."""
        replica = self._replica
        blocks = replica.batch.kv.blocks(live.prompt_tokens)
        self._kept[name] = live.prompt_tokens, blocks
        replica.transit.pin(blocks)
        replica.transit.num_arriving += 1  # waiting requests wait for these blocks, too
        self._kernel.at(now + self.link.keep_s, COMMAND, live.id, self._drop, name)

    async def send(self, name: str) -> bool:
        """Send a cache. Returns whether it still exists after sending."""
        if name not in self._kept:
            return False
        await self._copy(self._kept[name][0], is_sent=True)
        return True

    def drop(self, name: str) -> bool:
        """Drop a fetched cache. Returns whether it existed."""
        existed = self._drop(self._run(), name)
        self._run()
        return existed

    def _drop(self, now: float, name: str) -> bool:
        _, blocks = self._kept.pop(name, (0, 0))
        if blocks:
            self.release(blocks, now)
        return blocks > 0

    def release(self, blocks: int, now: float) -> None:
        """Free blocks that were reserved or kept."""
        self._replica.transit.num_arriving -= 1
        self._replica.transit.unreserve(blocks, now)

    async def fetch(self, source: KvSource, prompt_tokens: int) -> int:
        """Fetch a cache. Returns its reserved blocks, for `resume`. Raises KvGoneError."""
        blocks = self._replica.batch.kv.blocks(prompt_tokens + 1)
        self.num_fetching += 1
        try:
            await self._reserve(blocks)
            try:
                await source.wait_until_ready()
                copying = asyncio.create_task(self._copy(prompt_tokens, is_sent=False))
                try:
                    await source.request("GET")
                    await copying
                finally:
                    copying.cancel()
            except BaseException:
                self.release(blocks, self._run())
                self._run()
                raise
        finally:
            self.num_fetching -= 1
        report = asyncio.create_task(_report_fetched(source))  # the request does not wait for the report
        self._reports.add(report)
        report.add_done_callback(self._reports.discard)
        return blocks

    def resume(self, live: Live, blocks: int, now: float, has_token: bool = False) -> None:
        """Enqueue a request whose cache is in these reserved blocks.

        The prompt's last token is computed again, unless the first output token came with the cache (`has_token`).
        """
        live.swapped_tokens = live.prompt_tokens if has_token else max(live.prompt_tokens - 1, 1)
        live.generated_tokens = int(has_token)
        self._replica.transit.num_arriving -= 1
        self._replica.receive(live, blocks, now)

    async def _reserve(self, blocks: int) -> None:
        """Wait for this many free blocks, after the fetches that already wait."""
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((blocks, granted))
        self._run()
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self.release(blocks, self._run())
            raise

    def grant(self, now: float) -> None:
        """Reserve free blocks for the waiting fetches, in order."""
        while self._waiting:
            blocks, granted = self._waiting[0]
            if not granted.done() and not self._replica.transit.reserve(blocks, now):
                return
            self._waiting.popleft()
            if not granted.done():
                self._replica.transit.num_arriving += 1
                granted.set_result(None)

    async def _copy(self, tokens: int, is_sent: bool) -> None:
        """Wait as long as a copy takes over the engine's own link."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        number = next(self._flows)
        ends = (0, number) if is_sent else (number, 0)
        num_bytes = tokens * self._bytes_per_token
        flow = self._fabric.send(number, *ends, num_bytes, self._run(), partial(_set_done, done))
        self._run()
        try:
            await done
        except asyncio.CancelledError:
            self._fabric.stop(flow, self._run())
            raise


async def _report_fetched(source: KvSource) -> None:
    with suppress(KvGoneError):  # the cache expires later
        await source.request("DELETE")


def _set_done(done: asyncio.Future[None], _: Any) -> None:
    if not done.done():
        done.set_result(None)
