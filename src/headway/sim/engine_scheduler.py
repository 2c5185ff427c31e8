"""The scheduler of a replica's engine: which waiting requests it sees, and what it decides at a boundary.

A request reaches the scheduler through the engine's frontend, which may take time. At a boundary, a batching rule
decides the next iteration, which repeats until something changes. The *horizon* is the number of repetitions.
"""

from __future__ import annotations

from math import inf

from headway.control.live import WAITING, Live
from headway.sim.batching import BATCHING_RULES
from headway.sim.in_transit import InTransit
from headway.sim.kernel import COMMAND, Kernel
from headway.sim.preemption import make_room
from headway.sim.replica_resources import Launches, PoolResources
from headway.sim.timeline import Timeline, first_boundary_at


class EngineScheduler:
    """Decides what one replica runs, and for how long. With `is_exact`, each iteration is decided separately."""

    __slots__ = (
        "_batch", "_batching_rule", "_changes", "_has_frontend", "_is_exact", "_kernel", "_lag", "_launches",
        "_queue", "_resources", "_timeline", "_transit", "request_s", "tokenize_s",
    )  # fmt: skip

    def __init__(
        self,
        resources: PoolResources,
        kernel: Kernel,
        timeline: Timeline,
        transit: InTransit,
        is_exact: bool,
    ) -> None:
        self._batch, self._queue = transit.batch, transit.batch.queue
        self._timeline, self._transit = timeline, transit
        self._kernel, self._changes = kernel, kernel.changes
        self._is_exact = is_exact
        self._batching_rule = BATCHING_RULES[resources.engine.batching]
        self._lag = resources.schedule_lag
        self._resources = resources
        self._launches: Launches | None = None
        self.request_s, self.tokenize_s = resources.request_s, resources.tokenize_s
        """Frontend time per request, and per prompt token."""
        self._has_frontend = bool(self._lag or self.request_s or self.tokenize_s)
        """Whether requests reach the scheduler some time after their placement."""

    def receive(self, live: Live, now: float, tokenized: bool, delay_s: float) -> None:
        """Queue a request that counts as waiting, after `delay_s` and the frontend's time."""
        batch, queue, timeline = self._batch, self._queue, self._timeline
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
        if self._timeline.k == self._timeline.k_end:
            self._timeline.wake_by(now)

    def schedule(self, now: float) -> None:
        """Decide the next iteration, and sleep while it repeats."""
        batch, queue, timeline = self._batch, self._queue, self._timeline
        batch.must_recheck = False
        if self._changes.is_read:
            self._changes.ids.append(batch.replica)
        if queue.inbox:
            queue.take_ready(timeline.scheduled_s(now), now)
        if queue.entries or batch.prefilling:
            if queue.has_moving_ranks and queue.entries:
                if queue.quantum is not None:
                    batch.renew_quanta(queue.quantum)
                if queue.moving_ordering is not None:
                    queue.rerank(now)
            timeline.advances = self._batching_rule(batch, timeline.ended_at(now))
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
        elif self._is_exact:
            timeline.check_line()
        is_single = batch.chunk_tokens or self._is_exact or (batch.must_recheck and batch.num_waiting)
        timeline.sleep_until(timeline.k + (1 if is_single else self._horizon(now)))

    def _rest(self, now: float) -> None:
        """Wait for events while no request runs. Raises AssertionError if waiting requests would wait forever."""
        batch, timeline, transit = self._batch, self._timeline, self._transit
        timeline.close()
        timeline.reset()
        batch.is_changed = False
        if self._queue.inbox:
            num = len(self._queue.entries)
            self._queue.take_ready(now, now)  # nothing was scheduled ahead
            if len(self._queue.entries) > num:
                self.schedule(now)
                return
        if batch.must_recheck:
            timeline.wake_by(now)
        elif self._queue.first() is not None and not (transit.num_arriving or transit.expected or transit.leaving):
            raise AssertionError(f"replica {batch.replica} is stuck with {batch.num_waiting} requests waiting")
        for live in self._queue.inbox:
            self._kernel.at(live.ready_s, COMMAND, live.id, self._on_ready)

    def _horizon(self, now: float) -> int:
        """Number of iterations, at least one, for which the current decoding batch repeats."""
        batch, queue, timeline = self._batch, self._queue, self._timeline
        n = int(batch.checks.ticks.least) - batch.tick
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
        t, ready_s = self._timeline, inf
        for live in self._queue.inbox:
            if live.ready_s < ready_s:
                ready_s = live.ready_s
        k = first_boundary_at(t.start_s, t.a_s, t.b_s, ready_s, t.k, t.k + n) + self._lag - t.k
        return n if k > n else k if k > 1 else 1

    def _until_ranks_move(self, n: int, now: float) -> int:
        """Iterations until a rank changes while a request waits, at most `n`."""
        batch, queue, t = self._batch, self._queue, self._timeline
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

    def launches_first(self, now: float) -> bool:
        """Whether the host launches the next iteration before it reports the outputs of the one that ends now, or that
        it would report now. It then reports them later (`Timeline.report_late`).

        The engine has already scheduled that iteration, so requests that end now still count. If no client waits for
        an output of this iteration, nothing is reported.
        """
        batch, timeline, launches, tokens = self._batch, self._timeline, self._launches, 0
        has_chunks, tick = batch.chunk_tokens > 0, batch.tick
        if timeline.advances:
            tick += timeline.k_end - timeline.k
        if not has_chunks and batch.checks.ticks.least > tick:
            return False
        if launches is None:
            launches = self._launches = self._resources.launches
            timeline.least_launch_s = min(launches.graph_s, launches.parts_s, launches.whole_s)
        has_more = batch.prefill_tokens_left > batch.chunk_tokens
        scheduled_s = timeline.scheduled_s(now)
        if scheduled_s + (launches.longest_s if has_more else launches.graph_s) <= now:
            return False
        num_decode, most = len(batch.decoding), launches.most_graph_tokens
        if has_more:
            tokens = self._next_prompt_tokens(scheduled_s, most, tick)
        if has_chunks and (tokens or not num_decode):
            num_decode += sum([_decodes_next(live) for live, _ in batch.chunks])
        if tokens:
            launch_s = launches.whole_s if tokens + num_decode > most else launches.parts_s
        elif has_chunks and num_decode:
            launch_s = launches.graph_s
        else:
            return False
        ended_s = timeline.ended_at(now)
        late_s = scheduled_s + launch_s - ended_s
        if late_s <= timeline.late_s:
            return False
        timeline.report_late(late_s, scheduled_s, ended_s)
        return True

    def _next_prompt_tokens(self, seen_s: float, enough: int, tick: int) -> int:
        """Prompt tokens that the next iteration computes, counted until they exceed `enough`."""
        batch, queue, tokens = self._batch, self._queue, 0
        for live in batch.prefilling.values():
            tokens += live.target_tokens - live.computed_tokens
        for _, _, live in queue.entries:
            if tokens > enough:
                break
            if live.stage is WAITING and not live.swapped_tokens:
                chunk = self._admissible_tokens(live, tokens, tick)
                if not chunk:
                    break
                tokens += chunk
        else:
            for live in queue.inbox:
                if live.ready_s <= seen_s and not live.swapped_tokens and tokens <= enough:
                    tokens += self._admissible_tokens(live, tokens, tick)
        return min(tokens, batch.max_num_batched_tokens - len(batch.decoding))

    def _admissible_tokens(self, live: Live, tokens: int, tick: int) -> int:
        """Prompt tokens of a waiting request that the next iteration computes beside `tokens` others."""
        batch = self._batch
        kv, prefixes = batch.kv, batch.prefixes
        if len(batch.decoding) + len(batch.prefilling) >= batch.max_num_seqs:
            return 0
        left = live.target_tokens
        if prefixes is not None and live.prefix:
            # The cache is that before this iteration, which views read, too: it does not go back in time.
            left -= prefixes.hit_blocks(live, tick - 1 if self._timeline.advances else tick) * kv.block
        chunk = min(left, batch.max_num_batched_tokens - len(batch.decoding) - tokens)
        return chunk if kv.can_tick(tick, -(-(tokens + chunk) // kv.block) + kv.watermark) else 0


def _decodes_next(live: Live) -> bool:
    """Whether a request with a chunk of its prompt in this iteration decodes in the next one."""
    is_computed = live.computed_tokens >= live.target_tokens
    return is_computed and live.decode_replica < 0 and live.generated_tokens + 1 < live.output_tokens
