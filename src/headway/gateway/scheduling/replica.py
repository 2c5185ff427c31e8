"""A live replica as policies see it. The gateway's own counts are exact; the engine's counts are as last scraped."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from math import inf

from headway.control.cache_index import CacheIndex, RanksIndex
from headway.control.live import Live
from headway.control.paused import PausedRequests
from headway.control.recent_adapters import RecentAdapters
from headway.core.fleet import Network, Pool, Role
from headway.core.pacer import Pacer
from headway.core.policy import Ordering, QueuedOrdering
from headway.core.record import ReplicaRecord
from headway.core.view import EngineTimes, RequestView
from headway.gateway.clock import Clock
from headway.gateway.upstream.dialects import Adapter, Load
from headway.gateway.upstream.engine import EngineEndpoint
from headway.gateway.upstream.errors import EngineError
from headway.perf.copies import kv_transfer_s
from headway.sim.lifetime import Lifetime
from headway.sim.replica_resources import host_memory

log = logging.getLogger(__name__)


def _ignore() -> None:
    """Does nothing: for events without a listener."""


_EXPECTED_ONE_IN, _MOST_EXPECTED = 8, 4096
"""(one in this many requests is compared with the cache index if routers do not query it, maximum number of stored
expectations)."""


class ReplicaReservation:
    """A request's share of a replica's counts: created before anything is sent, and freed once on every path.

    Implements `in_flight.Reservation`.
    """

    __slots__ = ("_replica", "expected_cached", "live", "on_slot", "prompt_left", "queue", "slot", "waits_for_slot")

    def __init__(self, replica: LiveReplica, live: Live) -> None:
        self._replica: LiveReplica | None = replica
        self.live = live
        self.prompt_left = live.prompt_tokens
        self.expected_cached = 0
        """Prompt tokens that the router expected in the prefix cache; 0 once the prompt is computed."""
        self.queue = 0
        self.slot: int | None = None
        self.waits_for_slot = False
        self.on_slot: Callable[[], None] = _ignore

    def count_tokens(self, tokens: int) -> None:
        """Add generated tokens, and update the queue. The first call, even with 0, marks the prompt as computed."""
        replica = self._replica
        if replica is not None:
            replica.tokens_generated += tokens
            prompt_left, self.prompt_left = self.prompt_left, 0
            replica.prefill_tokens_left -= prompt_left
            if self.expected_cached:
                replica.forget_expected(self)
            if len(replica.queue_lengths) > 1:
                replica.requeue(self)
            if prompt_left and replica.on_prompt is not None and self.live.is_streamed:
                replica.on_prompt(self.live)

    def free(self) -> None:
        """Take the request out of the replica's counts: it has ended, moved, been paused, or failed there. Later calls
        do nothing."""
        replica, live, self._replica = self._replica, self.live, None
        if replica is None:
            return
        del replica.reservations[live.id]
        replica.num_in_flight -= 1
        replica.num_by_tier[live.tier] -= 1
        replica.queue_lengths[self.queue] -= 1
        replica.prefill_tokens_left -= self.prompt_left
        if self.expected_cached:
            replica.forget_expected(self)
        replica.tokens_generated -= live.generated_tokens
        if replica.slots is not None:
            replica.slots.leave(self)


class Slots:
    """The slots of one llama.cpp server. One request runs in each slot, and further requests wait in order of
    arrival."""

    def __init__(self) -> None:
        self._num = 0
        self._free: list[int] = []
        """Free slots, longest free first."""
        self._last_prefixes: dict[int, frozenset[int]] = {}
        """Segments of each slot's last prompt. The server still holds the prompt's KV cache."""
        self._waiting: deque[ReplicaReservation] = deque()

    def resize(self, num: int) -> None:
        self._free = [free for free in self._free if free < num] + list(range(self._num, num))
        self._num = num
        self._assign()

    def enter(self, reservation: ReplicaReservation) -> None:
        """Assign a slot now, or as soon as one is free."""
        reservation.waits_for_slot = True
        self._waiting.append(reservation)
        self._assign()

    def leave(self, reservation: ReplicaReservation) -> None:
        if reservation.waits_for_slot:
            self._waiting.remove(reservation)
        elif reservation.slot is not None and reservation.slot < self._num:
            self._free.append(reservation.slot)
        self._assign()

    def _assign(self) -> None:
        """Assign free slots in order of arrival: to each request the slot that caches most of its prompt."""
        while self._free and self._waiting:
            reservation = self._waiting.popleft()
            prefix = frozenset(segment.id for segment in reservation.live.prefix)
            slot = max(self._free, key=lambda free: len(prefix & self._last_prefixes.get(free, frozenset())))
            self._free.remove(slot)
            self._last_prefixes[slot] = prefix
            reservation.slot, reservation.waits_for_slot = slot, False
            reservation.on_slot()


class LiveReplica(EngineEndpoint):
    """One engine and its load. Implements `core.view.ReplicaView`."""

    # Lifecycle.
    is_of_combo = False
    is_draining = False
    is_removed = False
    is_unready = False
    """Whether the cluster reports the replica as not ready."""
    is_starting = False
    """Whether the gateway has started the replica, and the replica has never been up."""
    is_initial = True
    """Whether the replica belongs to the initial fleet, or was not started by the gateway."""
    has_served = False
    """Whether the replica has been up."""

    # Load.
    num_in_flight = 0
    prefill_tokens_left = 0
    tokens_generated = 0
    expected_cached_tokens = 0
    goodput_rps: float | None = None
    times: EngineTimes | None = None
    slots: Slots | None = None
    """The slots that the gateway assigns; None if the engine assigns its own."""
    _load = Load()
    seen_s = -inf
    """Time at which the engine's load was last read."""
    num_slots: int | None = None
    """Requests that the engine runs at a time, if it reports the number (llama.cpp)."""
    on_prompt: Callable[[Live], None] | None = None
    """Called when the prompt of a streamed request is computed. For an unstreamed request, its end shows the computed
    prompt."""
    on_placed: Callable[[LiveReplica, Live], None] | None = None
    """Called when a request is placed here, if other gateways must know."""
    on_adapters: Callable[[], None] | None = None
    """Called when the engine's list of LoRA adapters has changed."""
    _other_ordering: str | None = None
    """The ordering that the engine last reported, if it is not the wanted ordering."""
    _matched_request = -1
    """Id of the last request whose prefix a router matched. Its cached and loadable tokens follow."""
    _matched_cached = 0
    _matched_loadable = 0

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
        api_key: str = "",
        engine_model: str = "",
        engine_ordering: str = "",
    ) -> None:
        """`engine_ordering`: the ordering that the engine must run, with its arguments; empty if none is required."""
        context_tokens, is_hosted = pool.model.max_context_tokens, pool.hosted is not None
        super().__init__(
            id, pool.name, pool.model.name, url, adapter, context_tokens, api_key=api_key, is_hosted=is_hosted
        )
        self.most_concurrent = None if pool.hosted is None else pool.hosted.max_concurrent
        """Maximum number of requests at a time; None: limited only by the policies' window."""
        self.reported_model = engine_model or None
        self._pool = pool
        self.gpu, self.region = pool.gpu.name, pool.region
        self.max_num_seqs = pool.engine.max_num_seqs
        self.block_size_tokens = pool.engine.block_size_tokens
        self.kv_blocks_total = kv_blocks
        self.role: Role = pool.role
        self.combo, self.deployment = id, pool.name
        """Number of the replica's combo instance, and the name of its pool or combo."""
        self.latency_of: Callable[[str, str], float] = Network().latency_s
        """Seconds between two regions, each way."""
        self.lifetime = Lifetime(self.role, clock.now)
        self._queued = ordering if isinstance(ordering, QueuedOrdering) else None
        self._pacer, self._clock, self._stale_s = pacer, clock, stale_s
        self.reservations: dict[int, ReplicaReservation] = {}
        """Of the requests that are placed here, by request."""
        self._paused = PausedRequests(id)
        self.num_by_tier: dict[int, int] = {}
        self.queue_lengths = [0] * (1 if self._queued is None else self._queued.num_queues)
        self._expected: dict[int, tuple[int, list[int]]] = {}
        """Maps each request to (its prompt tokens, the tokens that are in the cache according to events)."""
        self._declared_adapters = frozenset(pool.lora_names)
        self._known_adapters = self.adapters
        self.recent_loras = RecentAdapters(0 if pool.lora is None else pool.lora.max_loras)
        self.cache_index = CacheIndex(self.block_size_tokens, kv_blocks, guesses=True, adds_placed=True)
        """The contents of the engine's prefix cache. Until events feed it, a guess from the requests placed here."""
        self.engine_ordering = engine_ordering

    async def read_details(self, timeout_s: float) -> None:
        """Read the names of model and adapters and, if the replica has them, its bootstrap port and number of slots."""
        await super().read_details(timeout_s)
        if self.adapters != self._known_adapters:
            self._known_adapters = self.adapters
            if self.on_adapters is not None:
                self.on_adapters()
        if self.is_single_phase:
            await self.read_bootstrap_port(self.role, timeout_s)
        if self.slots is not None:
            self.num_slots = await self.read_num_slots(timeout_s)
            self.slots.resize(self.num_slots)
        elif self.adapter.has_slots:
            with suppress(EngineError):
                self.num_slots = await self.read_num_slots(timeout_s)

    async def read_load(self, timeout_s: float) -> Load | None:
        """Read the load. Raises EngineError if the load cannot be read, or if an engine that has never been up runs an
        ordering other than the required one. An engine whose ordering changes later continues to serve.
        """
        load = await super().read_load(timeout_s)
        if not self.engine_ordering:
            return load
        ordering = "an order of its own" if load is None or load.ordering is None else load.ordering
        text = f"runs {ordering}, not the ordering {self.engine_ordering}"
        if ordering not in (self.engine_ordering, self._other_ordering):
            log.warning("%s at %s %s", self.name, self.url, text)
        self._other_ordering = ordering
        if ordering != self.engine_ordering and not self.has_served:
            raise EngineError(f"{text}; expected vLLM with --scheduler-cls headway.vllm.Scheduler and this ordering")
        return load

    @property
    def max_request_tokens(self) -> int:
        """Prompt and output tokens of the longest possible request."""
        return min(self.kv_blocks_total * self.block_size_tokens + 1, self.max_context_tokens)

    def record(self, pool: Pool, now: float) -> ReplicaRecord:
        num_gpus, lifetime, is_hosted = pool.num_gpus, self.lifetime, pool.hosted is not None
        return ReplicaRecord(
            id=self.id,
            pool=self.pool,
            model=self.model,
            gpu=self.gpu,
            region=self.region,
            num_gpus=num_gpus,
            usd_per_hour=pool.usd_per_hour,
            watts=pool.gpu.watts * num_gpus,
            kv_capacity_tokens=0 if is_hosted else self.kv_blocks_total * self.block_size_tokens,
            max_num_seqs=self.max_num_seqs,
            up=lifetime.up(now),
            down=lifetime.down(now),
            origin="initial" if self.is_initial else "new",
            for_prefill=lifetime.with_role("prefill", now),
            for_decode=lifetime.with_role("decode", now),
            usd_per_million_input_tokens=pool.usd_per_million_input_tokens if is_hosted else 0.0,
            usd_per_million_output_tokens=pool.usd_per_million_output_tokens if is_hosted else 0.0,
            usd_per_million_cached_tokens=pool.usd_per_million_cached_tokens if is_hosted else None,
            name=self.name,
        )

    # The gateway's own counts.

    def reserve(self, live: Live) -> ReplicaReservation:
        """Count a request that is placed here."""
        reservation = ReplicaReservation(self, live)
        self.reservations[live.id] = reservation
        self.num_in_flight += 1
        self.num_by_tier[live.tier] = self.num_by_tier.get(live.tier, 0) + 1
        if self._queued is not None:
            reservation.queue = self._queued.queue(live)
        self.queue_lengths[reservation.queue] += 1
        self.prefill_tokens_left += reservation.prompt_left
        self.tokens_generated += live.generated_tokens
        if live.lora:
            self.recent_loras.note(live.lora)
        if self._matched_request == live.id:
            reservation.expected_cached = self._matched_cached + self._matched_loadable
            self.expected_cached_tokens += reservation.expected_cached
        if self.event_block_tokens and not self.cache_index.guesses:
            self._expect_cached(live)
        if self._pool.engine.prefix_caching:
            self.cache_index.placed(live)
            if self.on_placed is not None:
                self.on_placed(self, live)
        if self.slots is not None:
            self.slots.enter(reservation)
        return reservation

    def requeue(self, reservation: ReplicaReservation) -> None:
        """Move the request to the ordering's queue to which the request now belongs."""
        if self._queued is not None and (queue := self._queued.queue(reservation.live)) != reservation.queue:
            self.queue_lengths[reservation.queue] -= 1
            self.queue_lengths[queue] += 1
            reservation.queue = queue

    @property
    def requests(self) -> Sequence[Live]:
        return [reservation.live for reservation in self.reservations.values()]

    def pause(self, live: Live) -> None:
        """Record that a request has left to be held."""
        self._paused.add(live)

    @property
    def paused(self) -> Sequence[Live]:
        return self._paused.held() if self._paused else ()

    @property
    def answers_on_pace(self) -> bool:
        """Whether every reader of an answer still has tokens to read."""
        now, pacer = self._clock.now, self._pacer
        for reservation in self.reservations.values():
            live = reservation.live
            start_s = pacer.start_s(live.reasoning_end_s, live.answer_s)
            if start_s is not None and pacer.run_dry_s(start_s, live.answer_tokens) < now:
                return False
        return not self._paused or self._paused.are_on_pace(pacer, now)

    # The prefix cache.

    @property
    def caches_prefixes(self) -> bool:
        """Whether the engine has a prefix cache, by the pool's profile."""
        return self._pool.engine.prefix_caching

    def cached_tokens(self, request: RequestView, /) -> int:
        tokens = self.cache_index.cached_tokens(request)
        self._matched_request, self._matched_cached, self._matched_loadable = request.id, tokens, 0
        return tokens

    def loadable_tokens(self, request: RequestView, /) -> int:
        tokens = self.cache_index.loadable_tokens(request)
        if self._matched_request == request.id:
            self._matched_loadable = tokens
        return tokens

    def _expect_cached(self, live: Live) -> None:
        """Store the cached tokens expected by the engine's events, for a prompt named by its tokens."""
        prompt_tokens, index = live.prompt_tokens, self.cache_index
        is_sampled = self._matched_request == live.id or live.id % _EXPECTED_ONE_IN == 0
        if live.generated_tokens or len(live.prefix) != prompt_tokens // self.event_block_tokens or not is_sampled:
            return
        ranks = [index.cached_tokens(live)]
        if isinstance(index, RanksIndex):
            ranks = index.rank_cached_tokens(live)
        loadable = index.loadable_tokens(live)
        self._expected[live.id] = prompt_tokens, [tokens + loadable for tokens in ranks]
        if len(self._expected) > _MOST_EXPECTED:
            del self._expected[next(iter(self._expected))]

    def take_expected(self, live: Live) -> list[int]:
        """The expected cached tokens of a request's prompt, at each data-parallel rank; empty if nothing is expected,
        or the engine counts a different number of prompt tokens."""
        prompt_tokens, ranks = self._expected.pop(live.id, (0, []))
        return ranks if prompt_tokens == live.prompt_tokens else []

    def forget_expected(self, reservation: ReplicaReservation) -> None:
        """Forget the expected cache hit of a request. Called when its prompt is computed, or when it leaves."""
        self.expected_cached_tokens -= reservation.expected_cached
        reservation.expected_cached = 0

    def kv_transfer_s(self, num_tokens: int, /) -> float:
        return kv_transfer_s(self._pool, num_tokens)

    def latency_s(self, region: str, /) -> float:
        return self.latency_of(region, self.region)

    # LoRA adapters.

    @property
    def adapters(self) -> frozenset[str]:
        """The adapters that requests for this replica may name: the adapters that the engine lists, or the declared
        adapters if the engine lists none."""
        listed = self.listed_loras
        if listed is None:
            return self._declared_adapters
        return listed if self.adapter.lists_adapters else self._declared_adapters | listed

    @property
    def max_loras(self) -> int:
        return self.recent_loras.num_slots

    @property
    def loras(self) -> Collection[str]:
        return {*self.recent_loras.names, *self.load.loras}

    @property
    def loras_running(self) -> Collection[str]:
        """Adapters of running requests, as scraped."""
        return self.load.loras

    @property
    def loras_waiting(self) -> Collection[str]:
        return self.load.loras_waiting

    # The engine's own counts, which include requests of other clients.

    def update_load(self, load: Load) -> None:
        self._load, self.seen_s = load, self._clock.now
        if load.max_loras is not None and load.max_loras != self.recent_loras.num_slots:
            self.recent_loras.resize(load.max_loras)

    @property
    def load(self) -> Load:
        """The engine's load as last scraped. If the scrape is older than `stale_s`, all values are unknown."""
        return self._load if self._clock.now - self.seen_s <= self._stale_s else Load()

    @property
    def is_saturated(self) -> bool:
        """Whether requests wait at the engine, or may wait. Without metrics of the engine: whether it has more than one
        request."""
        waiting = self.load.waiting
        return len(self.reservations) > 1 if waiting is None else waiting > 0

    @property
    def num_running(self) -> int:
        """Number of running requests, as scraped. If unknown: the gateway's requests, at most the engine's limit."""
        running = self._load.running
        if running is None or self._clock.now - self.seen_s > self._stale_s:
            return min(len(self.reservations), self.max_num_seqs)
        return running

    @property
    def num_waiting(self) -> int:
        """Number of waiting requests, as scraped. If unknown: the gateway's requests beyond the engine's limit."""
        waiting = self._load.waiting
        if waiting is None or self._clock.now - self.seen_s > self._stale_s:
            return max(len(self.reservations) - self.max_num_seqs, 0)
        return waiting

    @property
    def kv_blocks_used(self) -> int:
        """KV blocks in use, as scraped. If unknown: the blocks that the gateway's requests need."""
        share = self.load.kv_share
        if share is not None:
            return round(share * self.kv_blocks_total)
        block, used = self.block_size_tokens, 0
        for reservation in self.reservations.values():
            live = reservation.live
            used += -(-(live.prompt_tokens + live.generated_tokens) // block)
        return min(used, self.kv_blocks_total)

    @property
    def kv_blocks_host(self) -> int:
        """KV blocks in host memory, from the scraped share of the pool engine's host memory; 0 for an engine that does
        not swap."""
        share = self.load.host_share
        if share is None or self._pool.engine.preemption != "swap":
            return 0
        return round(share * host_memory(self._pool).capacity_tokens) // self.block_size_tokens

    @property
    def head_demand_blocks(self) -> int:
        """Blocks of the first request that waits at the engine, as scraped.

        If unknown: blocks of the first request that waits by the gateway's count. Of the requests without a token, the
        last `num_waiting` are taken to wait.
        """
        head_share = self.load.head_share
        if head_share is not None:
            return round(head_share * self.kv_blocks_total)
        num_waiting = self.num_waiting
        if not num_waiting:
            return 0
        unstarted = [each.live for each in self.reservations.values() if each.prompt_left]
        if not unstarted:
            return 0
        first = unstarted[-min(num_waiting, len(unstarted))]
        return -(-(first.prompt_tokens + first.generated_tokens) // self.block_size_tokens)
