"""The requests of one replica: who waits, who prefills, who decodes, and the memory that they hold.

No time passes here. `engine` says when things happen and `batching` what runs next; both work through these verbs:
a request stands in the `queue`, is admitted, is given prefill chunks, joins the decoding ones, and leaves. A decoding
request has gained `tick - joined_tick` tokens, so a sum over them is an offset plus their number times the tick, and
costs nothing to bring up to date.
"""

from __future__ import annotations

from collections import defaultdict
from heapq import heapify, heappop, heappush

from headway.control.live import DECODING, NEVER, PREFILLING, WAITING, Live
from headway.control.recorder import Recorder
from headway.core.fleet import Pool
from headway.core.policy import MovingOrdering, Ordering, QueuedOrdering, SteppedOrdering
from headway.core.record import Cause
from headway.sim.kvcache import KvCache
from headway.sim.prefixcache import PrefixCache
from headway.sim.stall_tracker import StallTracker
from headway.sim.swap import HostMemory


class Batch:
    """Requests and memory of one replica."""

    __slots__ = (
        "_pack_segment", "_put_segment", "_queues", "advances", "again", "changed", "chunks", "context_offset",
        "decoding", "engine", "generated_offset", "given", "gpu", "growing", "id", "kv", "kv_blocks_total",
        "max_context_tokens", "max_num_batched_tokens", "max_num_seqs", "milestones", "model", "moving",
        "num_by_tier", "num_growing", "num_in_flight", "num_waiting", "ordering", "output", "pace", "pool",
        "preemptive", "prefill_tokens_left", "prefilling", "prefixes", "quantum", "queued", "rank",
        "region", "resident", "saturations", "shape", "stall_s", "stepped", "swap", "tick", "waiting", "window",
        "window_tokens",
    )  # fmt: skip

    def __init__(
        self, id: int, pool: Pool, kv_blocks: int, swap: HostMemory, ordering: Ordering, recorder: Recorder
    ) -> None:
        self.id = id
        self.pool, self.model, self.gpu, self.region = pool.name, pool.model.name, pool.gpu.name, pool.region
        self.engine = pool.engine
        self.max_num_seqs = pool.engine.max_num_seqs
        self.max_num_batched_tokens = pool.engine.max_num_batched_tokens
        self.max_context_tokens = pool.model.max_context_tokens
        self.window = pool.model.sliding_window_tokens
        self.kv_blocks_total = kv_blocks
        self.swap = swap
        self.ordering = ordering
        self.rank = ordering.rank
        self.quantum, self.preemptive = ordering.quantum, ordering.preemptive
        self.moving = ordering if isinstance(ordering, MovingOrdering) else None
        self.stepped = ordering if isinstance(ordering, SteppedOrdering) else None
        self.queued = ordering if isinstance(ordering, QueuedOrdering) else None
        self.pace: StallTracker | None = None
        self._pack_segment, self._put_segment = recorder.segments.pack, recorder.segments.write
        self.tick = 0
        self.clear()

    def clear(self) -> None:
        """No requests, and nothing cached."""
        engine = self.engine
        self.kv = KvCache(self.kv_blocks_total, engine.block_size_tokens, engine.watermark)
        self.prefixes = PrefixCache(self.kv, self.swap.tier(self.kv.block)) if engine.prefix_caching else None
        self.waiting: list[tuple[object, int, Live]] = []
        self.prefilling: dict[int, Live] = {}
        self.decoding: dict[int, Live] = {}
        self.chunks: list[tuple[Live, int]] = []
        self.shape: list[tuple[int, int]] = []
        self.given = 0
        self.milestones: list[tuple[int, int, Live]] = []
        self.saturations: list[tuple[int, int]] = []
        self.growing: dict[int, int] = {}
        self.resident: dict[int, Live] = {}
        self.num_by_tier: defaultdict[int, int] = defaultdict(int)
        self._queues = [0] * (0 if self.queued is None else self.queued.num_queues)
        if self.pace is not None:
            self.pace = StallTracker(self.pace.pacer)
        self.num_waiting = self.num_in_flight = 0
        self.prefill_tokens_left = self.output = 0
        self.context_offset = self.generated_offset = self.window_tokens = self.num_growing = 0
        self.changed = self.again = self.advances = False
        self.stall_s = 0.0

    @property
    def num_running(self) -> int:
        """Requests in the batch."""
        return len(self.decoding) + len(self.prefilling)

    @property
    def max_request_tokens(self) -> int:
        """Longest request, prompt and output together, that runs here when it is alone."""
        in_memory = (self.kv.total - self.kv.watermark) * self.kv.block + 1
        return min(in_memory, self.max_context_tokens)

    # The line.

    def stand(self, live: Live, now: float) -> None:
        """Put a request in line, at its rank."""
        live.rank = rank = self.rank(live, now)
        heappush(self.waiting, (rank, live.id, live))

    def queue(self, live: Live, now: float) -> None:
        """A request waits: to prefill what it has (again), or to be swapped back in."""
        self.expect(live)
        live.rank = rank = self.rank(live, now)
        heappush(self.waiting, (rank, live.id, live))

    def expect(self, live: Live) -> None:
        """Count a request as waiting."""
        live.enter(WAITING)
        if self.pace is not None:
            self.pace.waits(live)
        if not live.swapped_tokens:
            live.target_tokens = tokens = live.prompt_tokens + live.generated_tokens
            live.computed_tokens = 0
            self.prefill_tokens_left += tokens
        self.num_waiting += 1

    def head(self) -> Live | None:
        """Who is first in line."""
        waiting = self.waiting
        while waiting:
            live = waiting[0][2]
            if live.stage is WAITING:
                return live
            heappop(waiting)
        return None

    def in_line(self) -> list[Live]:
        """Who waits, in no order. Entries that a cancellation left behind do not."""
        return [entry[2] for entry in self.waiting if entry[2].stage is WAITING]

    def rerank(self, now: float) -> None:
        """Rank the line anew."""
        self.waiting = [(self.rank(live, now), live.id, live) for live in self.in_line()]
        for rank, _, live in self.waiting:
            live.rank = rank
        heapify(self.waiting)

    def renew_quanta(self, quantum: int) -> None:
        """Whoever has used up its quantum goes to the end of the line; whole quanta passed count in one go."""
        for live in self.decoding.values():
            turns = (self.tick - live.quantum_tick) // quantum
            if turns:
                live.quantum_tick += turns * quantum
                live.turn = live.quantum_tick

    def withdraw(self, live: Live) -> None:
        """A waiting request goes."""
        if not live.swapped_tokens:
            self.prefill_tokens_left -= live.target_tokens
        self.num_waiting -= 1
        self.drop_kept(live)
        self.gone(live)

    # In the batch.

    def admit(self, live: Live, hit_blocks: int, loaded_blocks: int, now: float) -> None:
        """Take the head of the line into the batch, with what is cached for it on the GPU and in host memory."""
        heappop(self.waiting)
        self.num_waiting -= 1
        live.stay_admitted_s = now
        live.quantum_tick = self.tick
        if live.swapped_tokens:
            live.prefill_end_s = NEVER
            live.computed_tokens = live.swapped_tokens
            if live.id in self.resident:
                own = live.computed_tokens - live.shared_blocks * self.kv.block
                spare = live.resident_blocks - self.kv.blocks(own)
                if spare and self.prefixes is not None:
                    self.prefixes.free(spare, self.tick)
                self.unkeep(live)
            else:
                self.stall_s += self.swap.back(live)
            self.join(live)
            self.plan(live)
            return
        if (hit_blocks or loaded_blocks) and self.prefixes is not None:
            self._use_cached(self.prefixes, live, hit_blocks, loaded_blocks)
        if live.admitted_s != live.admitted_s:
            live.admitted_s = now
            live.cached_tokens = live.computed_tokens
        else:
            live.prefill_end_s = NEVER
        live.enter(PREFILLING)
        self.prefilling[live.id] = live

    def _use_cached(self, prefixes: PrefixCache, live: Live, hit_blocks: int, loaded_blocks: int) -> None:
        prefixes.take(live, hit_blocks)
        prefixes.touch(live, hit_blocks + loaded_blocks)
        live.computed_tokens = (hit_blocks + loaded_blocks) * self.kv.block
        self.prefill_tokens_left -= live.computed_tokens
        if loaded_blocks and prefixes.host is not None:
            self.kv.pinned += loaded_blocks
            self.stall_s += prefixes.host.load_s(loaded_blocks)

    def give(self, live: Live, tokens: int) -> None:
        """Compute this many more prompt tokens in the coming iteration; their blocks are free."""
        kv = self.kv
        before = live.computed_tokens
        live.computed_tokens = after = before + tokens
        block = kv.block
        kv.pinned += -(-after // block) + -before // block
        self.chunks.append((live, tokens))
        self.shape.append((tokens, before))
        self.given += tokens
        if self.prefixes is not None and live.prefix:
            self.prefixes.publish(live, self.tick)

    def join(self, live: Live) -> None:
        """The request decodes from the next iteration on."""
        live.enter(DECODING)
        live.joined_tick = tick = self.tick
        live.joined_generated = live.generated_tokens
        self.generated_offset -= tick
        tokens = live.computed_tokens
        self.decoding[live.id] = live
        self.context_offset += tokens - tick
        self.kv.join(tokens - live.shared_blocks * self.kv.block, tick)
        if self.window is not None:
            self.window_tokens += min(tokens, self.window)
            if tokens < self.window:
                self.num_growing += 1
                self.growing[live.id] = end = tick + self.window - tokens
                heappush(self.saturations, (end, live.id))
        if self.pace is not None:
            self.pace.runs(live)
        self.changed = True

    def leave(self, live: Live, keeping: bool = False) -> None:
        """A decoding request goes, and its blocks with it; `computed_tokens` becomes what it had.

        With `keeping`, its blocks stay taken, until `let_go`.
        """
        tick = self.tick
        grown = tick - live.joined_tick
        live.generated_tokens = live.joined_generated + grown
        self.generated_offset += tick
        live.computed_tokens = tokens = live.computed_tokens + grown
        own = tokens - live.shared_blocks * self.kv.block
        prefixes = self.prefixes
        if keeping:
            self.kv.pinned += self.kv.blocks(own)
        elif prefixes is not None and (prefixes.nodes or live.output_id is not None):
            prefixes.release(live, own, tick, tokens)
        self.kv.leave(own, tick)
        self.context_offset -= tokens - tick
        del self.decoding[live.id]
        live.check_tick = -1
        if self.window is not None:
            self.window_tokens -= min(tokens, self.window)
            if self.growing.pop(live.id, None) is not None:
                self.num_growing -= 1
        self.changed = True

    def drop_prefill(self, live: Live) -> None:
        """A request in prefill goes, and its blocks with it."""
        kv = self.kv
        given = sum(tokens for other, tokens in self.chunks if other is live)
        if given:
            at = next(i for i, chunk in enumerate(self.chunks) if chunk[0] is live)
            del self.chunks[at], self.shape[at]
            self.given -= given
        own = live.computed_tokens - live.shared_blocks * kv.block
        if self.prefixes is not None:
            self.prefixes.release(live, own, self.tick, 0)
        kv.pinned -= kv.blocks(own)
        del self.prefilling[live.id]
        self.prefill_tokens_left -= live.target_tokens - live.computed_tokens + given
        live.computed_tokens = 0
        self.changed = True

    def plan(self, live: Live) -> None:
        """Set the tick at which to look at a decoding request again: its end, or a change of phase or rank."""
        generated = live.generated_tokens
        if live.first_token_s != live.first_token_s:
            ahead = 1
        elif generated < live.reasoning_tokens:
            ahead = live.reasoning_tokens - generated
        elif live.answer_s != live.answer_s:
            ahead = 1
        else:
            ahead = live.output_tokens - generated
        if self.stepped is not None:
            step = self.stepped.next_change_tokens(live)
            ahead = ahead if step is None else min(ahead, step)
        live.check_tick = tick = self.tick + ahead
        heappush(self.milestones, (tick, live.id, live))

    def sync(self, live: Live) -> None:
        """Bring `generated_tokens` of a decoding request up to the present tick."""
        live.generated_tokens = live.joined_generated + self.tick - live.joined_tick

    def saturate(self, ticks: int) -> None:
        """Contexts grow within the sliding window; those that have outgrown it stop."""
        self.window_tokens += self.num_growing * ticks
        while self.saturations and self.saturations[0][0] <= self.tick:
            tick, request = heappop(self.saturations)
            if self.growing.get(request) == tick:
                del self.growing[request]
                self.num_growing -= 1
                self.changed = True

    # Blocks that requests hold while they do not run.

    def keep(self, live: Live, blocks: int) -> None:
        """A waiting request holds its KV on the GPU; the blocks are taken already."""
        live.resident_blocks = blocks
        self.resident[live.id] = live

    def unkeep(self, live: Live) -> None:
        """It holds them no longer."""
        self.kv.pinned -= live.resident_blocks
        live.swapped_tokens = live.resident_blocks = 0
        del self.resident[live.id]

    def drop_kept(self, live: Live) -> None:
        """Forget the KV of a waiting request, wherever it is."""
        if live.id in self.resident:
            if self.prefixes is not None:
                self.prefixes.give_up(live, live.resident_blocks, self.tick)
            self.unkeep(live)
        else:
            self.swap.drop(live)

    # The end.

    def gone(self, live: Live) -> None:
        """The request is no longer this replica's."""
        self.num_in_flight -= 1
        self.generated_offset -= live.generated_tokens
        self.output -= live.output_tokens
        self.num_by_tier[live.tier] -= 1
        if self.queued is not None:
            self._queues[live.queue] -= 1
        if self.pace is not None:
            self.pace.forget(live)

    def come(self, live: Live) -> None:
        """The request is this replica's now."""
        self.num_in_flight += 1
        self.generated_offset += live.generated_tokens
        self.output += live.output_tokens
        self.num_by_tier[live.tier] += 1
        if self.queued is not None:
            live.queue = self.queued.queue(live)
            self._queues[live.queue] += 1

    def requeue(self, live: Live) -> None:
        """Its place in line begins anew if it has changed to another queue of the ordering."""
        if self.queued is None:
            return
        queue = self.queued.queue(live)
        if queue != live.queue:
            self._queues[live.queue] -= 1
            self._queues[queue] += 1
            live.queue = queue
            live.turn = live.quantum_tick = self.tick

    def record(self, live: Live, now: float, cause: Cause) -> None:
        """Write down the end of a stay in the batch."""
        tick = self.tick
        joined = live.joined_tick if live.stage is DECODING else tick
        row = self._pack_segment(
            live.id, self.id, live.attempt, live.stage_index, live.enqueued_s, live.stay_admitted_s,
            live.prefill_end_s, joined, tick, now, cause,
        )  # fmt: skip
        self._put_segment(row)
