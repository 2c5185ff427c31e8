"""KV caches on their way to a replica or away from it, and the blocks that they take meanwhile.

At the target, blocks are reserved before anything is copied. At the source, a request that leaves its batch keeps its
blocks until the copy has ended. Both happen at any time; what they change takes effect at the next boundary.
"""

from __future__ import annotations

from typing import Any

from headway.control.live import PAUSED, Live
from headway.core.record import Cause
from headway.sim.batch import Batch
from headway.sim.timeline import Timeline


class InTransit:
    """The KV caches in transit of one replica."""

    __slots__ = ("_batch", "_timeline", "expected", "leaving", "num_arriving", "pausing", "reserved_blocks")

    def __init__(self, batch: Batch, timeline: Timeline) -> None:
        self._batch, self._timeline = batch, timeline
        self.clear()

    def clear(self) -> None:
        self.num_arriving = 0
        """Requests on their way here, without those in `expected`."""
        self.expected: dict[int, Live] = {}
        """Requests that count as waiting here while their KV is still at the prefill replica."""
        self.reserved_blocks = 0
        self.pausing: list[tuple[Live, Any]] = []
        """Requests that leave the batch at the next boundary, each with its move."""
        self.leaving: dict[int, Live] = {}
        """Requests out of the batch whose KV is being copied."""

    # At the target.

    def reserve(self, blocks: int, now: float) -> bool:
        """Reserve blocks if that many are free besides those that the running iteration takes."""
        batch, timeline = self._batch, self._timeline
        timeline.catch_up(now)
        if not batch.kv.can_tick(batch.tick, blocks + batch.kv.watermark):
            return False
        self.pin(blocks)
        timeline.wake_by(now)
        return True

    def pin(self, blocks: int) -> None:
        """Reserve blocks that are known to be free."""
        self._batch.kv.pinned += blocks
        self.reserved_blocks += blocks
        self._timeline.note_change()

    def unreserve(self, blocks: int, now: float) -> None:
        batch = self._batch
        self._timeline.catch_up(now)
        if batch.prefixes is not None:
            batch.prefixes.free(blocks, batch.tick)
        batch.kv.pinned -= blocks
        self.reserved_blocks -= blocks
        self._timeline.note_change()
        self._timeline.wake_by(now)

    # At the source.

    def kv_tokens(self, live: Live, now: float) -> int:
        """KV tokens of a decoding request, as of the last complete iteration."""
        ahead = self._timeline.ticks_ahead(now)
        return live.computed_tokens + self._batch.tick + ahead - live.joined_tick

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
        """Take the requests of `pausing` out of the batch, but those whose move was abandoned: another one may have
        begun since, and still copy."""
        pausing, self.pausing = self.pausing, []
        for live, move in pausing:
            if live.move is move and self._batch.decoding.get(live.id) is live:
                self._pause(live, now)

    def _pause(self, live: Live, now: float) -> None:
        batch = self._batch
        batch.stop_decode(live, keeps_blocks=True)
        batch.write_segment(live, now, Cause.MOVED)
        self.add_leaving(live)
        if batch.stalls is not None:
            batch.stalls.update(live)
        live.move.paused(now)

    def add_leaving(self, live: Live) -> None:
        """Note that the KV of a request out of the batch and the queue is being copied."""
        live.enter(PAUSED)
        self.leaving[live.id] = live
        self._timeline.note_change()
