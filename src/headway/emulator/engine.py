"""The simulator's replica, in real time: the same batches, the same memory, the same step times, by the wall's clock.

Every iteration is one event.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from itertools import count
from math import inf
from time import monotonic
from typing import SupportsIndex

from headway.control.live import ENDED, Live
from headway.control.recorder import Recorder
from headway.core.fleet import Pool
from headway.core.pacer import Pacer
from headway.core.policy import Ordering
from headway.core.request import Phase
from headway.emulator.caches import Caches, GoneError, Link, Source
from headway.sim.kernel import Kernel
from headway.sim.replica import Replica
from headway.sim.replica_resources import calibrated_line, host_memory, kv_blocks
from headway.sim.timeline import Line


class Stream:
    """One request's tokens, as they are made. `keeps`: its cache is for another engine, under this name."""

    def __init__(self, live: Live, keeps: str | None = None) -> None:
        self.live, self.keeps = live, keeps
        self.num_made = self.num_coming = 0
        """Tokens that it has, and that will soon be here."""
        self.is_over = False
        self._taken = 0
        self._changed: asyncio.Future[None] | None = None

    def made(self, num: int, is_over: bool) -> None:
        """So many tokens are there in all."""
        if num > self.num_made or is_over:
            self.num_made, self.is_over = num, is_over
            if self._changed is not None and not self._changed.done():
                self._changed.set_result(None)

    async def take(self) -> int:
        """How many tokens have come since the last call; 0: that was all."""
        while self.num_made == self._taken and not self.is_over:
            self._changed = asyncio.get_running_loop().create_future()
            await self._changed
        new, self._taken = self.num_made - self._taken, self.num_made
        return new


class Engine:
    """One replica. `speed` 2.0: everything takes half as long as it would. `line`: step times, else the catalog's."""

    def __init__(
        self, pool: Pool, ordering: Ordering, speed: float = 1.0, link: Link | None = None, line: Line | None = None
    ) -> None:
        self.pool = pool
        self._speed = speed
        self._loop = asyncio.get_running_loop()
        self._start_s = monotonic()
        self._kernel = Kernel()
        self._timer: asyncio.TimerHandle | None = None
        self._teller: asyncio.TimerHandle | None = None
        self._untold: deque[tuple[float, Stream, int, bool]] = deque()
        """From when on a stream has so many tokens, and whether these are all: what an engine does after a step."""
        self._streams: dict[int, Stream] = {}
        self._ids = count()
        self._replica = Replica(
            0, pool, line or calibrated_line(pool), kv_blocks(pool), host_memory(pool), ordering, self._kernel, self,
            _forgetful(), True, Pacer(), 0, None,
        )  # fmt: skip
        self.caches = Caches(pool, link or Link(), self._kernel, self._replica, self._run)

    @property
    def now(self) -> float:
        """Seconds since the start, as the engine sees time."""
        return (monotonic() - self._start_s) * self._speed

    @property
    def max_tokens(self) -> int:
        """Longest request, prompt and output together."""
        return self._replica.max_request_tokens

    def load(self) -> tuple[int, int, float]:
        """Requests that run, requests that wait, and the share of the KV cache in use."""
        self._run()
        replica = self._replica
        waiting = replica.num_waiting + self.caches.num_fetching
        return replica.num_running, waiting, replica.kv_blocks_used / replica.kv_blocks_total

    def begin(
        self, prompt_tokens: int, output_tokens: int, tier: int, reasoning_tokens: int, keeps: str | None = None,
        blocks: int | None = None, has_token: bool = False, since_s: float = inf,
    ) -> Stream:  # fmt: skip
        """A request comes in. `keeps`: for another engine, under this name. `blocks`: with its cache in these, and
        maybe with its first token.

        `since_s`: when its head came; what has been done since is of the time that an engine takes.
        """
        now = self._run()
        live = Live(next(self._ids), now, prompt_tokens, output_tokens, "", tier, reasoning_tokens)
        if reasoning_tokens:
            live.phase = Phase.REASONING
        stream = self._streams[live.id] = Stream(live, keeps)
        if blocks is None:
            self._replica.enqueue(live, min(max(since_s, now - self._replica.request_s), now))
        elif has_token and output_tokens == 1:
            del self._streams[live.id]
            self.caches.give_up(blocks, now)
            stream.made(1, True)
        else:
            self.caches.land(live, blocks, now, has_token)
            stream.made(int(has_token), False)
        self._run()
        return stream

    async def fetch(self, remote: Source, prompt_tokens: int, since_s: float) -> int | None:
        """Blocks with the cache that another engine keeps. None: it is gone, and computed here.

        GoneError where it is gone, and that is not to be. `since_s`: when the request's head came.
        """
        tokenized_s = since_s + self._replica.tokenize_s * prompt_tokens
        await asyncio.sleep((tokenized_s - self.now) / self._speed)
        try:
            return await self.caches.fetch(remote, prompt_tokens)
        except GoneError:
            if not self.caches.link.recomputes:
                raise
            return None

    def abort(self, stream: Stream) -> None:
        """Its client is gone."""
        if stream.live.stage is not ENDED and stream.live.id in self._streams:
            now = self._run()
            if stream.live.stage is not ENDED:
                self._replica.cancel(stream.live, now)
                self._run()

    # Time.

    def _run(self) -> float:
        """Do what is due, tell of new tokens, and sleep until something is due again."""
        now, kernel = self.now, self._kernel
        kernel.run(now)
        boundary_s, kernel.now = kernel.now, now
        self.caches.grant(now)
        kernel.run(now)
        tick = self._replica.batch.tick
        for live in self._replica.batch.decoding.values():
            self._make(self._streams[live.id], live.joined_generated + tick - live.joined_tick, False, boundary_s)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if kernel.heap:
            wait_s = kernel.heap[0][0] / self._speed - (monotonic() - self._start_s)
            self._timer = self._loop.call_later(max(wait_s, 0.0), self._run)
        return now

    def _make(self, stream: Stream, num: int, is_over: bool, now: float) -> None:
        """An iteration has ended: who listens to the stream hears of it when the engine has told."""
        if num <= stream.num_coming and not is_over:
            return
        stream.num_coming = num
        self._untold.append((now + self._replica.response_s, stream, num, is_over))
        if self._teller is None:
            self._tell()

    def _tell(self) -> None:
        untold, self._teller = self._untold, None
        while untold and untold[0][0] <= self.now:
            _, stream, num, is_over = untold.popleft()
            stream.made(num, is_over)
        if untold:
            wait_s = untold[0][0] / self._speed - (monotonic() - self._start_s)
            self._teller = self._loop.call_later(max(wait_s, 0.0), self._tell)

    # What the replica tells.

    def on_finished(self, live: Live, now: float) -> None:
        """All its tokens are out."""
        live.enter(ENDED)
        stream = self._streams.pop(live.id)
        if stream.keeps is not None:
            self.caches.keep(stream.keeps, live, now)
        self._make(stream, live.output_tokens, True, now)

    def on_cancelled(self, live: Live, now: float) -> None:
        """It was aborted."""
        live.enter(ENDED)
        stream = self._streams.pop(live.id)
        stream.made(stream.num_made, True)

    def on_phase_changed(self, live: Live, now: float) -> None:
        """Reasoning is over."""

    def on_prefilled(self, live: Live, now: float) -> None:
        """Nothing is decoded elsewhere."""


def _forgetful() -> Recorder:
    """An engine keeps no records."""
    recorder = Recorder()
    for table in (recorder.requests, recorder.segments, recorder.stretches, recorder.moves):
        table.write = _forget
    return recorder


def _forget(row: Iterable[SupportsIndex]) -> None:
    pass
