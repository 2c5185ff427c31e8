"""A live replica as policies see it: the gateway's own counts are exact, the engine's are as last scraped."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from headway.control.live import Live
from headway.core.fleet import Pool, Role
from headway.core.pacer import Pacer
from headway.core.policy import Ordering, QueuedOrdering
from headway.gateway.clock import Clock
from headway.gateway.upstream.dialects import Adapter, Load
from headway.gateway.upstream.engine import EngineEndpoint


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


class Slots:
    """The slots of one llama.cpp server: one request runs in each, and others wait in order of arrival."""

    def __init__(self) -> None:
        self._num = 0
        self._free: list[int] = []
        """The slot that has been free for longest comes first."""
        self._last_prefixes: dict[int, frozenset[int]] = {}
        """Segments of each slot's last prompt, whose KV cache the server still has."""
        self._waiting: deque[Reservation] = deque()

    def resize(self, num: int) -> None:
        """Set the number of slots."""
        self._free = [free for free in self._free if free < num] + list(range(self._num, num))
        self._num = num
        self._assign()

    def enter(self, seat: Reservation) -> None:
        """Assign a slot now, or as soon as one is free."""
        seat.waits = True
        self._waiting.append(seat)
        self._assign()

    def leave(self, seat: Reservation) -> None:
        """Free the request's slot, or remove it from those that wait."""
        if seat.waits:
            self._waiting.remove(seat)
        elif seat.slot is not None and seat.slot < self._num:
            self._free.append(seat.slot)
        self._assign()

    def _assign(self) -> None:
        """Assign free slots in order of arrival: to each request the slot that caches most of its prompt."""
        while self._free and self._waiting:
            seat = self._waiting.popleft()
            prefix = frozenset(segment.id for segment in seat.live.prefix)
            slot = max(self._free, key=lambda free: len(prefix & self._last_prefixes.get(free, frozenset())))
            self._free.remove(slot)
            self._last_prefixes[slot] = prefix
            seat.slot, seat.waits = slot, False
            seat.called()


class LiveReplica(EngineEndpoint):
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

    async def read_details(self, timeout_s: float) -> None:
        """Read the model's name and, if the replica has them, its bootstrap port and its number of slots."""
        await super().read_details(timeout_s)
        if self.is_single_phase:
            await self.read_bootstrap_port(self.role, timeout_s)
        if self.slots is not None:
            self.slots.resize(await self.read_num_slots(timeout_s))

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
