"""A simulated replica as policies see it, after its last complete iteration.

Values that change within a stretch are computed when read, and hold until the next iteration ends (`holds_until_s`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import inf
from typing import cast

from headway.control.cache_index import Change, spans
from headway.control.live import Live
from headway.control.recent_adapters import RecentAdapters
from headway.core.fleet import Network
from headway.core.pacer import Pacer
from headway.core.replica_counts import UNKNOWN, Counted, Counts
from headway.core.view import EngineTimes, RequestView
from headway.sim.in_transit import InTransit
from headway.sim.kernel import Kernel
from headway.sim.replica_resources import PoolResources
from headway.sim.stall_tracker import StallTracker
from headway.sim.timeline import Timeline, boundary_s, completed


class SimulatedView(Counted):
    """Implements `core.view.OracleReplicaView`, `control.observe.ObservedReplica` and `EventSource`."""

    __slots__ = (
        "_batch", "_kernel", "_kv_transfer_s", "_latency_s", "_pacer", "_placed", "_timeline", "_transit",
        "block_size_tokens", "combo", "goodput_rps", "gpu", "holds_until_s", "id", "is_draining", "kv_blocks_total",
        "matched_cached", "matched_loadable", "matched_request", "max_loras", "max_num_seqs", "model", "pool",
        "recent_loras", "region", "role", "times",
    )  # fmt: skip

    def __init__(
        self,
        resources: PoolResources,
        kernel: Kernel,
        timeline: Timeline,
        transit: InTransit,
        pacer: Pacer,
        network: Network,
        combo: int,
        goodput_rps: float | None,
    ) -> None:
        batch, placed = transit.batch, transit.placed
        self._batch, self._timeline, self._transit, self._placed = batch, timeline, transit, placed
        self._kernel, self._pacer = kernel, pacer
        self.id = batch.replica
        self.pool, self.model, self.gpu = resources.name, resources.model_name, resources.gpu
        self.region, self.role = resources.region, resources.role
        self.is_draining = False
        self.combo, self.goodput_rps = combo, goodput_rps
        self.times: EngineTimes | None = resources.times
        self.max_num_seqs, self.kv_blocks_total = batch.max_num_seqs, batch.kv_blocks_total
        self.block_size_tokens = batch.kv.block
        self.recent_loras: RecentAdapters = placed.recent_loras
        self.max_loras = self.recent_loras.num_slots
        self._kv_transfer_s: Callable[[int], float] = resources.kv_transfer_s
        self._latency_s = network.latency_s
        self.holds_until_s = -inf
        """Earliest time at which a value read since the last reset (to infinity) changes, if nothing else happens. Not
        computed unless it was reset."""
        self.matched_request = -1
        """Id of the request whose prefix was matched last."""
        self.matched_cached = self.matched_loadable = 0
        """Cached and loadable tokens of the request `matched_request`."""

    def count_into(self, counts: Counts) -> None:
        batch, growth_tokens = self._batch, 0
        counts.id, counts.role, counts.times = self.id, self.role, self.times
        counts.max_num_seqs, counts.block_size_tokens = self.max_num_seqs, self.block_size_tokens
        counts.kv_blocks_total, counts.num_in_flight = self.kv_blocks_total, self._placed.num_in_flight
        counts.num_running = len(batch.decoding) + len(batch.prefilling)
        counts.prefill_tokens_left = batch.prefill_tokens_left
        counts.expected_cached_tokens = batch.expected_cached_tokens
        if batch.decoding:
            ahead, timeline = self._ticks_ahead(), self._timeline
            tick, num = ahead + batch.tick, len(batch.decoding)
            counts.kv_blocks_used = batch.kv.used(tick)
            counts.tokens_generated = batch.generated_offset + num * tick
            if batch.speculation is None:  # the next decision is noted (`EngineScheduler.schedule`)
                growth_tokens = num * (timeline.k_end - timeline.k - ahead + self.block_size_tokens)
            else:
                growth_tokens = UNKNOWN
        else:
            counts.kv_blocks_used, counts.tokens_generated = batch.kv.pinned, batch.generated_offset
        counts.growth_tokens = growth_tokens

    @property
    def num_in_flight(self) -> int:
        return self._placed.num_in_flight

    @property
    def num_by_tier(self) -> Mapping[int, int]:
        return self._placed.num_by_tier

    @property
    def num_waiting(self) -> int:
        return self._batch.num_waiting

    @property
    def num_arriving(self) -> int:
        return self._transit.num_arriving

    @property
    def prefill_tokens_left(self) -> int:
        return self._batch.prefill_tokens_left

    @property
    def num_running(self) -> int:
        batch = self._batch
        return len(batch.decoding) + len(batch.prefilling)

    @property
    def queue_lengths(self) -> Sequence[int]:
        return self._placed.queue_lengths or (self._placed.num_in_flight,)

    @property
    def loras(self) -> Collection[str]:
        return {*self._placed.recent_loras.names, *self.loras_running}

    @property
    def loras_running(self) -> Collection[str]:
        """LoRA adapters of the requests in prefill or decode."""
        batch = self._batch
        return {live.lora for part in (batch.prefilling, batch.decoding) for live in part.values() if live.lora}

    @property
    def loras_waiting(self) -> Collection[str]:
        return {live.lora for live in self._batch.queue.requests() if live.lora}

    def cached_tokens(self, request: RequestView, /) -> int:
        index, prefixes = self._placed.cache_index, self._batch.prefixes
        tokens = 0
        if index is not None:
            tokens = index.cached_tokens(request)
        elif prefixes is not None and request.prefix:
            tokens = prefixes.hit_blocks(cast(Live, request), self.tick_now()) * self._batch.kv.block
        self.matched_request, self.matched_cached, self.matched_loadable = request.id, tokens, 0
        return tokens

    def loadable_tokens(self, request: RequestView, /) -> int:
        index, prefixes = self._placed.cache_index, self._batch.prefixes
        tokens = 0
        if index is not None:
            tokens = index.loadable_tokens(request)
            if self._batch.store is not None:  # reads the store itself, not its events
                block = self._batch.kv.block
                start = index.cached_tokens(request) + tokens
                end = self._batch.store.reach(spans(request.prefix, block), start // block)
                most = (request.prompt_tokens + request.generated_tokens - 1) // block
                tokens += max(0, min(end, most) * block - start)
        elif prefixes is not None and request.prefix:
            live = cast(Live, request)
            tokens = prefixes.loadable_blocks(live, prefixes.hit_blocks(live, self.tick_now())) * self._batch.kv.block
        if self.matched_request == request.id:
            self.matched_loadable = tokens
        return tokens

    @property
    def expected_cached_tokens(self) -> int:
        return self._batch.expected_cached_tokens

    def kv_transfer_s(self, num_tokens: int, /) -> float:
        return self._kv_transfer_s(num_tokens)

    def latency_s(self, region: str, /) -> float:
        return self._latency_s(region, self.region)

    @property
    def is_single_phase(self) -> bool:
        return False

    @property
    def is_shared(self) -> bool:
        return False

    def cache_changes(self) -> list[Change]:
        """Cached segments changed since the last call (`Batch.report_cache_changes`)."""
        prefixes = self._batch.prefixes
        return [] if prefixes is None else prefixes.changes(self.tick_now())

    def tick_now(self) -> int:
        """The number of the last complete tick."""
        ahead = self._timeline.ticks_ahead(self._kernel.now) if self._batch.decoding else 0
        return self._batch.tick + ahead

    @property
    def kv_blocks_used(self) -> int:
        batch = self._batch
        if not batch.decoding:
            return batch.kv.pinned
        tick, t = batch.tick, self._timeline
        if batch.speculation is not None:
            return batch.kv.used(self._ticks_ahead() + batch.tick)
        if t.advances and t.k != t.k_end:  # `_ticks_ahead` inlined, as routers read this for every replica
            k = completed(t.start_s, t.a_s, t.b_s, self._kernel.now, t.k, t.k_end)
            tick += k - t.k
            if k < t.k_end and self.holds_until_s > self._kernel.now:
                changes_at = min(k + 1 + batch.kv.ticks_unchanged(tick), t.k_end)
                end_s = boundary_s(t.start_s, t.a_s, t.b_s, changes_at)
                if end_s < self.holds_until_s:
                    self.holds_until_s = end_s
        return batch.kv.used(tick)

    def _ticks_ahead(self) -> int:
        """`Timeline.ticks_ahead`. Values computed from these ticks hold until the next tick."""
        ticks = self._timeline.ticks_ahead(self._kernel.now)
        if self.holds_until_s > self._kernel.now:
            self.holds_until_s = min(self.holds_until_s, self._timeline.holds_until_s(ticks))
        return ticks

    @property
    def kv_blocks_host(self) -> int:
        return self._batch.kv.blocks(self._batch.host.used_tokens)

    @property
    def head_demand_blocks(self) -> int:
        live = self._batch.queue.first()
        if live is None:
            return 0
        return self._batch.kv.blocks(live.swapped_tokens or live.target_tokens) - live.resident_blocks

    @property
    def tokens_generated(self) -> int:
        batch = self._batch
        if not batch.decoding:
            return batch.generated_offset
        tick = self._ticks_ahead() + batch.tick
        return batch.generated_offset + len(batch.decoding) * tick

    @property
    def output_tokens_left(self) -> int:
        return self._placed.output_tokens - self.tokens_generated

    @property
    def answers_on_pace(self) -> bool:
        stalls, now = self._batch.stalls, self._kernel.now
        if stalls is None:
            stalls = self._batch.stalls = StallTracker(self._pacer)
            for live in self.requests:
                stalls.update(live)
        tick = self._ticks_ahead() + self._batch.tick
        if not stalls.all_on_pace(tick, now):
            return False
        if self._placed.paused:
            self.holds_until_s = now
            return self._placed.paused.are_on_pace(self._pacer, now)
        if self.holds_until_s > now:
            self.holds_until_s = min(self.holds_until_s, stalls.first_stall_s(tick))
        return True

    @property
    def paused(self) -> list[Live]:
        if not self._placed.paused:
            return []
        self.holds_until_s = self._kernel.now
        return self._placed.paused.held()

    @property
    def requests(self) -> list[Live]:
        batch, transit = self._batch, self._transit
        tick = self._ticks_ahead() + batch.tick
        self.holds_until_s = self._kernel.now
        for live in batch.decoding.values():
            live.generated_tokens = live.joined_generated + tick - live.joined_tick
        return [
            *self._batch.queue.requests(),
            *batch.prefilling.values(),
            *batch.decoding.values(),
            *transit.expected.values(),
            *(live for live in transit.leaving.values() if not live.move.is_sent),
        ]
