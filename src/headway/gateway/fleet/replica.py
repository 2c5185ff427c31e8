"""A live replica as policies see it: the gateway's own counts are exact, the engine's are as last scraped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headway.control.live import Live
from headway.core.fleet import Pool, Role
from headway.core.pacer import Pacer
from headway.core.policy import Ordering, QueuedOrdering
from headway.gateway.clock import Clock
from headway.gateway.upstream.client import Client
from headway.gateway.upstream.dialects import Adapter, Load

if TYPE_CHECKING:
    from headway.gateway.upstream.kv_snapshot import Slots


class Reservation:
    """One request's place in a replica's counts: taken before anything is sent, given up once, on every path."""

    __slots__ = ("_replica", "called", "live", "prompt_left", "queue", "slot", "waits")

    def __init__(self, replica: LiveReplica, live: Live) -> None:
        self._replica: LiveReplica | None = replica
        self.live = live
        self.prompt_left = live.prompt_tokens
        self.queue = 0
        self.slot: int | None = None
        self.waits = False
        """For a slot; then it is `called`."""
        self.called: Callable[[], None] = lambda: None

    def produced(self, tokens: int) -> None:
        """Tokens have come; the prompt is computed by then."""
        replica = self._replica
        if replica is not None:
            replica.tokens_generated += tokens
            replica.prefill_tokens_left -= self.prompt_left
            self.prompt_left = 0

    def requeue(self) -> None:
        """Its phase or its tokens may have put it into another queue of the ordering."""
        if self._replica is not None:
            self._replica.requeue(self)

    def give_up(self) -> None:
        """The stream is closed. A second call does nothing."""
        replica, self._replica = self._replica, None
        if replica is not None:
            replica.leaves(self)


class Engine:
    """Where a replica is, and how it is spoken to."""

    def __init__(self, id: int, pool: str, model: str, url: str, adapter: Adapter, max_context_tokens: int) -> None:
        self.id, self.pool, self.model = id, pool, model
        self.url, self.adapter = url, adapter
        self.client = Client(url)
        self.max_context_tokens = max_context_tokens
        self.num_arriving = 0
        self.served: str | None = None
        """What the engine itself calls the model."""
        self.kv_folder: Path | None = None
        """Through which it hands over KV caches."""
        self.bootstrap_port = 0
        """Where it is asked for KV caches, of one that computes prompts at the same time as another waits for them."""

    @property
    def name(self) -> str:
        """As logs and headers call it."""
        return f"{self.pool}/{self.id}"


class LiveReplica(Engine):
    """One engine, and what is known of its load. Satisfies `core.view.ReplicaView`."""

    def __init__(
        self,
        id: int,
        pool: Pool,
        url: str,
        adapter: Adapter,
        kv_blocks: int,
        ordering: Ordering,
        pacer: Pacer,
        clock: Clock,
        stale_s: float,
    ) -> None:
        super().__init__(id, pool.name, pool.model.name, url, adapter, pool.model.max_context_tokens)
        self.gpu, self.region = pool.gpu.name, pool.region
        self.max_num_seqs = pool.engine.max_num_seqs
        self.block_size_tokens = pool.engine.block_size_tokens
        self.kv_blocks_total = kv_blocks
        self.role: Role = pool.role
        self.combo, self.deployment = id, pool.name
        """What it comes and goes with, and the name of that."""
        self.is_of_combo = False
        self.is_half = False
        """Its engine was started for one phase, and is sent a request at the same time as one for the other."""
        self.goodput_rps: float | None = None
        self.kv_blocks_host = self.head_demand_blocks = 0
        self.is_draining = False
        self._queued = ordering if isinstance(ordering, QueuedOrdering) else None
        self._pacer, self._clock, self._stale_s = pacer, clock, stale_s
        self._seats: dict[int, Reservation] = {}
        self.slots: Slots | None = None
        """Where its requests' KV caches are, if they move with them."""
        self.num_by_tier: dict[int, int] = {}
        self.queue_lengths = [0] * (1 if self._queued is None else self._queued.num_queues)
        self.prefill_tokens_left = self.tokens_generated = 0
        self._load = Load()
        self.seen_s = float("-inf")
        """When its metrics were read."""

    # The gateway's own counts.

    def take(self, live: Live) -> Reservation:
        """Count a request as being here."""
        seat = Reservation(self, live)
        self._seats[live.id] = seat
        self.num_by_tier[live.tier] = self.num_by_tier.get(live.tier, 0) + 1
        if self._queued is not None:
            seat.queue = self._queued.queue(live)
        self.queue_lengths[seat.queue] += 1
        self.prefill_tokens_left += seat.prompt_left
        self.tokens_generated += live.generated_tokens
        if self.slots is not None:
            self.slots.enter(seat)
        return seat

    def leaves(self, seat: Reservation) -> None:
        """It no longer is."""
        live = seat.live
        del self._seats[live.id]
        self.num_by_tier[live.tier] -= 1
        self.queue_lengths[seat.queue] -= 1
        self.prefill_tokens_left -= seat.prompt_left
        self.tokens_generated -= live.generated_tokens
        if self.slots is not None:
            self.slots.leave(seat)

    def requeue(self, seat: Reservation) -> None:
        """Count it in the queue that it is in now."""
        if self._queued is not None and (queue := self._queued.queue(seat.live)) != seat.queue:
            self.queue_lengths[seat.queue] -= 1
            self.queue_lengths[queue] += 1
            seat.queue = queue

    @property
    def num_in_flight(self) -> int:
        """Requests placed here and not yet ended."""
        return len(self._seats)

    @property
    def requests(self) -> Sequence[Live]:
        """Who is placed here."""
        return [seat.live for seat in self._seats.values()]

    @property
    def answers_on_pace(self) -> bool:
        """Every reader of an answer still has tokens to read."""
        now, pacer = self._clock.now, self._pacer
        for seat in self._seats.values():
            live = seat.live
            start_s = pacer.start_s(live.reasoning_end_s, live.answer_s)
            if start_s is not None and pacer.run_dry_s(start_s, live.answer_tokens) < now:
                return False
        return True

    # The engine's, which is also told of by others' requests.

    def scraped(self, load: Load) -> None:
        """The engine has said how it is."""
        self._load, self.seen_s = load, self._clock.now

    @property
    def load(self) -> Load:
        """What is known of it; nothing, when that is too old."""
        return self._load if self._clock.now - self.seen_s <= self._stale_s else Load()

    @property
    def num_running(self) -> int:
        """As scraped; unknown: as many of ours as fit."""
        running = self.load.running
        return min(len(self._seats), self.max_num_seqs) if running is None else running

    @property
    def num_waiting(self) -> int:
        """As scraped; unknown: those of ours that cannot run yet."""
        waiting = self.load.waiting
        return max(len(self._seats) - self.max_num_seqs, 0) if waiting is None else waiting

    @property
    def kv_blocks_used(self) -> int:
        """As scraped; unknown: what our requests must have taken."""
        share = self.load.kv_share
        if share is not None:
            return round(share * self.kv_blocks_total)
        block = self.block_size_tokens
        used = sum(-(-(s.live.prompt_tokens + s.live.generated_tokens) // block) for s in self._seats.values())
        return min(used, self.kv_blocks_total)
