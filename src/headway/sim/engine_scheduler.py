"""The scheduler of a replica's engine: which waiting requests it sees, and what it decides at a boundary.

A request reaches the scheduler through the engine's frontend, which may take time. At a boundary, a batching rule
decides the next iteration, which repeats until something changes. The *horizon* is the number of repetitions.
"""

from __future__ import annotations

from heapq import heappop

from headway.control.live import Live
from headway.core.fleet import Engine
from headway.core.record import boundary_s
from headway.sim.batching import BATCHING_RULES
from headway.sim.in_transit import InTransit
from headway.sim.kernel import COMMAND, Kernel
from headway.sim.preemption import make_room
from headway.sim.timeline import Timeline, first_boundary_at


class EngineScheduler:
    """Decides what one replica runs, and for how long. With `is_exact`, each iteration is decided separately."""

    __slots__ = (
        "_batch", "_batching_rule", "_changes", "_has_frontend", "_is_exact", "_kernel", "_lag", "_queue", "_timeline",
        "_transit", "request_s", "tokenize_s",
    )  # fmt: skip

    def __init__(self, engine: Engine, kernel: Kernel, timeline: Timeline, transit: InTransit, is_exact: bool) -> None:
        self._batch, self._queue = transit.batch, transit.batch.queue
        self._timeline, self._transit = timeline, transit
        self._kernel, self._changes = kernel, kernel.changes
        self._is_exact = is_exact
        self._batching_rule = BATCHING_RULES[engine.batching]
        self._lag = engine.schedule_lag
        self.request_s, self.tokenize_s = engine.request_overhead_s, engine.tokenize_s_per_token
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
        if batch.must_recheck:
            timeline.wake_by(now)
        elif self._queue.first() is not None and not (transit.num_arriving or transit.expected or transit.leaving):
            raise AssertionError(f"replica {batch.replica} is stuck with {batch.num_waiting} requests waiting")
        for live in self._queue.inbox:
            self._kernel.at(live.ready_s, COMMAND, live.id, self._on_ready)

    def _horizon(self, now: float) -> int:
        """Number of iterations, at least one, for which the current decoding batch repeats."""
        batch, queue, timeline = self._batch, self._queue, self._timeline
        checks = batch.checks
        while (live := checks[0][2]).check_tick != checks[0][0] or live.replica != batch.replica:
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
        t = self._timeline
        ready_s = min([live.ready_s for live in self._queue.inbox])
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

    def _open_inbox(self, now: float) -> None:
        """Queue the requests that are ready. With a scheduling lag, a busy engine looked one boundary earlier."""
        batch, timeline = self._batch, self._timeline
        seen_s = now
        if self._lag and (batch.decoding or batch.prefilling):
            k = timeline.k - 1
            seen_s = timeline.opened_s
            if k > 0:
                seen_s = boundary_s(timeline.start_s, timeline.a_s, timeline.b_s, k)
        self._queue.take_ready(seen_s, now)
