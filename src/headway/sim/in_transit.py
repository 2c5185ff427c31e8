"""Requests and KV caches moving to or from a replica, and the blocks they occupy meanwhile.

The target reserves blocks before anything is copied. At the source, a request that leaves its batch keeps its blocks
until the copy ends. Both can happen at any time and take effect at the next boundary.
"""

from __future__ import annotations

from typing import Any

from headway.control.live import PAUSED, Live
from headway.core.record import Cause
from headway.sim.batch import Batch
from headway.sim.placed import PlacedRequests
from headway.sim.timeline import Timeline


class InTransit:
    """The KV caches in transit of one replica."""

    __slots__ = ("_timeline", "batch", "expected", "leaving", "num_arriving", "pausing", "placed", "reserved_blocks")

    def __init__(self, batch: Batch, timeline: Timeline, placed: PlacedRequests) -> None:
        self.batch, self._timeline, self.placed = batch, timeline, placed
        self.clear()

    def clear(self) -> None:
        self.num_arriving = 0
        """Number of requests moving here, except those in `expected`."""
        self.expected: dict[int, Live] = {}
        """Requests that count as waiting here although their KV is still at the prefill replica."""
        self.reserved_blocks = 0
        self.pausing: list[tuple[Live, Any]] = []
        """(request, move) for requests that leave the batch at the next boundary."""
        self.leaving: dict[int, Live] = {}
        """Requests out of the batch whose KV is being copied."""

    # At the target.

    def reserve(self, blocks: int, now: float) -> bool:
        """Reserve blocks if enough are free besides those needed by the running iteration."""
        batch, timeline = self.batch, self._timeline
        timeline.catch_up(now)
        if not batch.kv.can_tick(batch.tick, blocks + batch.kv.watermark):
            return False
        self.pin(blocks)
        timeline.wake_by(now)
        return True

    def pin(self, blocks: int) -> None:
        """Reserve blocks that are known to be free."""
        self.batch.kv.pinned += blocks
        self.reserved_blocks += blocks
        self._timeline.note_change()

    def unreserve(self, blocks: int, now: float) -> None:
        batch = self.batch
        self._timeline.catch_up(now)
        if batch.prefixes is not None:
            batch.prefixes.free(blocks, batch.tick)
        batch.kv.pinned -= blocks
        self.reserved_blocks -= blocks
        self._timeline.note_change()
        self._timeline.wake_by(now)

    def expect(self, live: Live) -> None:
        """Count a request as waiting instead of arriving, because it is sent before its KV."""
        self.num_arriving -= 1
        self.batch.num_waiting += 1
        self.expected[live.id] = live
        self.placed.count(live)

    def unexpect(self, live: Live) -> None:
        """Count an expected request as arriving again: its KV is here, or will not come."""
        self.placed.uncount(live)
        del self.expected[live.id]
        self.batch.num_waiting -= 1
        self.num_arriving += 1

    def hold(self, live: Live, blocks: int, now: float) -> None:
        """Let an arrived request hold these reserved blocks, which contain its `swapped_tokens` of KV."""
        self.reserved_blocks -= blocks
        self.batch.hold_blocks(live, blocks)
        self._timeline.wake_by(now)

    # At the source.

    def kv_tokens(self, live: Live, now: float) -> int:
        """KV tokens of a decoding request, after the last complete iteration."""
        ahead = self._timeline.ticks_ahead(now)
        return live.computed_tokens + self.batch.tick + ahead - live.joined_tick

    def pause(self, live: Live, now: float) -> None:
        """Take a decoding request out of the batch at the next boundary, then call `paused` of its move."""
        timeline = self._timeline
        timeline.catch_up(now)
        if timeline.k == timeline.k_end:
            self._pause(live, now)
        else:
            self.pausing.append((live, live.move))
        timeline.wake_by(now)

    def pause_all(self, now: float) -> None:
        """Take the requests of `pausing` out of the batch, unless their move was abandoned. A request may have begun
        another move since, which is still copying."""
        pausing, self.pausing = self.pausing, []
        for live, move in pausing:
            if live.move is move and self.batch.decoding.get(live.id) is live:
                self._pause(live, now)

    def _pause(self, live: Live, now: float) -> None:
        batch = self.batch
        batch.stop_decode(live, keeps_blocks=True)
        batch.write_segment(live, now, Cause.MOVED)
        self.add_leaving(live)
        if batch.stalls is not None:
            batch.stalls.update(live)
        live.move.paused(now)

    def add_leaving(self, live: Live) -> None:
        """Record that the KV of a request outside batch and queue is being copied."""
        live.stage = PAUSED
        self.leaving[live.id] = live
        self._timeline.note_change()

    def unqueue(self, live: Live) -> None:
        """Delete a request's queue entry, so that the request can be queued again."""
        self.batch.queue.delete(live)
        self._timeline.note_change()

    def send_waiting(self, live: Live, now: float) -> None:
        """Take a waiting request out of the queue, to copy its KV from host memory."""
        self.unqueue(live)
        self.batch.num_waiting -= 1
        self.add_leaving(live)
        self._timeline.wake_by(now)

    def release(self, live: Live, now: float) -> None:
        """Release a paused request and its KV."""
        batch = self.batch
        self._timeline.catch_up(now)
        del self.leaving[live.id]
        if live.swapped_tokens:
            batch.host.drop(live)
        else:
            own = live.computed_tokens - live.shared_blocks * batch.kv.block
            if batch.prefixes is not None:
                batch.prefixes.release(live, batch.kv.blocks(own), batch.tick, live.computed_tokens)
            batch.kv.pinned -= batch.kv.blocks(own)
            live.shared_blocks = 0
        self.placed.uncount(live)
        self._timeline.wake_by(now)

    def keep(self, live: Live, now: float) -> None:
        """Keep a paused request's KV because the request stays. It must be enqueued again."""
        del self.leaving[live.id]
        if not live.swapped_tokens:
            batch = self.batch
            own = live.computed_tokens - live.shared_blocks * batch.kv.block
            live.swapped_tokens = live.computed_tokens
            batch.hold_blocks(live, batch.kv.blocks(own))
            self._timeline.wake_by(now)
        self.placed.uncount(live)
