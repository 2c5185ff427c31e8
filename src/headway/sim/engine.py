"""One simulated replica: its queue, its batch, and the stretches in which nothing changes.

An iteration ends at a *boundary*. At a boundary requests finish, then `batching` decides what runs next. While a
batch stays the same its iterations form an *epoch*, whose boundaries one clock function gives. Nothing happens
inside an epoch until its *horizon*, so the replica sleeps until then; what comes from outside may `cut` the sleep
short at the next boundary. With `exact`, the horizon is always the next boundary, and nothing else differs.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from collections.abc import Callable, Sequence
from typing import Protocol

from headway.control.live import NEVER, Live, Stage
from headway.control.recorder import Recorder
from headway.core.fleet import Pool
from headway.core.policy import MovingOrdering, Ordering, SteppedOrdering
from headway.core.record import Cause, boundary_s
from headway.core.request import Phase
from headway.sim.batching import ADMISSIONS
from headway.sim.clock import completed, first_boundary_at
from headway.sim.kernel import Kernel, Priority
from headway.sim.kvcache import KvCache
from headway.sim.prefixcache import PrefixCache
from headway.sim.swap import HostMemory


Line = Callable[[int, int, Sequence[tuple[int, int]], int, int], tuple[float, float, int | None]]
"""perf's answer to a batch: see `perf.step.StepModel.line`."""


class Listener(Protocol):
    """Who hears of what requests do (control)."""

    def finished(self, live: Live, now: float) -> None: ...
    def cancelled(self, live: Live, now: float) -> None: ...
    def phase_changed(self, live: Live, now: float) -> None: ...


class Replica:
    """One replica. Satisfies `core.view.OracleReplicaView`."""

    def __init__(
        self,
        id: int,
        pool: Pool,
        line: Line,
        kv_blocks: int,
        swap: HostMemory,
        ordering: Ordering,
        kernel: Kernel,
        listener: Listener,
        recorder: Recorder,
        exact: bool,
    ) -> None:
        self.id = id
        self.pool, self.model, self.gpu, self.region = pool.name, pool.model.name, pool.gpu.name, pool.region
        self.engine = engine = pool.engine
        self.max_num_seqs = engine.max_num_seqs
        self.kernel, self.listener, self.recorder, self.exact = kernel, listener, recorder, exact
        self._line = line
        self.swap = swap
        self.window = pool.model.sliding_window_tokens
        self.kv_blocks_total = kv_blocks
        self.max_context_tokens = pool.model.max_context_tokens
        self._set_ordering(ordering)
        self._admit = ADMISSIONS[engine.batching]
        self.is_up = True
        self.tick = 0
        self._empty()

    def _set_ordering(self, ordering: Ordering) -> None:
        self.ordering = ordering
        self.rank = ordering.rank
        self.quantum, self.preemptive = ordering.quantum, ordering.preemptive
        self.moving = ordering if isinstance(ordering, MovingOrdering) else None
        self.stepped = ordering if isinstance(ordering, SteppedOrdering) else None

    def _empty(self) -> None:
        """The state of an idle replica, with nothing cached."""
        engine = self.engine
        self.kv = KvCache(self.kv_blocks_total, engine.block_size_tokens, engine.watermark)
        self.prefixes = PrefixCache(self.kv) if engine.prefix_caching else None
        self.waiting: list[tuple[object, int, Live]] = []
        self.inbox: list[Live] = []
        self.prefilling: dict[int, Live] = {}
        self.decoding: dict[int, Live] = {}
        self.milestones: list[tuple[int, int, Live]] = []
        self.saturations: list[tuple[int, int]] = []
        self.growing: dict[int, int] = {}
        self.cancelling: list[Live] = []
        self.num_waiting = self.num_in_flight = 0
        self.prefill_tokens_left = self._generated = self._output = 0
        self.context = self.window_tokens = self.num_growing = 0
        self.start_s = self.a_s = self.b_s = 0.0
        self.valid: int | None = None
        self.k = self.k_end = self.version = 0
        self.chunks: list[tuple[Live, int]] = []
        self.shape: list[tuple[int, int]] = []
        self.advances = False
        self.is_due = self.changed = self.again = False
        self.stall_s = 0.0

    # What a view reads.

    @property
    def num_running(self) -> int:
        """Requests in the batch."""
        return len(self.decoding) + len(self.prefilling)

    @property
    def kv_blocks_used(self) -> int:
        """At the last completed iteration."""
        return self.kv.used(self.tick, self._ahead(self.kernel.now))

    @property
    def tokens_generated(self) -> int:
        """At the last completed iteration."""
        return self._generated + len(self.decoding) * self._ahead(self.kernel.now)

    @property
    def output_tokens_left(self) -> int:
        """True output tokens to come (an oracle's)."""
        return self._output - self.tokens_generated

    def _ahead(self, now: float) -> int:
        """Ticks completed since the last boundary at which something happened."""
        if not self.advances or self.k_end - self.k < 1:
            return 0
        return completed(self.start_s, self.a_s, self.b_s, now, self.k, self.k_end) - self.k

    # What comes from outside.

    @property
    def max_request_tokens(self) -> int:
        """Longest request, prompt and output together, that runs here when it is alone."""
        in_memory = (self.kv.total - self.kv.watermark) * self.kv.block + 1
        return min(in_memory, self.max_context_tokens)

    def enqueue(self, live: Live, now: float) -> None:
        """A request is placed here."""
        self.num_in_flight += 1
        live.enqueued_s = now
        live.replica = self.id
        if self.quantum is not None:
            live.turn = self.tick + self._ahead(now)
        self._generated += live.generated_tokens
        self._output += live.output_tokens
        if self.engine.schedule_lag and (self.k != self.k_end or self.num_running):
            live.stage = Stage.WAITING
            live.target_tokens = live.prompt_tokens + live.generated_tokens
            self.prefill_tokens_left += live.target_tokens
            self.num_waiting += 1
            self.inbox.append(live)
            self._wake_soon(now)
            return
        self.queue(live, now)
        if self.k == self.k_end:
            self._ask(now)
        elif self.head() is live and (
            self.preemptive or self.num_running < self.max_num_seqs or self.quantum is not None
        ):
            self._cut(now)

    def queue(self, live: Live, now: float) -> None:
        """Put a request in line, to prefill what it has (again) unless it is swapped out."""
        live.stage = Stage.WAITING
        if not live.swapped_tokens:
            live.target_tokens = live.prompt_tokens + live.generated_tokens
            live.computed_tokens = 0
            self.prefill_tokens_left += live.target_tokens
        self.num_waiting += 1
        self._stand(live, now)

    def _stand(self, live: Live, now: float) -> None:
        live.rank = rank = self.rank(live, now)
        heappush(self.waiting, (rank, live.id, live))

    def cancel(self, live: Live, now: float) -> None:
        """The client gave up: a waiting request goes at once, a running one at the next boundary."""
        if live.stage is Stage.WAITING:
            self.prefill_tokens_left -= 0 if live.swapped_tokens else live.target_tokens
            self.num_waiting -= 1
            self.swap.drop(live)
            self._gone(live)
            live.stage = Stage.ENDED
            self.listener.cancelled(live, now)
        elif self.k == self.k_end:
            self._cancel_running(live, now)
        else:
            self.cancelling.append(live)
        self._wake_soon(now)

    def _wake_soon(self, now: float) -> None:
        """Look again at the next boundary, or now if this is one."""
        if self.k == self.k_end:
            self._ask(now)
        else:
            self._cut(now)

    def halt(self, now: float, cause: Cause) -> list[Live]:
        """Stop in the middle of things; completed iterations stand. Returns the requests here, in order of id."""
        self._advance(self._ahead(now))
        self._close_epoch(self.k)
        waiting = [entry[2] for entry in self.waiting if self._stands(entry)] + self.inbox
        for live in self.decoding.values():
            self.sync(live)
        running = [*self.prefilling.values(), *self.decoding.values()]
        for live in running:
            self._record(live, now, cause)
        return sorted([*waiting, *running], key=_by_id)

    def crash(self, now: float) -> list[Live]:
        """Everything here is lost at once. Returns the requests, without their KV."""
        lost = self.halt(now, Cause.CRASHED)
        for live in lost:
            self.swap.drop(live)
            live.shared_blocks = live.computed_tokens = 0
            live.milestone = -1
            live.stage = Stage.HELD
        version = self.version
        self._empty()
        self.version = version + 1
        self.is_up = False
        return lost

    def recover(self) -> None:
        """Up again, empty."""
        self.is_up = True

    def _ask(self, now: float) -> None:
        if not self.is_due:
            self.is_due = True
            self.kernel.due(self)

    def _cut(self, now: float) -> None:
        """Wake at the first boundary from now on."""
        if self.k_end - self.k <= 1:
            return
        k = first_boundary_at(self.start_s, self.a_s, self.b_s, now, self.k + 1, self.k_end)
        if k < self.k_end:
            self._sleep_until(k)

    def _sleep_until(self, k: int) -> None:
        self.k_end = k
        self.version = version = self.version + 1
        time_s = boundary_s(self.start_s, self.a_s, self.b_s, k)
        self.kernel.at(time_s, Priority.FINISH, self.id, self._wake, version)

    # At a boundary.

    def _wake(self, now: float, version: int) -> None:
        if version != self.version:
            return
        self._advance(self.k_end - self.k)
        for live in self.cancelling:
            self._cancel_running(live, now)
        if self.cancelling:
            self.cancelling = []
        if self.chunks:
            self._end_prefills(now)
        milestones, tick = self.milestones, self.tick
        while milestones and milestones[0][0] <= tick:
            _, _, live = heappop(milestones)
            if live.milestone == tick:
                self._reach(live, now)
        self._ask(now)

    def _advance(self, iterations: int) -> None:
        """Account for iterations that are over."""
        self.k += iterations
        if self.advances and iterations:
            grown = len(self.decoding) * iterations
            self.tick += iterations
            self.context += grown
            self.kv.tokens += grown
            self._generated += grown
            if self.window is not None:
                self.window_tokens += self.num_growing * iterations
                self._saturate()

    def _saturate(self) -> None:
        """Requests whose context has outgrown the sliding window stop growing in it."""
        while self.saturations and self.saturations[0][0] <= self.tick:
            tick, request = heappop(self.saturations)
            if self.growing.get(request) == tick:
                del self.growing[request]
                self.num_growing -= 1
                self.changed = True

    def sync(self, live: Live) -> None:
        """Bring `generated_tokens` of a decoding request up to the present tick."""
        live.generated_tokens = live.joined_generated + self.tick - live.joined_tick

    def _end_prefills(self, now: float) -> None:
        """The prefill chunks of the iteration are computed; complete prompts give a token and start to decode."""
        for live, tokens in self.chunks:
            if live.id not in self.prefilling:
                continue
            self.prefill_tokens_left -= tokens
            if live.computed_tokens < live.target_tokens:
                continue
            live.prefill_end_s = now
            live.generated_tokens += 1
            self._generated += 1
            if live.first_token_s != live.first_token_s:
                live.first_token_s = now
            del self.prefilling[live.id]
            self.kv.static -= self.kv.blocks(live.computed_tokens) - live.shared_blocks
            self.join(live)
            if live.generated_tokens >= live.output_tokens:
                self._finish(live, now)
            else:
                self._note_phase(live, now)
                self._plan(live)

    def _reach(self, live: Live, now: float) -> None:
        """A decoding request is at a milestone: its end, a phase change, or a change of rank."""
        if self.decoding.get(live.id) is not live:
            return
        self.sync(live)
        if live.generated_tokens >= live.output_tokens:
            self._note_answer(live, now)
            self._finish(live, now)
        else:
            self._note_phase(live, now)
            self._plan(live)

    def _note_phase(self, live: Live, now: float) -> None:
        """Reasoning is over with its last token; the answer's first token is the next."""
        if live.phase is Phase.REASONING and live.generated_tokens >= live.reasoning_tokens:
            live.phase = Phase.ANSWERING
            self.listener.phase_changed(live, now)
        self._note_answer(live, now)

    def _note_answer(self, live: Live, now: float) -> None:
        if live.answer_s != live.answer_s and live.generated_tokens > live.reasoning_tokens:
            live.answer_s = now

    def _plan(self, live: Live) -> None:
        """Set the tick at which to look at the request again."""
        generated = live.generated_tokens
        if generated < live.reasoning_tokens:
            ahead = live.reasoning_tokens - generated
        elif live.answer_s != live.answer_s:
            ahead = 1
        else:
            ahead = live.output_tokens - generated
        if self.stepped is not None:
            step = self.stepped.next_change_tokens(live)
            ahead = ahead if step is None else min(ahead, step)
        live.milestone = tick = self.tick + ahead
        heappush(self.milestones, (tick, live.id, live))

    def _finish(self, live: Live, now: float) -> None:
        self.leave(live)
        self._record(live, now, Cause.FINISHED)
        self._gone(live)
        live.stage = Stage.ENDED
        self.listener.finished(live, now)

    def _cancel_running(self, live: Live, now: float) -> None:
        if live.stage is Stage.DECODING:
            self.leave(live)
        else:
            self._drop_prefill(live)
        self._record(live, now, Cause.CANCELLED)
        self._gone(live)
        live.stage = Stage.ENDED
        self.listener.cancelled(live, now)

    def _gone(self, live: Live) -> None:
        """The request is no longer this replica's."""
        self.num_in_flight -= 1
        self._generated -= live.generated_tokens
        self._output -= live.output_tokens

    def _record(self, live: Live, now: float, cause: Cause) -> None:
        decoded = live.stage is Stage.DECODING
        self.recorder.segments.add(
            (
                live.id, self.id, live.attempt, live.enqueued_s, live.stay_admitted_s, live.prefill_end_s,
                live.joined_tick if decoded else self.tick, self.tick, now, cause,
            )  # fmt: skip
        )

    # The batch.

    def schedule(self, now: float) -> None:
        """Decide the next iteration, and sleep for as long as it repeats."""
        self.is_due = False
        if not self.is_up:
            return
        fresh = bool(self.chunks)
        self.chunks = []
        self.again = False
        if self.num_waiting:
            if self.quantum is not None:
                self._renew_quanta(self.quantum)
            if self.moving is not None:
                self._rerank(now)
        self._admit(self, now)
        if self.inbox:
            self._open_inbox(now)
        if not self.decoding and not self.chunks:
            self._rest()
            return
        if fresh or self.changed or self.chunks or self.k == self.valid:
            self._close_epoch(self.k)
            self._open_epoch(now)
        elif self.exact:
            self._check_line()
        self._sleep_until(self.k + self._horizon())

    def _rest(self) -> None:
        """Nothing to run."""
        if self.num_waiting and not self.again:
            raise AssertionError(f"replica {self.id} is stuck with {self.num_waiting} requests waiting")
        self._close_epoch(self.k)
        self.k = self.k_end = 0
        self.valid, self.advances, self.changed = None, False, False
        if self.num_waiting:
            self._ask(self.kernel.now)

    def _open_epoch(self, now: float) -> None:
        self.start_s = now + self.stall_s
        self.stall_s = 0.0
        self.changed = False
        self.k = self.k_end = 0
        self.shape = [(tokens, live.computed_tokens - tokens) for live, tokens in self.chunks]
        num_decode = len(self.decoding) if self.advances else 0
        self.a_s, self.b_s, self.valid = self._line(
            num_decode, self.context if num_decode else 0, self.shape, self.window_tokens, self.num_growing
        )
        self.opened = (self.tick, num_decode, self.context, self.num_waiting)

    def _close_epoch(self, iterations: int) -> None:
        if iterations:
            tick, num_decode, context, waiting = self.opened
            prefill = sum(tokens for tokens, _ in self.shape) if self.shape else 0
            self.recorder.stretches.add(
                (
                    self.id, tick, self.start_s, self.a_s, self.b_s, iterations, self.advances, num_decode, prefill,
                    context, waiting,
                )  # fmt: skip
            )

    def _check_line(self) -> None:
        """In exact mode perf is asked for every iteration, and must agree with the line it drew."""
        a_s, _, _ = self._line(len(self.decoding), self.context, (), self.window_tokens, self.num_growing)
        line = self.a_s + self.k * self.b_s
        if abs(a_s - line) > 1e-9 * a_s:
            raise AssertionError(f"perf drew a line of {line} s for iteration {self.k}, which takes {a_s} s")

    def _horizon(self) -> int:
        """For how many iterations this batch repeats; at least one."""
        if self.chunks or self.exact or (self.again and self.num_waiting):
            return 1
        milestones = self.milestones
        while milestones[0][2].milestone != milestones[0][0]:
            heappop(milestones)
        n = milestones[0][0] - self.tick
        if self.saturations:
            n = min(n, self.saturations[0][0] - self.tick)
        if self.valid is not None:
            n = min(n, self.valid - self.k)
        if self.num_waiting:
            n = self._horizon_of_waiting(n)
        return self.kv.ticks_left(self.tick, n)

    def _horizon_of_waiting(self, n: int) -> int:
        """Ranks that change while somebody waits."""
        if self.quantum is not None and self.preemptive:
            first = min(live.quantum_tick for live in self.decoding.values())
            n = min(n, first + self.quantum - self.tick)
        if self.moving is not None:
            now = self.kernel.now
            moving = self.moving
            lives = [*self.decoding.values(), *(entry[2] for entry in self.waiting if self._stands(entry))]
            changes = [t for live in lives if (t := moving.next_change(live, now)) is not None]
            if changes:
                low = self.k + 1
                k = first_boundary_at(self.start_s, self.a_s, self.b_s, min(changes), low, self.k + n)
                n = k - self.k
        return n

    def _renew_quanta(self, quantum: int) -> None:
        for live in self.decoding.values():
            turns = (self.tick - live.quantum_tick) // quantum
            if turns:
                live.quantum_tick += turns * quantum
                live.turn = live.quantum_tick

    def _rerank(self, now: float) -> None:
        lives = [entry[2] for entry in self.waiting if self._stands(entry)]
        self.waiting = [(self.rank(live, now), live.id, live) for live in lives]
        heapify(self.waiting)

    def _open_inbox(self, now: float) -> None:
        """With a scheduling lag, what arrived during an iteration is seen one boundary later."""
        inbox, self.inbox = self.inbox, []
        for live in inbox:
            if live.stage is Stage.WAITING:
                self._stand(live, now)
        self.again = True

    @staticmethod
    def _stands(entry: tuple[object, int, Live]) -> bool:
        """False for entries that a cancellation left behind."""
        return entry[2].stage is Stage.WAITING

    def head(self) -> Live | None:
        """Who is first in line."""
        waiting = self.waiting
        while waiting:
            if self._stands(waiting[0]):
                return waiting[0][2]
            heappop(waiting)
        return None

    def admit(self, live: Live, hit_blocks: int, now: float) -> None:
        """Take the head of the line into the batch."""
        heappop(self.waiting)
        self.num_waiting -= 1
        live.stay_admitted_s = now
        live.prefill_end_s = NEVER
        live.quantum_tick = self.tick
        if live.swapped_tokens:
            live.computed_tokens = live.swapped_tokens
            self.stall_s += self.swap.back(live)
            self.join(live)
            self._plan(live)
            return
        if hit_blocks and self.prefixes:
            self.prefixes.take(live, hit_blocks)
            live.computed_tokens = hit_blocks * self.kv.block
            self.prefill_tokens_left -= live.computed_tokens
        if live.admitted_s != live.admitted_s:
            live.admitted_s = now
            live.cached_tokens = live.computed_tokens
        live.stage = Stage.PREFILLING
        self.prefilling[live.id] = live

    def give(self, live: Live, tokens: int) -> None:
        """Compute this many more prompt tokens in the coming iteration; their blocks are free."""
        kv = self.kv
        before = live.computed_tokens
        live.computed_tokens = after = before + tokens
        kv.static += kv.blocks(after) - kv.blocks(before)
        self.chunks.append((live, tokens))
        if self.prefixes and live.prefix:
            self.prefixes.publish(live, self.tick)

    def join(self, live: Live) -> None:
        """The request decodes from the next iteration on."""
        live.stage = Stage.DECODING
        live.joined_tick = tick = self.tick
        live.joined_generated = live.generated_tokens
        tokens = live.computed_tokens
        self.decoding[live.id] = live
        self.context += tokens
        self.kv.join(tokens - live.shared_blocks * self.kv.block, tick)
        if self.window is not None:
            self.window_tokens += min(tokens, self.window)
            if tokens < self.window:
                self.num_growing += 1
                self.growing[live.id] = tick + self.window - tokens
                heappush(self.saturations, (tick + self.window - tokens, live.id))
        self.changed = True

    def leave(self, live: Live) -> None:
        """A decoding request goes, and its blocks with it; `computed_tokens` becomes what it had."""
        self.sync(live)
        tokens = live.computed_tokens + self.tick - live.joined_tick
        own = tokens - live.shared_blocks * self.kv.block
        if self.prefixes:
            self.prefixes.release(live, self.kv.blocks(own), self.tick, tokens)
        self.kv.leave(own, self.tick)
        self.context -= tokens
        del self.decoding[live.id]
        live.computed_tokens = tokens
        live.milestone = -1
        if self.window is not None:
            self.window_tokens -= min(tokens, self.window)
            if self.growing.pop(live.id, None) is not None:
                self.num_growing -= 1
        self.changed = True

    def _drop_prefill(self, live: Live) -> None:
        """A request in prefill goes, and its blocks with it."""
        kv = self.kv
        given = [tokens for other, tokens in self.chunks if other is live]
        self.chunks = [chunk for chunk in self.chunks if chunk[0] is not live]
        own = kv.blocks(live.computed_tokens) - live.shared_blocks
        if self.prefixes:
            self.prefixes.release(live, own, self.tick, 0)
        kv.static -= own
        del self.prefilling[live.id]
        self.prefill_tokens_left -= live.target_tokens - live.computed_tokens + sum(given)
        live.computed_tokens = 0
        self.changed = True

    # Preemption.

    def secure(self, now: float) -> None:
        """Preempt from the end of the ranking until the next tick's blocks are there."""
        kv = self.kv
        while self.decoding and not kv.has_free(kv.needed_next(self.tick), self.tick):
            self.preempt(self.worst(now), now)
            self.again = True

    def _running(self, now: float) -> list[tuple[object, int, Live]]:
        for live in self.decoding.values():
            self.sync(live)
        lives = [*self.decoding.values(), *self.prefilling.values()]
        return [(self.rank(live, now), live.id, live) for live in lives]

    def worst(self, now: float) -> Live:
        """Who ranks last in the batch."""
        return max(self._running(now))[2]

    def displace(self, live: Live, blocks: int, now: float) -> bool:
        """Preempt the last-ranked request behind `live`, if all behind it would make room for it."""
        behind = [entry for entry in self._running(now) if entry[:2] > (live.rank, live.id)]
        if not behind:
            return False
        kv = self.kv
        sizes = [(self._tokens(other), other) for _, _, other in behind]
        gain = sum(kv.blocks(tokens) - other.shared_blocks for tokens, other in sizes)
        growing = sum(tokens % kv.block == 0 for tokens, other in sizes if other.stage is Stage.DECODING)
        if kv.free(self.tick) + gain < blocks + kv.needed_next(self.tick) - growing:
            return False
        self.preempt(max(behind)[2], now)
        return True

    def _tokens(self, live: Live) -> int:
        """KV tokens of a running request."""
        grown = self.tick - live.joined_tick if live.stage is Stage.DECODING else 0
        return live.computed_tokens + grown

    def preempt(self, live: Live, now: float) -> None:
        """Back into the line, with the KV dropped or swapped out."""
        live.preemptions += 1
        cause = Cause.PREEMPTED
        if live.stage is Stage.DECODING:
            self.leave(live)
            copy_s = self.swap.out(live, live.computed_tokens) if self.engine.preemption == "swap" else None
            if copy_s is not None:
                self.stall_s += copy_s
                cause = Cause.SWAPPED
            self._record(live, now, cause)
        else:
            self._drop_prefill(live)
            self._record(live, now, cause)
        self.queue(live, now)


def _by_id(live: Live) -> int:
    return live.id
