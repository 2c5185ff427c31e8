"""One simulated replica: a batch in time, and the stretches in which nothing changes.

An iteration ends at a *boundary*. At a boundary requests finish, then `batching` decides what runs next. While a
batch stays the same its iterations form an *epoch*, whose boundaries one clock function gives. Nothing happens
inside an epoch until its *horizon*, so the replica sleeps until then; what comes from outside may `cut` the sleep
short at the next boundary. With `exact`, the horizon is always the next boundary, and nothing else differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop
from typing import Protocol

from headway.control.live import DECODING, ENDED, HELD, PREFILLING, WAITING, Live
from headway.control.recorder import Recorder
from headway.core.fleet import Pool
from headway.core.policy import Ordering
from headway.core.record import Cause, boundary_s
from headway.core.request import Phase
from headway.sim.batch import Batch
from headway.sim.batching import ADMISSIONS
from headway.sim.clock import completed, first_boundary_at
from headway.sim.kernel import COMMAND, FINISH, Kernel
from headway.sim.swap import HostMemory

Line = Callable[[int, int, Sequence[tuple[int, int]], int, int], tuple[float, float, int | None]]
"""perf's answer to a batch: see `perf.step.StepModel.line`."""


_FINISHED = Cause.FINISHED


class Listener(Protocol):
    """Who hears of what requests do (control)."""

    def finished(self, live: Live, now: float) -> None: ...
    def cancelled(self, live: Live, now: float) -> None: ...
    def phase_changed(self, live: Live, now: float) -> None: ...


class Replica(Batch):
    """One replica. Satisfies `core.view.OracleReplicaView`."""

    __slots__ = (
        "_admit", "_events", "_is_slow", "_line", "_on_wake", "_opened", "_pack_stretch", "_push", "_put_stretch",
        "_undecided", "a_s", "advances", "b_s", "cancelling", "exact", "inbox", "is_due", "is_up", "k", "k_end",
        "kernel", "lag", "listener", "opened_s", "request_s", "response_s", "start_s", "tokenize_s", "valid",
        "version",
    )  # fmt: skip

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
        super().__init__(id, pool, kv_blocks, swap, ordering, recorder)
        self.kernel, self.listener, self.exact = kernel, listener, exact
        self._line = line
        engine = pool.engine
        self.lag = engine.schedule_lag
        self.request_s, self.tokenize_s = engine.request_overhead_s, engine.tokenize_s_per_token
        self.response_s = engine.response_overhead_s
        self._is_slow = bool(self.lag or self.request_s or self.tokenize_s or self.response_s)
        self._pack_stretch, self._put_stretch = recorder.stretches.pack, recorder.stretches.write
        self._admit = ADMISSIONS[pool.engine.batching]
        self._push, self._events, self._undecided = kernel.push, kernel.heap, kernel.undecided
        self._on_wake = self._wake
        self.is_up = True
        self.version = 0
        self._reset()

    def _reset(self) -> None:
        self.inbox: list[Live] = []
        self.cancelling: list[Live] = []
        self.opened_s = self.start_s = self.a_s = self.b_s = 0.0
        self.valid: int | None = None
        self.k = self.k_end = 0
        self.advances = self.is_due = False
        self._opened = (0, 0, 0.0, 0.0, 0.0, 0, 0, 0, 0)

    # What a view reads, as of the last completed iteration.

    @property
    def kv_blocks_used(self) -> int:
        """Blocks that requests hold."""
        return self.kv.used(self.tick + self._ahead(self.kernel.now))

    @property
    def tokens_generated(self) -> int:
        """Output tokens of the requests here."""
        return self.generated_offset + len(self.decoding) * (self.tick + self._ahead(self.kernel.now))

    @property
    def output_tokens_left(self) -> int:
        """True output tokens to come (an oracle's)."""
        return self.output - self.tokens_generated

    def _ahead(self, now: float) -> int:
        """Ticks completed since the last boundary at which something happened."""
        if not self.advances or self.k_end == self.k:
            return 0
        return completed(self.start_s, self.a_s, self.b_s, now, self.k, self.k_end) - self.k

    # What comes from outside.

    def enqueue(self, live: Live, now: float) -> None:
        """A request is placed here."""
        self.num_in_flight += 1
        live.enqueued_s = now
        live.replica = self.id
        self.generated_offset += live.generated_tokens
        self.output += live.output_tokens
        if self.quantum is not None:
            live.turn = self.tick + self._ahead(now)
        if self._is_slow:
            live.response_s = self.response_s
            live.ready_s = now + self.request_s + self.tokenize_s * live.prompt_tokens
            self._expect(live, now)
            return
        self.queue(live, now)
        if self.num_waiting > 1 and self.head() is not live:
            return
        if self.preemptive or self.num_running < self.max_num_seqs or self.k == self.k_end:
            self._look(now)

    def _expect(self, live: Live, now: float) -> None:
        """The request is on its way to the scheduler, and visible `lag` boundaries after it is ready."""
        self.expect(live)
        self.inbox.append(live)
        if self.decoding or self.prefilling:
            self._look(live.ready_s, self.lag)
        else:
            self.kernel.at(live.ready_s, COMMAND, live.id, self._ready)

    def _ready(self, now: float, _: object) -> None:
        if self.k == self.k_end:
            self._look(now)

    def cancel(self, live: Live, now: float) -> None:
        """The client gave up: a waiting request goes at once, a running one at the next boundary."""
        if live.stage is WAITING:
            self.inbox = [other for other in self.inbox if other is not live]
            self.withdraw(live)
            live.stage = ENDED
            self.listener.cancelled(live, now)
        elif self.k == self.k_end:
            self._cancel_running(live, now)
        else:
            self.cancelling.append(live)
        self._look(now)

    def halt(self, now: float, cause: Cause) -> list[Live]:
        """Stop in the middle of things; completed iterations stand. Returns the requests here, in order of id."""
        n = self._ahead(now)
        self.k += n
        self.tick += n
        self._close_epoch()
        for live in self.decoding.values():
            self.sync(live)
        running = [*self.prefilling.values(), *self.decoding.values()]
        for live in running:
            self.record(live, now, cause)
        return sorted([*self.in_line(), *self.inbox, *running], key=_by_id)

    def crash(self, now: float) -> list[Live]:
        """Everything here is lost at once. Returns the requests, without their KV."""
        lost = self.halt(now, Cause.CRASHED)
        for live in lost:
            self.swap.drop(live)
            live.shared_blocks = live.computed_tokens = 0
            live.milestone = -1
            live.stage = HELD
        self.version += 1
        self.clear()
        self._reset()
        self.is_up = False
        return lost

    def recover(self) -> None:
        """Up again, empty."""
        self.is_up = True

    def _look(self, now: float, later: int = 0) -> None:
        """Look again at the first boundary from now on, or so many boundaries later."""
        if self.k == self.k_end:
            self._ask()
        elif self.k_end - self.k > 1:
            k = first_boundary_at(self.start_s, self.a_s, self.b_s, now, self.k + 1, self.k_end) + later
            if k < self.k_end:
                self._sleep_until(k)

    def _ask(self) -> None:
        """Decide once everything else at this instant has happened."""
        if not self.is_due:
            self.is_due = True
            self._undecided.append(self)

    def decide(self, now: float) -> None:
        """The kernel says that it is time to."""
        self.is_due = False
        if self.is_up:
            self._schedule(now)

    def _sleep_until(self, k: int) -> None:
        self.k_end = k
        self.version = version = self.version + 1
        time_s = boundary_s(self.start_s, self.a_s, self.b_s, k)
        self._push((time_s, FINISH, self.id, version, self._on_wake, version))

    # At a boundary.

    def _wake(self, now: float, version: int) -> None:
        if version != self.version:
            return
        k = self.k_end
        if self.advances:
            n = k - self.k
            self.tick += n
            if self.window is not None:
                self.saturate(n)
        self.k = k
        if self.cancelling:
            self._cancel_all(now)
        if self.given:
            self._end_prefills(now)
        milestones, tick = self.milestones, self.tick
        while milestones and milestones[0][0] <= tick:
            live = heappop(milestones)[2]
            if live.milestone == tick and self.decoding.get(live.id) is live:
                live.generated_tokens = live.joined_generated + tick - live.joined_tick
                self._look_at(live, now)
        events = self._events
        if not self._undecided and (not events or events[0][0] > now):
            self._schedule(now)
        else:
            self._ask()

    def _end_prefills(self, now: float) -> None:
        """The prefill chunks of the iteration are computed; complete prompts give a token and start to decode."""
        chunks, self.chunks, self.shape, self.given = self.chunks, [], [], 0
        self.changed = True
        for live, tokens in chunks:
            if live.stage is not PREFILLING:
                continue
            self.prefill_tokens_left -= tokens
            if live.computed_tokens < live.target_tokens:
                continue
            live.prefill_end_s = now
            live.generated_tokens += 1
            self.generated_offset += 1
            if live.first_token_s != live.first_token_s:
                live.first_token_s = now + self.response_s
            del self.prefilling[live.id]
            self.kv.pinned += -live.computed_tokens // self.kv.block + live.shared_blocks
            self.join(live)
            self._look_at(live, now)

    def _look_at(self, live: Live, now: float) -> None:
        """Is it done, does its phase change, when to look again? Reasoning is over with its last token."""
        generated = live.generated_tokens
        if live.answer_s != live.answer_s and generated > live.reasoning_tokens:
            live.answer_s = now + self.response_s
        if generated >= live.output_tokens:
            self._finish(live, now)
            return
        if live.reasoning_tokens and live.phase is Phase.REASONING and generated >= live.reasoning_tokens:
            live.phase = Phase.ANSWERING
            self.listener.phase_changed(live, now)
        self.plan(live)

    def _finish(self, live: Live, now: float) -> None:
        self.leave(live)
        self.record(live, now, _FINISHED)
        self.gone(live)
        live.stage = ENDED
        self.listener.finished(live, now)

    def _cancel_all(self, now: float) -> None:
        for live in self.cancelling:
            self._cancel_running(live, now)
        self.cancelling = []

    def _cancel_running(self, live: Live, now: float) -> None:
        if live.stage is DECODING:
            self.leave(live)
        else:
            self.drop_prefill(live)
        self.record(live, now, Cause.CANCELLED)
        self.gone(live)
        live.stage = ENDED
        self.listener.cancelled(live, now)

    # What next.

    def _schedule(self, now: float) -> None:
        """Decide the next iteration, and sleep for as long as it repeats."""
        self.again = False
        if self.num_waiting or self.prefilling:
            self._choose(now)
        else:
            self.advances = True
            if not self.kv.can_tick(self.tick):
                self.secure(now)
        if not self.decoding and not self.given:
            self._rest(now)
            return
        if self.changed or self.given or self.k == self.valid:
            if self.k:
                self._put_stretch(self._pack_stretch(*self._opened, self.k))
            self._open_epoch(now)
        elif self.exact:
            self._check_line()
        self._sleep_until(self.k + self._horizon(now))

    def _choose(self, now: float) -> None:
        """Somebody waits or prefills: the engine's admission rule decides."""
        if self.num_waiting:
            if self.quantum is not None:
                self.renew_quanta(self.quantum)
            if self.moving is not None:
                self.rerank(now)
        if self.inbox:
            self._open_inbox(now)
        self._admit(self, now)

    def _rest(self, now: float) -> None:
        """Nothing to run."""
        self._close_epoch()
        self.k = self.k_end = 0
        self.valid, self.advances, self.changed = None, False, False
        if self.again:
            self._look(now)
        elif self.head() is not None:
            raise AssertionError(f"replica {self.id} is stuck with {self.num_waiting} requests waiting")
        for live in self.inbox:
            self.kernel.at(live.ready_s, COMMAND, live.id, self._ready)

    def _open_epoch(self, now: float) -> None:
        self.opened_s = now
        if self.stall_s:
            now += self.stall_s
            self.stall_s = 0.0
        self.start_s = now
        self.changed = False
        self.k = 0
        tick = self.tick
        num_decode = context = 0
        if self.advances:
            num_decode = len(self.decoding)
            context = self.context_offset + num_decode * tick
        self.a_s, self.b_s, self.valid = line = self._line(
            num_decode, context, self.shape, self.window_tokens, self.num_growing
        )
        self._opened = (
            self.id, tick, now, line[0], line[1], num_decode, self.given, context, self.num_waiting,
        )  # fmt: skip

    def _close_epoch(self) -> None:
        if self.k:
            self._put_stretch(self._pack_stretch(*self._opened, self.k))

    def _check_line(self) -> None:
        """In exact mode perf is asked for every iteration, and must agree with the line it drew."""
        context = self.context_offset + len(self.decoding) * self.tick
        a_s, _, _ = self._line(len(self.decoding), context, (), self.window_tokens, self.num_growing)
        line = self.a_s + self.k * self.b_s
        if abs(a_s - line) > 1e-9 * a_s:
            raise AssertionError(f"perf drew a line of {line} s for iteration {self.k}, which takes {a_s} s")

    def _horizon(self, now: float) -> int:
        """For how many iterations this batch repeats; at least one."""
        if self.given or self.exact or (self.again and self.num_waiting):
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
            n = self._horizon_of_waiting(n, now)
        return n if n == 1 else self.kv.ticks_left(self.tick, n)

    def _horizon_of_waiting(self, n: int, now: float) -> int:
        """Until the scheduler sees somebody new, or a rank changes while somebody waits."""
        if self.inbox:
            ready_s = min(live.ready_s for live in self.inbox)
            k = first_boundary_at(self.start_s, self.a_s, self.b_s, ready_s, self.k, self.k + n) + self.lag
            n = min(n, max(1, k - self.k))
        if self.quantum is not None and self.preemptive:
            first = min(live.quantum_tick for live in self.decoding.values())
            n = min(n, first + self.quantum - self.tick)
        moving = self.moving
        if moving is not None:
            lives = [*self.decoding.values(), *self.in_line()]
            changes = [t for live in lives if (t := moving.next_change(live, now)) is not None]
            if changes:
                low = self.k + 1
                n = first_boundary_at(self.start_s, self.a_s, self.b_s, min(changes), low, self.k + n) - self.k
        return n

    def _open_inbox(self, now: float) -> None:
        """Who is ready stands in line. A busy engine with a scheduling lag looked one boundary earlier."""
        seen_s = now
        if self.lag and (self.decoding or self.prefilling):
            k = self.k - 1
            seen_s = boundary_s(self.start_s, self.a_s, self.b_s, k) if k > 0 else self.opened_s
        hidden = []
        for live in self.inbox:
            if live.ready_s > seen_s:
                hidden.append(live)
            else:
                self.stand(live, now)
        self.inbox = hidden


def _by_id(live: Live) -> int:
    return live.id
