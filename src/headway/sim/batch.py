"""The batch of one replica: requests in prefill and decode, and the memory held by them and by waiting requests.

No time passes here: `replica` decides when things happen, `batching` what runs next and `preemption` which requests are
preempted; all use these methods. A decoding request has gained `tick - joined_tick` tokens since it joined, so a sum
over all of them is an offset plus their number times the tick, and need not be updated at each tick.
"""

from __future__ import annotations

from heapq import heappop, heappush

from headway.control.live import DECODING, NEVER, PREFILLING, WAITING, Live
from headway.control.recorder import Recorder
from headway.core.fleet import Engine
from headway.core.record import Cause
from headway.sim.adapter_slots import AdapterSlots
from headway.sim.checks import Checks
from headway.sim.kv_store import StoreClient
from headway.sim.kvcache import KvCache
from headway.sim.prefixcache import Keeping, PrefixCache
from headway.sim.replica_resources import PoolResources
from headway.sim.speculation import Speculation
from headway.sim.stall_tracker import StallTracker
from headway.sim.waiting_queue import WaitingQueue


class Batch:
    """Requests and memory of one replica."""

    __slots__ = (
        "_drafts", "_resources", "_segments", "_window_ends", "adapters", "cache_changes", "checks",
        "chunk_shapes", "chunk_tokens", "chunks", "context_offset", "decoding", "draft_slots", "engine",
        "expected_cached_tokens", "generated_offset", "growing", "host", "is_changed", "keeping", "kv",
        "kv_blocks_total", "max_num_batched_tokens", "max_num_seqs", "must_recheck", "num_growing", "num_waiting",
        "prefill_tokens_left", "prefilling", "prefixes", "queue", "replica", "resident", "speculation", "stall_s",
        "stalls", "store", "tick", "ticks_are_plain", "window", "window_tokens",
    )  # fmt: skip

    def __init__(
        self,
        replica: int,
        resources: PoolResources,
        queue: WaitingQueue,
        recorder: Recorder,
        seed: int = 0,
    ) -> None:
        self.replica, self._resources = replica, resources
        self.engine: Engine = resources.engine
        self.max_num_seqs, self.max_num_batched_tokens = resources.max_num_seqs, resources.max_num_batched_tokens
        self.window = resources.window
        drafts = resources.drafts
        self.speculation = None if drafts is None else Speculation(drafts, seed)
        self.draft_slots = 0 if drafts is None else drafts.num_slots
        """KV slots that each decoding request needs per iteration for tokens being verified or drafted."""
        self.ticks_are_plain = self.window is None and drafts is None
        """Whether a tick only increases `tick`: there is no attention window and no drafting."""
        self.kv_blocks_total = resources.kv_blocks
        self.host = resources.new_host_memory()
        self.adapters: AdapterSlots | None = resources.new_adapter_slots()
        """The LoRA slots; None: no LoRA adapters."""
        self.queue = queue
        self.stalls: StallTracker | None = None
        self._segments, self._drafts = recorder.segments, recorder.drafts
        self.tick = 0
        """Number of iterations in which the decoding requests gained a token."""
        self.cache_changes: set[int] | None = None
        """Segments whose cached blocks have changed, for `PrefixCache.changes`; None = there is no reader."""
        self.prefixes: PrefixCache | None = None
        """The prefix cache, once there may be something in it."""
        self.store: StoreClient | None = None
        self.keeping: Keeping | None = None
        self.clear()

    def clear(self) -> None:
        """Remove all requests and all cached content."""
        resources = self._resources
        if self.adapters is not None:
            self.adapters.clear()
        self.kv = KvCache(self.kv_blocks_total, resources.block_size_tokens, resources.watermark, self.draft_slots)
        if self.speculation is not None:
            self.speculation.clear()
        if self.prefixes is not None and self.cache_changes is not None:
            self.cache_changes.update(self.prefixes.nodes)
            if self.prefixes.host is not None:
                self.prefixes.host.clear()
        self.prefixes = None
        if self.cache_changes is not None or self.store is not None:
            self.cache_prefixes()
        self.prefilling: dict[int, Live] = {}
        self.decoding: dict[int, Live] = {}
        self.resident: dict[int, Live] = {}
        """Waiting requests that hold KV blocks on the GPU."""
        self.chunks: list[tuple[Live, int]] = []
        """(request, tokens) of the next iteration's prefill chunks."""
        self.chunk_shapes: list[tuple[int, int]] = []
        """(new tokens, earlier tokens) of the chunks in `chunks`."""
        self.chunk_tokens = 0
        self.checks = Checks()
        """When to check a decoding request for its end or for a change of phase or rank."""
        self._window_ends: list[tuple[int, int]] = []
        """Heap of (tick, id): when a request's context outgrows the sliding window."""
        self.growing: dict[int, int] = {}
        """Maps each request to the tick at which its context outgrows the window."""
        if self.stalls is not None:
            self.stalls = StallTracker(self.stalls.pacer)
        self.num_waiting = self.prefill_tokens_left = self.expected_cached_tokens = 0
        self.context_offset = self.generated_offset = self.window_tokens = self.num_growing = 0
        self.is_changed = False
        """Whether the decoding requests differ from those at the start of the epoch."""
        self.must_recheck = False
        """Whether to schedule again at the next boundary, because admission may find more room."""
        self.stall_s = 0.0
        """Time of KV copies and of LoRA adapters that are loaded. It delays the next iteration."""

    def extend_cache(self, store: StoreClient | None, keeping: Keeping | None) -> None:
        """Extend the prefix cache by a shared store, and by kept blocks. Call before the first request."""
        self.store, self.keeping = store, keeping
        self.clear()

    def report_cache_changes(self) -> None:
        """Record changed cached blocks from now on. Call before the first request."""
        self.cache_changes = set()
        self.clear()

    def cache_prefixes(self) -> None:
        """Begin to cache prefixes: before the first request with one, or the first preempted one, nothing is found."""
        if self.prefixes is None and self._resources.caches_prefixes:
            tier = self.host.prefix_tier(self.kv.block)
            self.prefixes = PrefixCache(self.kv, tier, self.cache_changes, self.store, self.keeping)

    # Waiting requests: counts and KV.

    def count_waiting(self, live: Live) -> None:
        """Count a request as waiting: to prefill (again), or to be swapped in."""
        live.stage = WAITING
        if live.prefix or live.output_id is not None:
            self.cache_prefixes()
        if self.stalls is not None:
            self.stalls.update(live)
        if not live.swapped_tokens:
            live.target_tokens = tokens = live.prompt_tokens + live.generated_tokens
            live.computed_tokens = 0
            self.prefill_tokens_left += tokens
        self.num_waiting += 1

    def uncount_waiting(self, live: Live) -> None:
        """Stop counting a request as waiting, and discard its KV."""
        if not live.swapped_tokens:
            self.prefill_tokens_left -= live.target_tokens
        self.num_waiting -= 1
        self.forget_expected(live)
        self.discard_kv(live)

    def forget_expected(self, live: Live) -> None:
        """Reset the tokens expected from the prefix cache: the prefill begins, or the request leaves."""
        self.expected_cached_tokens -= live.expected_cached_tokens
        live.expected_cached_tokens = 0

    def hold_blocks(self, live: Live, blocks: int) -> None:
        """Let a waiting request hold GPU blocks that are already pinned."""
        live.resident_blocks = blocks
        self.resident[live.id] = live

    def release_blocks(self, live: Live) -> None:
        """Unpin a waiting request's blocks."""
        self.kv.pinned -= live.resident_blocks
        live.swapped_tokens = live.resident_blocks = 0
        del self.resident[live.id]

    def discard_kv(self, live: Live, returns: bool = False) -> None:
        """Discard the KV of a waiting request, on the GPU or in host memory. `returns`: see `PrefixCache.release`."""
        if live.id in self.resident:
            if self.prefixes is not None:
                self.prefixes.release(live, live.resident_blocks, self.tick, live.swapped_tokens, returns)
            self.release_blocks(live)
        else:
            self.host.drop(live)

    # Prefill and decode.

    def admit(self, live: Live, hit_blocks: int, loaded_blocks: int, now: float) -> None:
        """Move the first waiting request into the batch, with its blocks in the prefix cache and its host tier."""
        self.queue.pop()
        self.num_waiting -= 1
        if live.expected_cached_tokens:
            self.forget_expected(live)
        live.stay_admitted_s = now
        if self.adapters is not None and live.lora:
            self.stall_s += self.adapters.use(live.lora)
        live.quantum_tick = self.tick
        if live.swapped_tokens:
            self._resume(live)
            return
        if (hit_blocks or loaded_blocks) and self.prefixes is not None:
            self._use_cached(self.prefixes, live, hit_blocks, loaded_blocks)
        if live.admitted_s != live.admitted_s:
            live.admitted_s = now
            live.cached_tokens = live.computed_tokens
        else:
            live.prefill_end_s = NEVER
        live.stage = PREFILLING
        self.prefilling[live.id] = live

    def _resume(self, live: Live) -> None:
        """Continue decoding with the kept KV."""
        live.prefill_end_s = NEVER
        live.computed_tokens = live.swapped_tokens
        if live.id in self.resident:
            own = live.computed_tokens - live.shared_blocks * self.kv.block
            spare = live.resident_blocks - self.kv.blocks(own)
            if spare and self.prefixes is not None:
                self.prefixes.free(spare, self.tick)
            self.release_blocks(live)
        else:
            self.stall_s += self.host.swap_in(live)
        self.start_decode(live)
        self.set_check(live)

    def _use_cached(self, prefixes: PrefixCache, live: Live, hit_blocks: int, loaded_blocks: int) -> None:
        prefixes.share(live, hit_blocks)
        prefixes.touch(live, hit_blocks + loaded_blocks)
        live.computed_tokens = (hit_blocks + loaded_blocks) * self.kv.block
        self.prefill_tokens_left -= live.computed_tokens
        if loaded_blocks:
            self.stall_s += prefixes.load_s(live, hit_blocks, loaded_blocks)
            self.kv.pinned += loaded_blocks

    def add_chunk(self, live: Live, tokens: int) -> None:
        """Compute this many more prompt tokens in the next iteration. Their blocks must be free."""
        kv = self.kv
        before = live.computed_tokens
        live.computed_tokens = after = before + tokens
        block = kv.block
        kv.pinned += -(-after // block) + -before // block
        self.chunks.append((live, tokens))
        self.chunk_shapes.append((tokens, before))
        self.chunk_tokens += tokens
        if self.prefixes is not None and live.prefix:
            self.prefixes.publish(live, self.tick)

    def start_decode(self, live: Live) -> None:
        """Let a request decode from the next iteration on."""
        live.stage = DECODING
        live.joined_tick = tick = self.tick
        live.joined_generated = live.generated_tokens
        self.generated_offset -= tick
        tokens = live.computed_tokens
        self.decoding[live.id] = live
        self.context_offset += tokens - tick
        kv = self.kv
        kv.join(tokens - live.shared_blocks * kv.block, tick)
        if self.speculation is not None:
            self.speculation.join(live, tick)
        if self.window is not None:
            self.window_tokens += min(tokens, self.window)
            if tokens < self.window:
                self.num_growing += 1
                self.growing[live.id] = end = tick + self.window - tokens
                heappush(self._window_ends, (end, live.id))
        if self.stalls is not None:
            self.stalls.update(live)
        self.is_changed = True

    def stop_decode(self, live: Live, keeps_blocks: bool = False, returns: bool = False) -> None:
        """Take a decoding request out of the batch. `computed_tokens` becomes its KV tokens.

        With `keeps_blocks`, its blocks stay pinned until `Replica.release`. `returns`: see `PrefixCache.release`.
        """
        tick, kv, prefixes = self.tick, self.kv, self.prefixes
        grown = tick - live.joined_tick
        live.generated_tokens = live.joined_generated + grown
        self.generated_offset += tick
        live.computed_tokens = tokens = live.computed_tokens + grown
        own = tokens - live.shared_blocks * kv.block
        if keeps_blocks:
            kv.pinned += kv.blocks(own)
        elif prefixes is not None and (prefixes.nodes or returns or live.output_id is not None):
            prefixes.release(live, kv.blocks(own), tick, tokens, returns)
        kv.leave(own, tick)
        if self.speculation is not None:
            self.speculation.leave(live, tick)
        self.context_offset -= tokens - tick
        del self.decoding[live.id]
        live.check_tick = -1
        if live.check_slot >= 0:
            self.checks.remove(live)
        if self.adapters is not None and live.lora:
            self.adapters.release(live.lora)
        if self.window is not None:
            self.window_tokens -= min(tokens, self.window)
            if self.growing.pop(live.id, None) is not None:
                self.num_growing -= 1
        self.is_changed = True

    def stop_prefill(self, live: Live, returns: bool = False) -> None:
        """Take a request in prefill out of the batch and free its blocks. `returns`: see `PrefixCache.release`."""
        kv = self.kv
        in_iteration = sum(tokens for other, tokens in self.chunks if other is live)
        if in_iteration:
            at = next(i for i, chunk in enumerate(self.chunks) if chunk[0] is live)
            del self.chunks[at], self.chunk_shapes[at]
            self.chunk_tokens -= in_iteration
        own = live.computed_tokens - live.shared_blocks * kv.block
        if self.prefixes is not None:
            self.prefixes.release(live, kv.blocks(own), self.tick, live.computed_tokens - in_iteration, returns)
        kv.pinned -= kv.blocks(own)
        del self.prefilling[live.id]
        if self.adapters is not None and live.lora:
            self.adapters.release(live.lora)
        self.prefill_tokens_left -= live.target_tokens - live.computed_tokens + in_iteration
        live.computed_tokens = 0
        self.is_changed = True

    def end_prefill(self, live: Live) -> None:
        """Let a request whose prompt is computed decode from the next iteration on."""
        kv = self.kv
        del self.prefilling[live.id]
        kv.pinned += -live.computed_tokens // kv.block + live.shared_blocks
        live.quantum_tick = self.tick - 1  # the prefill's token is the first token of the quantum
        self.start_decode(live)

    def set_check(self, live: Live) -> None:
        """Set the tick of a decoding request's next check: for its end, or for a change of phase or rank."""
        generated = live.generated_tokens
        if live.first_token_s != live.first_token_s:
            ahead = 1
        elif generated < live.reasoning_tokens:
            ahead = live.reasoning_tokens - generated
        elif live.answer_s != live.answer_s:
            ahead = 1
        else:
            ahead = live.output_tokens - generated
        ordering = self.queue.stepped_ordering
        if ordering is not None:
            step = ordering.next_change_tokens(live)
            live.turn_ends_at = 0 if step is None else generated + step
            ahead = ahead if step is None else min(ahead, step)
        if self.speculation is not None:
            ahead = self.speculation.ticks_until(live, self.tick, generated + ahead)
        self.checks.put(live, self.tick + ahead)

    def sync(self, live: Live) -> None:
        """Update a decoding request's `generated_tokens` to the current tick."""
        live.generated_tokens = live.joined_generated + self.tick - live.joined_tick

    def advance(self, num_ticks: int) -> None:
        """Let ticks pass. Contexts grow up to the sliding window."""
        self.tick += num_ticks
        if self.speculation is not None:
            self._accept(self.speculation, num_ticks)
            return
        if self.window is None:
            return
        self.window_tokens += self.num_growing * num_ticks
        ends = self._window_ends
        while ends and ends[0][0] <= self.tick:
            tick, request = heappop(ends)
            if self.growing.get(request) == tick:
                del self.growing[request]
                self.num_growing -= 1
                self.is_changed = True

    def ticks_in_window(self, most: int) -> int:
        """Ticks until a context outgrows the sliding window, at most `most`."""
        if self.speculation is not None and self.window is not None:
            tick, window, most_tokens = self.tick, self.window, self.speculation.setting.most_tokens
            growing = (self.decoding[request] for request in self.growing)
            left = (window - live.computed_tokens - tick + live.joined_tick for live in growing)
            return min([most, *(-(-tokens // most_tokens) for tokens in left)])
        ends = self._window_ends
        return min(most, ends[0][0] - self.tick) if ends else most

    def _accept(self, speculation: Speculation, num_ticks: int) -> None:
        """Add the tokens beyond one per tick that decoding requests gained in the last ticks."""
        tick, window = self.tick, self.window
        for live in self.decoding.values():
            grown = tick - live.joined_tick
            tokens = live.computed_tokens + grown
            accepted = speculation.accepted(live, tick, live.joined_generated + grown)
            if window is not None and live.id in self.growing:
                self.window_tokens += min(tokens + accepted, window) - (tokens - num_ticks)
                if tokens + accepted >= window:
                    del self.growing[live.id]
                    self.num_growing -= 1
                    self.is_changed = True
            if speculation.counts is not None:
                speculation.count(speculation.counts, live, tick, num_ticks)
            if not accepted:
                continue
            self.kv.grow(tokens - live.shared_blocks * self.kv.block, accepted, tick)
            live.computed_tokens += accepted
            live.joined_generated += accepted
            self.context_offset += accepted
            self.generated_offset += accepted
            if self.stalls is not None:
                self.stalls.update(live)

    def redraft(self, speculation: Speculation) -> None:
        """Change the number of drafted tokens, and with it the coming iterations of all decoding requests."""
        for live in self.decoding.values():
            self.sync(live)
            speculation.rejoin(live, self.tick)
            self.set_check(live)

    def renew_quanta(self, quantum: int) -> None:
        """Move requests that have used up their quantum to the end of the queue's order."""
        for live in self.decoding.values():
            turns = (self.tick - live.quantum_tick) // quantum
            if turns:
                live.quantum_tick += turns * quantum
                live.turn = live.quantum_tick

    # Records.

    def write_segment(self, live: Live, now: float, cause: Cause) -> None:
        """Record the end of a request's stay in the batch."""
        tick = self.tick
        joined = live.joined_tick if live.stage is DECODING else tick
        if self.speculation is not None:
            for drafted_tick, tokens in self.speculation.accepted_in_stay(live, tick):
                self._drafts.write((live.id, self.replica, drafted_tick, tokens))
        self._segments.write((
            live.id, self.replica, live.attempt, live.stage_index, live.enqueued_s, live.stay_admitted_s,
            live.prefill_end_s, joined, tick, now, cause,
        ))  # fmt: skip
