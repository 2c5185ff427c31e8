"""One simulated replica: a batch in time, and the stretches in which nothing changes.

An iteration ends at a *boundary*. At a boundary requests finish, then `batching` decides what runs next. While a
batch stays the same its iterations form an *epoch*, whose boundaries one clock function gives. Nothing happens
inside an epoch until its *horizon*, so the replica sleeps until then; what comes from outside may `cut` the sleep
short at the next boundary. With `exact`, the horizon is always the next boundary, and nothing else differs.
"""

from __future__ import annotations

from heapq import heappop
from typing import Protocol

from headway.control.live import DECODING, ENDED, HELD, PAUSED, PREFILLING, WAITING, Live
from headway.control.recorder import Recorder
from headway.core.fleet import Pool
from headway.core.pacer import Pacer
from headway.core.policy import Ordering
from headway.core.record import Cause, MoveOutcome, boundary_s
from headway.core.request import Phase
from headway.sim.batching import ADMISSIONS
from headway.sim.clock import first_boundary_at
from headway.sim.in_transit import Transit
from headway.sim.kernel import COMMAND, Kernel
from headway.sim.swap import HostMemory
from headway.sim.timeline import Line

_FINISHED = Cause.FINISHED


class Listener(Protocol):
    """Who hears of what requests do (control)."""

    def on_finished(self, live: Live, now: float) -> None: ...
    def on_cancelled(self, live: Live, now: float) -> None: ...
    def on_phase_changed(self, live: Live, now: float) -> None: ...
    def on_prefilled(self, live: Live, now: float) -> None: ...


class Replica(Transit):
    """One replica. Satisfies `core.view.OracleReplicaView`."""

    __slots__ = (
        "_admit", "_is_slow", "_restless", "cancelling", "combo", "exact", "goodput_rps", "is_draining", "is_up",
        "lag", "listener", "makes_first", "request_s", "response_s", "role", "sends_first", "tokenize_s",
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
        pacer: Pacer,
        combo: int,
        goodput_rps: float | None,
    ) -> None:
        super().__init__(id, pool, line, kv_blocks, swap, ordering, kernel, recorder, pacer)
        self.listener, self.exact = listener, exact
        engine = pool.engine
        self._admit = ADMISSIONS[engine.batching]
        self._restless = ordering.quantum is not None or self.moving is not None
        self.lag = engine.schedule_lag
        self.request_s, self.tokenize_s = engine.request_overhead_s, engine.tokenize_s_per_token
        self.response_s = engine.response_overhead_s
        self._is_slow = bool(self.lag or self.request_s or self.tokenize_s)
        self.cancelling: list[Live] = []
        self.is_up = True
        self.is_draining = False
        self.role = pool.role
        self.combo, self.goodput_rps = combo, goodput_rps
        self.makes_first = pool.handover.first_token != "decode"
        self.sends_first = pool.handover.first_token == "sent"

    # What comes from outside.

    def enqueue(self, live: Live, now: float, tokenized: bool = False, delay_s: float = 0.0) -> None:
        """A request is placed here; `delay_s` is between its client and here, each way."""
        self.come(live)
        live.enqueued_s = now
        live.replica = self.id
        if self.quantum is not None:
            live.turn = self.tick + self._ahead(now)
        response_s = self.response_s + delay_s
        # Of a request that moves, what comes next does not overtake what is still on its way.
        live.response_s = max(response_s, live.response_s) if tokenized else response_s
        if self._is_slow or delay_s:
            live.ready_s = now + self.request_s + delay_s
            if not tokenized:
                live.ready_s += self.tokenize_s * live.prompt_tokens
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
        if live.stage is WAITING or live.stage is PAUSED:
            if live.stage is WAITING:
                self.take_out(live, now)
            else:
                live.move.abandon(now, MoveOutcome.ENDED)
                self.let_go(live, now)
            live.enter(ENDED)
            self.listener.on_cancelled(live, now)
        elif self.k == self.k_end:
            self._cancel_running(live, now)
            self._ask()
        else:
            self.cancelling.append(live)
            self._look(now)

    def take_out(self, live: Live, now: float) -> None:
        """A waiting request goes."""
        self.catch_up(now)
        self.inbox = [other for other in self.inbox if other is not live]
        self.withdraw(live)
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
        return sorted([*self.in_line(), *self.inbox, *running, *self.leaving.values()], key=_by_id)

    def crash(self, now: float) -> list[Live]:
        """Everything here is lost at once. Returns the requests, without their KV."""
        lost = self.halt(now, Cause.CRASHED)
        for live in lost:
            if live.id in self.resident:
                live.swapped_tokens = live.resident_blocks = 0
            self.swap.drop(live)
            live.shared_blocks = live.computed_tokens = 0
            live.check_tick = -1
            live.enter(HELD)
        self.version += 1
        self.clear()
        self.idle()
        self.inbox, self.cancelling, self.pausing, self.leaving = [], [], [], {}
        self.num_arriving = self.reserved_blocks = 0
        self.coming = {}
        self.is_up = False
        return lost

    def recover(self) -> None:
        """Up again, empty."""
        self.is_up = True

    def decide(self, now: float) -> None:
        """The kernel says that it is time to."""
        self.is_due = False
        if self.is_up:
            self._schedule(now)

    @property
    def requests(self) -> list[Live]:
        """Who is placed here, with their tokens as of the last completed iteration."""
        ahead = self.tick + self._ahead(self.kernel.now)
        for live in self.decoding.values():
            live.generated_tokens = live.joined_generated + ahead - live.joined_tick
        inside = (*self.prefilling.values(), *self.decoding.values(), *self.coming.values())
        return [
            *self.in_line(),
            *self.inbox,
            *inside,
            *(live for live in self.leaving.values() if not live.move.is_sent),
        ]

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
            if live.check_tick == tick and self.decoding.get(live.id) is live:
                live.generated_tokens = live.joined_generated + tick - live.joined_tick
                self._look_at(live, now)
        if self.pausing:
            self._pause_all(now)
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
            if live.decode_replica < 0 or self.makes_first:
                live.prefill_end_s = now
                live.generated_tokens += 1
                self.generated_offset += 1
                if live.first_token_s != live.first_token_s and not self._is_sent(live):
                    live.first_token_s = now + live.response_s
            del self.prefilling[live.id]
            self.kv.pinned += -live.computed_tokens // self.kv.block + live.shared_blocks
            live.quantum_tick = self.tick - 1  # the prefill's token is the first of its quantum
            self.join(live)
            self._look_at(live, now)
            if live.decode_replica >= 0 and live.stage is DECODING and live.move is None:
                self.listener.on_prefilled(live, now)

    def _is_sent(self, live: Live) -> bool:
        """Its first token is on its way with its KV cache, and it is not the only one."""
        return self.sends_first and live.decode_replica >= 0 and live.output_tokens > 1

    def _look_at(self, live: Live, now: float) -> None:
        """Is it done, does its phase change, when to look again? Reasoning is over with its last token."""
        generated = live.generated_tokens
        if live.first_token_s != live.first_token_s and generated:
            if self._is_sent(live):
                if self.queued is not None:
                    self.requeue(live)
                self.plan(live)
                return
            live.first_token_s = now + live.response_s
        if live.answer_s != live.answer_s and generated > live.reasoning_tokens:
            told_s = now + live.response_s if live.reasoning_tokens else live.first_token_s
            live.answer_s = max(told_s, live.first_token_s)
            if self.pace is not None:
                self.pace.runs(live)
        if generated >= live.output_tokens:
            self._finish(live, now)
            return
        if live.reasoning_tokens and live.phase is Phase.REASONING and generated >= live.reasoning_tokens:
            self._answer(live, now)
            if live.stage is not DECODING:
                return
        elif self.queued is not None:
            self.requeue(live)
        self.plan(live)

    def _answer(self, live: Live, now: float) -> None:
        """Reasoning is over."""
        live.phase = Phase.ANSWERING
        live.reasoning_end_s = now + live.response_s
        self.requeue(live)
        if self.pace is not None:
            self.pace.runs(live)
        self.listener.on_phase_changed(live, now)

    def _finish(self, live: Live, now: float) -> None:
        if live.move is not None:
            live.move.abandon(now, MoveOutcome.ENDED)
        self.leave(live)
        self.record(live, now, _FINISHED)
        self.gone(live)
        live.enter(ENDED)
        self.listener.on_finished(live, now)

    def _cancel_all(self, now: float) -> None:
        for live in self.cancelling:
            self._cancel_running(live, now)
        self.cancelling = []

    def _cancel_running(self, live: Live, now: float) -> None:
        if live.move is not None:
            live.move.abandon(now, MoveOutcome.ENDED)
        if live.stage is DECODING:
            self.leave(live)
        else:
            self.drop_prefill(live)
        self.record(live, now, Cause.CANCELLED)
        self.gone(live)
        live.enter(ENDED)
        self.listener.on_cancelled(live, now)

    # What next.

    def _schedule(self, now: float) -> None:
        """Decide the next iteration, and sleep for as long as it repeats."""
        self.again = False
        if self.inbox:
            self._open_inbox(now)
        if self.waiting or self.prefilling:
            if self._restless and self.waiting:
                self._move_ranks(now)
            self._admit(self, now)
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

    def _move_ranks(self, now: float) -> None:
        """Quanta that are used up, and ranks that time has changed."""
        if self.quantum is not None:
            self.renew_quanta(self.quantum)
        if self.moving is not None:
            self.rerank(now)

    def _rest(self, now: float) -> None:
        """Nothing to run."""
        self._close_epoch()
        self.idle()
        self.changed = False
        if self.again:
            self._look(now)
        elif self.head() is not None and not (self.num_arriving or self.coming or self.leaving):
            raise AssertionError(f"replica {self.id} is stuck with {self.num_waiting} requests waiting")
        for live in self.inbox:
            self.kernel.at(live.ready_s, COMMAND, live.id, self._ready)

    def _horizon(self, now: float) -> int:
        """For how many iterations this batch repeats; at least one."""
        if self.given or self.exact or (self.again and self.num_waiting):
            return 1
        milestones = self.milestones
        while (live := milestones[0][2]).check_tick != milestones[0][0] or live.replica != self.id:
            heappop(milestones)
        n = milestones[0][0] - self.tick
        if self.saturations:
            n = min(n, self.saturations[0][0] - self.tick)
        if self.valid is not None:
            n = min(n, self.valid - self.k)
        if self.inbox:
            n = self._until_ready(n)
        if self._restless and self.waiting:
            n = self._until_ranks_move(n, now)
        return n if n == 1 else self.kv.ticks_left(self.tick, n)

    def _until_ready(self, n: int) -> int:
        """Until the scheduler sees somebody new."""
        ready_s = min([live.ready_s for live in self.inbox])
        k = first_boundary_at(self.start_s, self.a_s, self.b_s, ready_s, self.k, self.k + n) + self.lag - self.k
        return n if k > n else k if k > 1 else 1

    def _until_ranks_move(self, n: int, now: float) -> int:
        """Until a rank changes, while somebody waits."""
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
