"""One simulated replica: a batch in time.

An iteration ends at a *boundary*. At a boundary requests finish, then a batching rule decides what runs next. While a
batch stays the same its iterations form an *epoch* (see `timeline`). Nothing happens inside an epoch until its
*horizon*, so the replica sleeps until then; an event from outside may wake it at an earlier boundary. With `exact`,
the horizon is always the next boundary, and nothing else differs.

Read `enqueue`, `wake` and `_schedule` first: a request arrives, an iteration ends, the next one is decided.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from functools import partial
from heapq import heappop
from math import inf
from operator import attrgetter
from typing import Protocol, cast

from headway.control.cache_index import CacheIndex, Change, spans
from headway.control.live import DECODING, HELD, PAUSED, PREFILLING, WAITING, Live
from headway.control.paused import PausedRequests
from headway.control.recent_adapters import RecentAdapters
from headway.control.recorder import Recorder
from headway.core.fleet import Network, Pool
from headway.core.pacer import Pacer
from headway.core.policy import Ordering
from headway.core.record import Cause, MoveOutcome, boundary_s
from headway.core.request import Phase
from headway.core.view import EngineTimes, RequestView
from headway.perf.copies import kv_transfer_s
from headway.sim.adapter_slots import AdapterSlots
from headway.sim.batch import Batch
from headway.sim.batching import BATCHING_RULES
from headway.sim.host_memory import HostMemory
from headway.sim.in_transit import InTransit
from headway.sim.kernel import BEFORE, COMMAND, Kernel
from headway.sim.kv_store import StoreClient
from headway.sim.preemption import make_room
from headway.sim.prefixcache import Keeping, PrefixCache
from headway.sim.stall_tracker import StallTracker
from headway.sim.timeline import Line, Timeline, completed, first_boundary_at
from headway.sim.waiting_queue import WaitingQueue


class Listener(Protocol):
    """Receives the events of requests (control). It ends a request that has finished or was cancelled."""

    def on_finished(self, live: Live, now: float) -> None: ...
    def on_cancelled(self, live: Live, now: float) -> None: ...
    def on_paused(self, live: Live, now: float) -> None: ...
    def on_phase_changed(self, live: Live, now: float) -> None: ...
    def on_prefilled(self, live: Live, now: float) -> None: ...
    def on_prompt_computed(self, live: Live, now: float) -> None: ...


class OrderReceived:
    """An engine's own order: as it has received the requests, whatever order they arrived in at the gateway.

    A preempted request keeps its place.
    """

    quantum: int | None = None
    preemptive = False

    def rank(self, request: RequestView, now: float) -> int:
        return cast(Live, request).num_before


class Replica:
    """One replica. Satisfies `core.view.OracleReplicaView`."""

    __slots__ = (
        "_batching_rule", "_cancelling", "_changes", "_events", "_exact", "_has_frontend", "_kernel", "_kv_transfer_s",
        "_lag", "_latency_s", "_listener", "_makes_first_token", "_matched_cached", "_matched_loadable",
        "_matched_request", "_output_tokens", "_pacer", "_paused", "_pausing", "_queue", "_queue_lengths",
        "_sends_first_token", "_undecided", "batch", "cache_index", "combo", "goodput_rps", "gpu", "holds_until_s",
        "id", "is_draining", "is_up", "kv_blocks_total", "max_num_seqs", "max_num_waiting", "max_request_tokens",
        "model", "num_by_tier", "num_in_flight", "num_received", "pool", "recent_loras", "region", "request_s",
        "response_s", "role", "timeline", "times", "tokenize_s", "transit",
    )  # fmt: skip

    def __init__(
        self,
        id: int,
        pool: Pool,
        line: Line,
        kv_blocks: int,
        host: HostMemory,
        ordering: Ordering,
        kernel: Kernel,
        listener: Listener,
        recorder: Recorder,
        exact: bool,
        pacer: Pacer,
        combo: int,
        goodput_rps: float | None,
        seed: int = 0,
        adapters: AdapterSlots | None = None,
        times: EngineTimes | None = None,
        network: Network | None = None,
    ) -> None:
        self.id = id
        self.pool, self.model, self.gpu, self.region = pool.name, pool.model.name, pool.gpu.name, pool.region
        self._queue = WaitingQueue(ordering)
        self.batch = Batch(id, pool, kv_blocks, host, self._queue, recorder, seed, adapters)
        self.timeline = Timeline(self, self.batch, line, kernel, recorder.stretches)
        self.transit = InTransit(self.batch, self.timeline)
        self._kernel, self._events, self._undecided = kernel, kernel.heap, kernel.undecided
        self._changes = kernel.changes
        self.holds_until_s = inf
        """Time until which values hold that were read since it was infinite, if nothing else changes."""
        self._listener, self._exact, self._pacer = listener, exact, pacer
        engine, kv = pool.engine, self.batch.kv
        self._batching_rule = BATCHING_RULES[engine.batching]
        self._lag = engine.schedule_lag
        self.request_s, self.tokenize_s = engine.request_overhead_s, engine.tokenize_s_per_token
        self.response_s = engine.response_overhead_s
        self._has_frontend = bool(self._lag or self.request_s or self.tokenize_s)
        """Requests reach the scheduler some time after they were placed."""
        self._makes_first_token = pool.handover.first_token != "decode"
        self._sends_first_token = pool.handover.first_token == "sent"
        self.max_num_seqs, self.max_num_waiting = engine.max_num_seqs, engine.max_num_waiting
        self.kv_blocks_total = kv_blocks
        room_tokens = (kv.total - kv.watermark) * kv.block + 1 - self.batch.draft_slots
        self.max_request_tokens = min(room_tokens, pool.model.max_context_tokens)
        """Longest request, prompt and output tokens, that runs here when it is alone."""
        self.recent_loras = RecentAdapters(0 if adapters is None else adapters.num_slots)
        self.cache_index: CacheIndex | None = None
        """What policies know of the prefix cache; None = the cache itself."""
        self._matched_request, self._matched_cached, self._matched_loadable = -1, 0, 0
        """The request whose prefix a router matched last: its id, cached and loadable tokens."""
        self.is_up = True
        self.is_draining = False
        self.role = pool.role
        self.combo, self.goodput_rps = combo, goodput_rps
        self.times, self._latency_s = times, (network or Network()).latency_s
        self._kv_transfer_s: Callable[[int], float] = partial(kv_transfer_s, pool)
        self._clear_requests()

    def _clear_requests(self) -> None:
        self._cancelling: list[Live] = []
        """Running requests that leave at the next boundary."""
        self._pausing: list[Live] = []
        """Running requests that leave at the next boundary, and are placed again."""
        self._paused = PausedRequests(self.id)
        self.num_in_flight = self._output_tokens = self.num_received = 0
        self.num_by_tier: defaultdict[int, int] = defaultdict(int)
        queued = self._queue.queued_ordering
        self._queue_lengths = [0] * (0 if queued is None else queued.num_queues)

    # Events from outside.

    def enqueue(self, live: Live, now: float, tokenized: bool = False, delay_s: float = 0.0) -> None:
        """Add a request that was placed here; `delay_s` is the latency to its client, each way."""
        batch, queue, timeline = self.batch, self._queue, self.timeline
        self.count(live)
        live.enqueued_s, live.num_before = now, self.num_received
        self.num_received += 1
        live.replica = self.id
        if self._matched_request == live.id:
            live.expected_cached_tokens = self._matched_cached + self._matched_loadable
            batch.expected_cached_tokens += live.expected_cached_tokens
            self._matched_request = -1
        if queue.quantum is not None or queue.stepped_ordering is not None:
            live.turn = timeline.ticks_ahead(now) + batch.tick
        response_s = self.response_s + delay_s
        # Tokens of a request that moved must not overtake those that are still on their way to the client.
        live.response_s = max(response_s, live.response_s) if tokenized else response_s
        batch.count_waiting(live)
        if self._has_frontend or delay_s:
            live.ready_s = now + self.request_s + delay_s
            if not tokenized:
                live.ready_s += self.tokenize_s * live.prompt_tokens
            queue.inbox.append(live)
            if batch.decoding or batch.prefilling:
                timeline.wake_by(live.ready_s, self._lag)
            else:
                self._kernel.at(live.ready_s, COMMAND, live.id, self._on_ready)
            return
        queue.push(live, now)
        if batch.num_waiting > 1 and queue.first() is not live and batch.adapters is None:
            return
        num_running = len(batch.decoding) + len(batch.prefilling)
        if queue.preemptive or num_running < batch.max_num_seqs or timeline.k == timeline.k_end:
            timeline.wake_by(now)

    def _on_ready(self, now: float, _: object) -> None:
        if self.timeline.k == self.timeline.k_end:
            self.timeline.wake_by(now)

    def cancel(self, live: Live, now: float) -> None:
        """Remove a request whose client gave up: a waiting one at once, a running one at the next boundary."""
        timeline = self.timeline
        if live.stage is WAITING or live.stage is PAUSED:
            if live.stage is WAITING:
                self.remove_waiting(live, now)
            else:
                live.move.abandon(now, MoveOutcome.ENDED)
                self.release(live, now)
            self._listener.on_cancelled(live, now)
        elif timeline.k == timeline.k_end:
            self._cancel_running(live, now)
            timeline.request_decision()
        else:
            self._cancelling.append(live)
            timeline.wake_by(now)

    def pause(self, live: Live, now: float) -> None:
        """Remove a decoding request without its KV, at the next boundary."""
        timeline = self.timeline
        if timeline.k == timeline.k_end:
            self._pause_running(live, now)
            timeline.request_decision()
        else:
            self._pausing.append(live)
            timeline.wake_by(now)

    def remove_waiting(self, live: Live, now: float) -> None:
        """Remove a waiting request and its KV."""
        self.timeline.catch_up(now)
        self._queue.leave_inbox(live)
        self.batch.uncount_waiting(live)
        self.uncount(live)
        self.timeline.wake_by(now)

    def unqueue(self, live: Live) -> None:
        """Delete a request's entry in the queue, so that the request may enter the queue again."""
        self._queue.delete(live)
        self.timeline.note_change()

    def halt(self, now: float, cause: Cause) -> list[Live]:
        """Stop in the middle of an iteration; complete iterations count. Returns the requests here, by id."""
        batch, timeline = self.batch, self.timeline
        n = timeline.ticks_ahead(now)
        timeline.k += n
        batch.tick += n
        timeline.close()
        for live in batch.decoding.values():
            batch.sync(live)
        running = [*batch.prefilling.values(), *batch.decoding.values()]
        for live in running:
            batch.write_segment(live, now, cause)
        return sorted([*self._queue.requests(), *running, *self.transit.leaving.values()], key=attrgetter("id"))

    def crash(self, now: float) -> list[Live]:
        """Lose everything at once. Returns the requests that were here, without their KV."""
        batch, timeline = self.batch, self.timeline
        lost = self.halt(now, Cause.CRASHED)
        for live in lost:
            if live.id in batch.resident:
                live.swapped_tokens = live.resident_blocks = 0
            batch.host.drop(live)
            live.shared_blocks = live.computed_tokens = live.expected_cached_tokens = 0
            live.check_tick = -1
            live.enter(HELD)
        timeline.version += 1
        batch.clear()
        timeline.reset()
        self.transit.clear()
        self._clear_requests()
        self.recent_loras.clear()
        if self.cache_index is not None:
            self.cache_index.forget_placed()
            if self.cache_index.guesses:
                self.cache_index.clear()
        self.is_up = False
        timeline.note_change()
        return lost

    def slow_down(self, factor: float, now: float) -> None:
        """Let iterations take so many times as long as their step times, from the next one on."""
        self.timeline.catch_up(now)
        self.timeline.slowdown = factor
        self.batch.is_changed = True
        self.timeline.wake_by(now)

    # Transfers of KV caches (see `transfers`).

    def expect(self, live: Live) -> None:
        """Count a request as waiting here, no longer as arriving: it is sent before its KV."""
        transit = self.transit
        transit.num_arriving -= 1
        self.batch.num_waiting += 1
        transit.expected[live.id] = live
        self.count(live)

    def unexpect(self, live: Live) -> None:
        """Count an expected request as arriving again: its KV is here, or will not come."""
        transit = self.transit
        self.uncount(live)
        del transit.expected[live.id]
        self.batch.num_waiting -= 1
        transit.num_arriving += 1

    def receive(self, live: Live, blocks: int, now: float) -> None:
        """Enqueue a request whose `swapped_tokens` of KV are in these reserved blocks; 0 = in host memory."""
        if blocks:
            self.transit.reserved_blocks -= blocks
            self.batch.hold_blocks(live, blocks)
            self.timeline.wake_by(now)
        self.enqueue(live, now, tokenized=True)

    def send_waiting(self, live: Live, now: float) -> None:
        """Take a waiting request out of the queue, to copy its KV from host memory."""
        self.unqueue(live)
        self.batch.num_waiting -= 1
        self.transit.add_leaving(live)
        self.timeline.wake_by(now)

    def release(self, live: Live, now: float) -> None:
        """Let go of a paused request and its KV."""
        batch = self.batch
        self.timeline.catch_up(now)
        del self.transit.leaving[live.id]
        if live.swapped_tokens:
            batch.host.drop(live)
        else:
            own = live.computed_tokens - live.shared_blocks * batch.kv.block
            if batch.prefixes is not None:
                batch.prefixes.release(live, batch.kv.blocks(own), batch.tick, live.computed_tokens)
            batch.kv.pinned -= batch.kv.blocks(own)
            live.shared_blocks = 0
        self.uncount(live)
        self.timeline.wake_by(now)

    def use_store(self, store: StoreClient | None) -> None:
        """Extend the prefix cache by a shared store, and by the engine's keeping. Call before the first request."""
        engine, keeping = self.batch.engine, None
        keep_s, share = engine.kv_keep
        if engine.prefix_caching and keep_s:
            keeping = Keeping(keep_s, share, self._now, self._end_keeping_at)
        if store is not None or keeping is not None:
            self.batch.extend_cache(store, keeping)

    def _now(self) -> float:
        return self._kernel.now

    def _end_keeping_at(self, time_s: float, cache: PrefixCache) -> None:
        self._kernel.at(time_s, COMMAND, self.id - BEFORE, self._end_keeping, cache)

    def _end_keeping(self, now: float, cache: PrefixCache) -> None:
        if self.batch.prefixes is cache:
            cache.end_keeping(now, self._tick_now())

    def take_back(self, live: Live, now: float) -> None:
        """Put a paused request back into the queue. Its KV is still here."""
        del self.transit.leaving[live.id]
        if not live.swapped_tokens:
            batch = self.batch
            own = live.computed_tokens - live.shared_blocks * batch.kv.block
            live.swapped_tokens = live.computed_tokens
            batch.hold_blocks(live, batch.kv.blocks(own))
            self.timeline.wake_by(now)
        self.uncount(live)
        self.enqueue(live, now, tokenized=True)

    def count(self, live: Live) -> None:
        """Count a request as placed here."""
        batch = self.batch
        if self._changes.is_read:
            self._changes.ids.append(self.id)
        self.num_in_flight += 1
        batch.generated_offset += live.generated_tokens
        self._output_tokens += live.output_tokens
        self.num_by_tier[live.tier] += 1
        if live.lora:
            self.recent_loras.note(live.lora)
        if self.cache_index is not None:
            self.cache_index.placed(live)
        if self._queue.queued_ordering is not None:
            live.queue = self._queue.queued_ordering.queue(live)
            self._queue_lengths[live.queue] += 1

    def uncount(self, live: Live) -> None:
        """Stop counting a request as placed here."""
        batch = self.batch
        if self._changes.is_read:
            self._changes.ids.append(self.id)
        self.num_in_flight -= 1
        batch.generated_offset -= live.generated_tokens
        self._output_tokens -= live.output_tokens
        self.num_by_tier[live.tier] -= 1
        if self._queue.queued_ordering is not None:
            self._queue_lengths[live.queue] -= 1
        if batch.stalls is not None:
            batch.stalls.forget(live)

    # At a boundary.

    def wake(self, now: float, version: int) -> None:
        """Handle boundary `k_end`, unless the replica has gone to sleep again since `version`."""
        timeline = self.timeline
        if version != timeline.version:
            return
        batch = self.batch
        k = timeline.k_end
        if timeline.advances:
            if batch.ticks_are_plain:
                batch.tick += k - timeline.k
            else:
                batch.advance(k - timeline.k)
        timeline.k = k
        if self._cancelling:
            for live in self._cancelling:
                self._cancel_running(live, now)
            self._cancelling = []
        if batch.chunk_tokens:
            self._end_prefills(now)
        checks, tick = batch.checks, batch.tick
        while checks and checks[0][0] <= tick:
            live = heappop(checks)[2]
            if live.check_tick == tick and batch.decoding.get(live.id) is live:
                live.generated_tokens = live.joined_generated + tick - live.joined_tick
                self._check(live, now)
        if self._pausing:  # after the checks: one that ends now is not paused
            pausing, self._pausing = self._pausing, []
            for live in pausing:
                self._pause_running(live, now)
        if self.transit.pausing:
            self.transit.pause_all(now)
        events = self._events
        if not self._undecided and (not events or events[0][0] > now):
            self._schedule(now)
        else:
            timeline.note_change()
            timeline.request_decision()

    def decide(self, now: float) -> None:
        """Decide the next iteration: everything else at this instant has happened."""
        self.timeline.is_due = False
        if self.is_up:
            self._schedule(now)

    def _end_prefills(self, now: float) -> None:
        """Account for the iteration's prefill chunks. A complete prompt gives a token, and decodes from now on."""
        batch = self.batch
        chunks, batch.chunks, batch.chunk_shapes, batch.chunk_tokens = batch.chunks, [], [], 0
        batch.is_changed = True
        for live, tokens in chunks:
            if live.stage is not PREFILLING:
                continue
            batch.prefill_tokens_left -= tokens
            if live.computed_tokens < live.target_tokens:
                continue
            if live.decode_replica < 0 or self._makes_first_token:
                live.prefill_end_s = now
                live.generated_tokens += 1
                batch.generated_offset += 1
                if live.first_token_s != live.first_token_s and not (
                    self._sends_first_token and self._sends_first(live)
                ):
                    live.first_token_s = now + live.response_s
            batch.end_prefill(live)
            self._check(live, now)
            if self._changes.is_read:
                self._changes.ids.append(self.id)
            if live.decode_replica >= 0 and live.stage is DECODING and live.move is None:
                self._listener.on_prefilled(live, now)
            if live.sent_to is not None:
                self._listener.on_prompt_computed(live, now)

    def _sends_first(self, live: Live) -> bool:
        """Whether the request's first token is sent with its KV cache, and is not the only one."""
        return live.decode_replica >= 0 and live.output_tokens > 1

    def _check(self, live: Live, now: float) -> None:
        """Check a decoding request for its first token, the end of its reasoning and its end; set the next check."""
        batch = self.batch
        generated = live.generated_tokens
        if live.first_token_s != live.first_token_s and generated:
            if self._sends_first_token and self._sends_first(live):
                self._requeue(live)
                batch.set_check(live)
                return
            live.first_token_s = now + live.response_s
        if live.answer_s != live.answer_s and generated > live.reasoning_tokens:
            answer_s = now + live.response_s if live.reasoning_tokens else live.first_token_s
            live.answer_s = max(answer_s, live.first_token_s)
            if batch.stalls is not None:
                batch.stalls.update(live)
        if generated >= live.output_tokens:
            if live.move is not None:
                live.move.abandon(now, MoveOutcome.ENDED)
            batch.stop_decode(live)
            batch.write_segment(live, now, Cause.FINISHED)
            self.uncount(live)
            self._listener.on_finished(live, now)
            return
        if 0 < live.turn_ends_at <= generated:
            live.turn = batch.tick
        if live.reasoning_tokens and live.phase is Phase.REASONING and generated >= live.reasoning_tokens:
            self._end_reasoning(live, now)
            if live.stage is not DECODING:
                return
        elif self._queue.queued_ordering is not None:
            self._requeue(live)
        batch.set_check(live)

    def _end_reasoning(self, live: Live, now: float) -> None:
        live.phase = Phase.ANSWERING
        live.reasoning_end_s = now + live.response_s
        self._requeue(live)
        if self.batch.stalls is not None:
            self.batch.stalls.update(live)
        self.timeline.note_change()
        self._listener.on_phase_changed(live, now)

    def _requeue(self, live: Live) -> None:
        """Move a request to another of the ordering's queues if it belongs there: its quantum begins anew."""
        batch = self.batch
        if self._queue.queued_ordering is None:
            return
        queue = self._queue.queued_ordering.queue(live)
        if queue != live.queue:
            self.timeline.note_change()
            self._queue_lengths[live.queue] -= 1
            self._queue_lengths[queue] += 1
            live.queue = queue
            live.turn = live.quantum_tick = batch.tick

    def _cancel_running(self, live: Live, now: float) -> None:
        if live.move is not None:
            live.move.abandon(now, MoveOutcome.ENDED)
        if live.stage is DECODING:
            self.batch.stop_decode(live)
        else:
            self.batch.stop_prefill(live)
        self.batch.write_segment(live, now, Cause.CANCELLED)
        self.uncount(live)
        self._listener.on_cancelled(live, now)

    def _pause_running(self, live: Live, now: float) -> None:
        """Let go of a request that decodes, or that was preempted here since. One that has ended has gone already."""
        if live.stage is WAITING:
            self.remove_waiting(live, now)
        elif live.stage is DECODING:
            if live.move is not None:
                live.move.abandon(now, MoveOutcome.PREEMPTED)
            self.batch.stop_decode(live)
            self.batch.write_segment(live, now, Cause.PREEMPTED)
            self.uncount(live)
        else:
            return
        live.computed_tokens = live.shared_blocks = 0
        self._paused.add(live)
        self._listener.on_paused(live, now)

    # The next iteration.

    def _schedule(self, now: float) -> None:
        """Decide the next iteration, and sleep for as long as it repeats."""
        batch, queue, timeline = self.batch, self._queue, self.timeline
        batch.must_recheck = False
        if self._changes.is_read:
            self._changes.ids.append(self.id)
        if queue.inbox:
            self._open_inbox(now)
        if queue.entries or batch.prefilling:
            if queue.has_moving_ranks and queue.entries:
                if queue.quantum is not None:
                    batch.renew_quanta(queue.quantum)
                if queue.moving_ordering is not None:
                    queue.rerank(now)
            timeline.advances = self._batching_rule(batch, now)
            if queue.set_aside:
                queue.take_back()
        else:
            timeline.advances = True
            if not batch.kv.can_tick(batch.tick):
                make_room(batch, now)
        if not batch.decoding and not batch.chunk_tokens:
            self._rest(now)
            return
        if batch.is_changed or batch.chunk_tokens or timeline.k == timeline.valid:
            timeline.open(now)
        elif self._exact:
            timeline.check_line()
        is_single = batch.chunk_tokens or self._exact or (batch.must_recheck and batch.num_waiting)
        timeline.sleep_until(timeline.k + (1 if is_single else self._horizon(now)))

    def _rest(self, now: float) -> None:
        """Wait for events: no request runs. Raises AssertionError if waiting requests would wait forever."""
        batch, timeline, transit = self.batch, self.timeline, self.transit
        timeline.close()
        timeline.reset()
        batch.is_changed = False
        if batch.must_recheck:
            timeline.wake_by(now)
        elif self._queue.first() is not None and not (transit.num_arriving or transit.expected or transit.leaving):
            raise AssertionError(f"replica {self.id} is stuck with {batch.num_waiting} requests waiting")
        for live in self._queue.inbox:
            self._kernel.at(live.ready_s, COMMAND, live.id, self._on_ready)

    def _horizon(self, now: float) -> int:
        """Number of iterations that the present batch of decoding requests repeats, at least one."""
        batch, queue, timeline = self.batch, self._queue, self.timeline
        checks = batch.checks
        while (live := checks[0][2]).check_tick != checks[0][0] or live.replica != self.id:
            heappop(checks)
        n = checks[0][0] - batch.tick
        if batch.window is not None:
            n = batch.ticks_in_window(n)
        if timeline.valid is not None:
            n = min(n, timeline.valid - timeline.k)
        if queue.inbox:
            n = self._until_ready(n)
        if queue.has_moving_ranks and queue.entries:
            n = self._until_ranks_move(n, now)
        if batch.speculation is not None:
            return batch.kv.iterations_left(batch.tick, n, batch.speculation.setting.most_tokens)
        return n if n == 1 else batch.kv.ticks_left(batch.tick, n)

    def _until_ready(self, n: int) -> int:
        """Iterations until the scheduler sees another request, at most `n`."""
        t = self.timeline
        ready_s = min([live.ready_s for live in self._queue.inbox])
        k = first_boundary_at(t.start_s, t.a_s, t.b_s, ready_s, t.k, t.k + n) + self._lag - t.k
        return n if k > n else k if k > 1 else 1

    def _until_ranks_move(self, n: int, now: float) -> int:
        """Iterations until a rank changes while a request waits, at most `n`."""
        batch, queue, t = self.batch, self._queue, self.timeline
        if queue.quantum is not None and queue.preemptive:
            first = min(live.quantum_tick for live in batch.decoding.values())
            n = min(n, first + queue.quantum - batch.tick)
        ordering = queue.moving_ordering
        if ordering is not None:
            lives = [*batch.decoding.values(), *queue.queued_requests()]
            changes = [time_s for live in lives if (time_s := ordering.next_change(live, now)) is not None]
            if changes:
                n = first_boundary_at(t.start_s, t.a_s, t.b_s, min(changes), t.k + 1, t.k + n) - t.k
        return n

    def _open_inbox(self, now: float) -> None:
        """Queue the requests that are ready. A busy engine with a scheduling lag looked one boundary earlier."""
        batch, timeline = self.batch, self.timeline
        seen_s = now
        if self._lag and (batch.decoding or batch.prefilling):
            k = timeline.k - 1
            seen_s = timeline.opened_s
            if k > 0:
                seen_s = boundary_s(timeline.start_s, timeline.a_s, timeline.b_s, k)
        self._queue.take_ready(seen_s, now)

    # What views read, as of the last complete iteration.

    @property
    def num_waiting(self) -> int:
        return self.batch.num_waiting

    @property
    def num_arriving(self) -> int:
        return self.transit.num_arriving

    @property
    def prefill_tokens_left(self) -> int:
        return self.batch.prefill_tokens_left

    @property
    def block_size_tokens(self) -> int:
        return self.batch.kv.block

    @property
    def max_loras(self) -> int:
        return self.recent_loras.num_slots

    @property
    def num_running(self) -> int:
        batch = self.batch
        return len(batch.decoding) + len(batch.prefilling)

    @property
    def queue_lengths(self) -> Sequence[int]:
        return self._queue_lengths or (self.num_in_flight,)

    @property
    def loras(self) -> Collection[str]:
        return {*self.recent_loras.names, *self.loras_running}

    @property
    def loras_running(self) -> Collection[str]:
        """Adapters of running requests."""
        batch = self.batch
        return {live.lora for part in (batch.prefilling, batch.decoding) for live in part.values() if live.lora}

    @property
    def loras_waiting(self) -> Collection[str]:
        return {live.lora for live in self._queue.requests() if live.lora}

    def cached_tokens(self, request: RequestView, /) -> int:
        index, prefixes = self.cache_index, self.batch.prefixes
        tokens = 0
        if index is not None:
            tokens = index.cached_tokens(request)
        elif prefixes is not None and request.prefix:
            tokens = prefixes.hit_blocks(cast(Live, request), self._tick_now()) * self.batch.kv.block
        self._matched_request, self._matched_cached, self._matched_loadable = request.id, tokens, 0
        return tokens

    def loadable_tokens(self, request: RequestView, /) -> int:
        index, prefixes = self.cache_index, self.batch.prefixes
        tokens = 0
        if index is not None:
            tokens = index.loadable_tokens(request)
            if self.batch.store is not None:  # the store itself is asked, not its events
                block = self.batch.kv.block
                start = index.cached_tokens(request) + tokens
                end = self.batch.store.reach(spans(request.prefix, block), start // block)
                most = (request.prompt_tokens + request.generated_tokens - 1) // block
                tokens += max(0, min(end, most) * block - start)
        elif prefixes is not None and request.prefix:
            live = cast(Live, request)
            tokens = prefixes.loadable_blocks(live, prefixes.hit_blocks(live, self._tick_now())) * self.batch.kv.block
        if self._matched_request == request.id:
            self._matched_loadable = tokens
        return tokens

    @property
    def expected_cached_tokens(self) -> int:
        return self.batch.expected_cached_tokens

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
        """Cached segments that have changed since the last call (`Batch.report_cache_changes`)."""
        prefixes = self.batch.prefixes
        return [] if prefixes is None else prefixes.changes(self._tick_now())

    def _tick_now(self) -> int:
        """The last completed tick."""
        ahead = self.timeline.ticks_ahead(self._kernel.now) if self.batch.decoding else 0
        return self.batch.tick + ahead

    @property
    def kv_blocks_used(self) -> int:
        batch = self.batch
        if not batch.decoding:
            return batch.kv.pinned
        tick, t = batch.tick, self.timeline
        if batch.speculation is not None:
            return batch.kv.used(self._ticks_ahead() + batch.tick)
        if t.advances and t.k != t.k_end:  # `_ticks_ahead` written out, as routers read this of every replica
            k = completed(t.start_s, t.a_s, t.b_s, self._kernel.now, t.k, t.k_end)
            tick += k - t.k
            if self._changes.is_read and k < t.k_end:
                end_s = boundary_s(t.start_s, t.a_s, t.b_s, k + 1)
                if end_s < self.holds_until_s:
                    self.holds_until_s = end_s
        return batch.kv.used(tick)

    def _ticks_ahead(self) -> int:
        """As the timeline's. What the caller computes from it holds until the next tick."""
        ticks = self.timeline.ticks_ahead(self._kernel.now)
        if self._changes.is_read:
            self.holds_until_s = min(self.holds_until_s, self.timeline.holds_until_s(ticks))
        return ticks

    @property
    def kv_blocks_host(self) -> int:
        return self.batch.kv.blocks(self.batch.host.used_tokens)

    @property
    def head_demand_blocks(self) -> int:
        live = self._queue.first()
        if live is None:
            return 0
        return self.batch.kv.blocks(live.swapped_tokens or live.target_tokens) - live.resident_blocks

    @property
    def tokens_generated(self) -> int:
        batch = self.batch
        if not batch.decoding:
            return batch.generated_offset
        tick = self._ticks_ahead() + batch.tick
        return batch.generated_offset + len(batch.decoding) * tick

    @property
    def output_tokens_left(self) -> int:
        return self._output_tokens - self.tokens_generated

    @property
    def answers_on_pace(self) -> bool:
        stalls, now = self.batch.stalls, self._kernel.now
        if stalls is None:
            stalls = self.batch.stalls = StallTracker(self._pacer)
            for live in self.requests:
                stalls.update(live)
        tick = self._ticks_ahead() + self.batch.tick
        if not stalls.all_on_pace(tick, now):
            return False
        if self._paused:
            self.holds_until_s = now
            return self._paused.are_on_pace(self._pacer, now)
        if self._changes.is_read:
            self.holds_until_s = min(self.holds_until_s, stalls.first_stall_s(tick))
        return True

    @property
    def paused(self) -> list[Live]:
        if not self._paused:
            return []
        self.holds_until_s = self._kernel.now
        return self._paused.held()

    @property
    def requests(self) -> list[Live]:
        batch, transit = self.batch, self.transit
        tick = self._ticks_ahead() + batch.tick
        self.holds_until_s = self._kernel.now
        for live in batch.decoding.values():
            live.generated_tokens = live.joined_generated + tick - live.joined_tick
        return [
            *self._queue.requests(),
            *batch.prefilling.values(),
            *batch.decoding.values(),
            *transit.expected.values(),
            *(live for live in transit.leaving.values() if not live.move.is_sent),
        ]
