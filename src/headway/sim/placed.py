"""The requests placed at a replica, counted for policies from placement until end or move."""

from __future__ import annotations

from headway.control.cache_index import CacheIndex
from headway.control.changes import Changes
from headway.control.live import Live
from headway.control.paused import PausedRequests
from headway.control.recent_adapters import RecentAdapters
from headway.sim.batch import Batch


class PlacedRequests:
    """The counts of one replica."""

    __slots__ = (
        "_batch",
        "_changes",
        "_queued_ordering",
        "cache_index",
        "num_by_tier",
        "num_in_flight",
        "num_received",
        "output_tokens",
        "paused",
        "queue_lengths",
        "recent_loras",
    )

    def __init__(self, batch: Batch, changes: Changes) -> None:
        self._batch, self._changes = batch, changes
        self._queued_ordering = batch.queue.queued_ordering
        self.recent_loras = RecentAdapters(0 if batch.adapters is None else batch.adapters.num_slots)
        self.cache_index: CacheIndex | None = None
        """The policies' model of the prefix cache; None = they see the cache itself."""
        self.clear()

    def clear(self) -> None:
        """Forget all requests; keep `recent_loras` and the cache index."""
        self.num_in_flight = self.output_tokens = self.num_received = 0
        self.num_by_tier: dict[int, int] = {}
        ordering = self._queued_ordering
        self.queue_lengths: list[int] = [] if ordering is None else [0] * ordering.num_queues
        """Number of requests in each queue of the ordering; empty without an ordering."""
        self.paused = PausedRequests(self._batch.replica)
        """Requests paused here for others, and held until there is room."""

    def count(self, live: Live) -> None:
        """Count a request as placed here."""
        if self._changes.is_read:
            self._changes.ids.append(self._batch.replica)
        self.num_in_flight += 1
        self._batch.generated_offset += live.generated_tokens
        self.output_tokens += live.output_tokens
        self.num_by_tier[live.tier] = self.num_by_tier.get(live.tier, 0) + 1
        if live.lora:
            self.recent_loras.note(live.lora)
        if self.cache_index is not None:
            self.cache_index.placed(live)
        if self._queued_ordering is not None:
            live.queue = self._queued_ordering.queue(live)
            self.queue_lengths[live.queue] += 1

    def uncount(self, live: Live) -> None:
        """Stop counting a request as placed here. It has ended, moved, or been paused."""
        batch = self._batch
        if self._changes.is_read:
            self._changes.ids.append(batch.replica)
        self.num_in_flight -= 1
        batch.generated_offset -= live.generated_tokens
        self.output_tokens -= live.output_tokens
        self.num_by_tier[live.tier] -= 1
        if self._queued_ordering is not None:
            self.queue_lengths[live.queue] -= 1
        if batch.stalls is not None:
            batch.stalls.forget(live)

    def requeue(self, live: Live) -> None:
        """Move a request to another queue of the ordering if it belongs there; this begins a new quantum."""
        if self._queued_ordering is None:
            return
        queue = self._queued_ordering.queue(live)
        if queue != live.queue:
            if self._changes.is_read:
                self._changes.ids.append(self._batch.replica)
            self.queue_lengths[live.queue] -= 1
            self.queue_lengths[queue] += 1
            live.queue = queue
            live.turn = live.quantum_tick = self._batch.tick

    def crash(self) -> None:
        """Forget all requests, and the policies' knowledge of the replica's memory."""
        self.clear()
        self.recent_loras.clear()
        if self.cache_index is not None:
            self.cache_index.forget_placed()
            if self.cache_index.guesses:
                self.cache_index.clear()
