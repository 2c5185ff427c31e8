"""One simulated replica: a batch in time.

An iteration ends at a *boundary*. At a boundary requests finish, then the engine's scheduler decides what runs next.
While the batch stays the same, its iterations form an *epoch* (see `timeline`). Nothing happens inside an epoch until
its *horizon*, so the replica sleeps until then; an outside event may wake it at an earlier boundary. In an exact run
the horizon is always the next boundary, and nothing else differs.

Read `Replica.enqueue`, `Replica.wake` and `EngineScheduler.schedule` first: a request arrives, an iteration ends, the
next one is decided.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Final, Protocol, cast

from headway.control.live import DECODING, HELD, PAUSED, PREFILLING, WAITING, Live
from headway.control.recorder import Recorder
from headway.core.fleet import Network
from headway.core.pacer import Pacer
from headway.core.policy import Ordering
from headway.core.record import Cause, MoveOutcome
from headway.core.request import Phase
from headway.core.view import RequestView
from headway.sim.api_server import ApiServer
from headway.sim.batch import Batch
from headway.sim.engine_scheduler import EngineScheduler
from headway.sim.in_transit import InTransit
from headway.sim.kernel import BEFORE, COMMAND, Kernel, Sleeper
from headway.sim.kv_store import StoreClient
from headway.sim.placed import PlacedRequests
from headway.sim.prefixcache import Keeping, PrefixCache
from headway.sim.replica_resources import PoolResources
from headway.sim.replica_view import SimulatedView
from headway.sim.timeline import Timeline
from headway.sim.waiting_queue import WaitingQueue

# Module-level names, as in `control.live`.
_FINISHED: Final = Cause.FINISHED
_REASONING: Final = Phase.REASONING


class Listener(Protocol):
    """Receives the events of requests (implemented by control). It ends finished and cancelled requests."""

    def on_finished(self, live: Live, now: float) -> None: ...
    def on_cancelled(self, live: Live, now: float) -> None: ...
    def on_paused(self, live: Live, now: float) -> None: ...
    def on_phase_changed(self, live: Live, now: float) -> None: ...
    def on_prefilled(self, live: Live, now: float) -> None: ...
    def on_prompt_computed(self, live: Live, now: float) -> None: ...


class OrderReceived:
    """An engine's own order: as the engine received the requests, whatever their order of arrival at the gateway.

    A preempted request keeps its place.
    """

    quantum: int | None = None
    preemptive = False

    def rank(self, request: RequestView, now: float) -> int:
        return cast(Live, request).num_before


class Run:
    """Objects shared by the replicas of a run. `is_exact`: every iteration is a separate event."""

    __slots__ = ("is_exact", "kernel", "listener", "network", "pacer", "recorder", "seed")

    def __init__(
        self,
        kernel: Kernel,
        listener: Listener,
        recorder: Recorder,
        is_exact: bool,
        pacer: Pacer,
        network: Network,
        seed: int,
    ) -> None:
        self.kernel, self.listener, self.recorder = kernel, listener, recorder
        self.is_exact, self.pacer, self.network, self.seed = is_exact, pacer, network, seed


class Replica(Sleeper):
    """One replica: outside events, and boundaries. Policies read its `view`."""

    __slots__ = (
        "_api_server", "_cancelling", "_kernel", "_listener", "_makes_first_token", "_pausing",
        "_reports_late", "_sends_first_token",
        "_undecided", "batch", "is_up", "max_request_tokens", "placed", "resources", "response_s",
        "scheduler", "timeline", "transit", "view",
    )  # fmt: skip

    def __init__(
        self, id: int, resources: PoolResources, ordering: Ordering, run: Run, combo: int, goodput_rps: float | None
    ) -> None:
        """`combo`: number of the replica's unit; `goodput_rps`: what the unit can serve."""
        kernel, recorder = run.kernel, run.recorder
        self.id, self.resources, self.is_up = id, resources, True
        self._kernel, self._undecided = kernel, kernel.undecided
        self._listener = run.listener
        self.batch = batch = Batch(id, resources, WaitingQueue(ordering), recorder, run.seed)
        self._reports_late = resources.reports_late
        self.timeline = timeline = Timeline(kernel.add(self), batch, resources, kernel, recorder.stretches)
        self.placed = PlacedRequests(batch, kernel.changes)
        self.transit = InTransit(batch, timeline, self.placed)
        self.scheduler = EngineScheduler(resources, kernel, timeline, self.transit, run.is_exact)
        self.view = SimulatedView(resources, kernel, timeline, self.transit, run.pacer, run.network, combo, goodput_rps)
        self.response_s = resources.response_s
        self._api_server = ApiServer(resources.token_s)
        if resources.token_s:
            timeline.api_server = self._api_server
        self._makes_first_token = resources.makes_first_token
        self._sends_first_token = resources.sends_first_token
        room_tokens = (batch.kv.total - batch.kv.watermark) * batch.kv.block + 1 - batch.draft_slots
        self.max_request_tokens = min(room_tokens, resources.max_context_tokens)
        """Longest request, in prompt plus output tokens, that can run here alone."""
        self._cancelling: list[Live] = []
        """Running requests that leave at the next boundary."""
        self._pausing: list[Live] = []
        """Running requests that leave at the next boundary and are placed again."""

    # Events from outside.

    def enqueue(self, live: Live, now: float, tokenized: bool = False, delay_s: float = 0.0) -> None:
        """Add a request that was placed here; `delay_s` is the latency to its client, each way."""
        batch, placed, view = self.batch, self.placed, self.view
        placed.count(live)
        live.enqueued_s, live.num_before = now, placed.num_received
        placed.num_received += 1
        live.replica = self.id
        if view.matched_request == live.id:
            live.expected_cached_tokens = view.matched_cached + view.matched_loadable
            batch.expected_cached_tokens += live.expected_cached_tokens
            view.matched_request = -1
        if batch.queue.quantum is not None or batch.queue.stepped_ordering is not None:
            live.turn = self.timeline.ticks_ahead(now) + batch.tick
        response_s = self.response_s + delay_s
        # Tokens of a moved request must not overtake earlier tokens that are still on their way to the client.
        live.response_s = max(response_s, live.response_s) if tokenized else response_s
        batch.count_waiting(live)
        self.scheduler.receive(live, now, tokenized, delay_s)

    def receive(self, live: Live, blocks: int, now: float) -> None:
        """Enqueue a request whose `swapped_tokens` of KV are in these reserved blocks; 0 = in host memory."""
        if blocks:
            self.transit.hold(live, blocks, now)
        self.enqueue(live, now, tokenized=True)

    def take_back(self, live: Live, now: float) -> None:
        """Put a paused request back into the queue. Its KV is still here."""
        self.transit.keep(live, now)
        self.enqueue(live, now, tokenized=True)

    def cancel(self, live: Live, now: float) -> None:
        """Remove a request whose client gave up: a waiting one at once, a running one at the next boundary."""
        timeline = self.timeline
        if live.stage is WAITING or live.stage is PAUSED:
            if live.stage is WAITING:
                self.remove_waiting(live, now)
            else:
                live.move.abandon(now, MoveOutcome.ENDED)
                self.transit.release(live, now)
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
        self.batch.queue.leave_inbox(live)
        self.batch.uncount_waiting(live)
        self.placed.uncount(live)
        self.timeline.wake_by(now)

    def halt(self, now: float, cause: Cause) -> list[Live]:
        """Stop in the middle of an iteration; complete iterations count. Returns the requests here, sorted by id."""
        batch, timeline = self.batch, self.timeline
        if not (self.placed.num_in_flight or self.transit.leaving or timeline.k_end):  # nothing is here or unrecorded
            return []
        n = timeline.ticks_ahead(now)
        timeline.k += n
        batch.tick += n
        timeline.close()
        for live in batch.decoding.values():
            batch.sync(live)
        running = [*batch.prefilling.values(), *batch.decoding.values()]
        for live in running:
            batch.write_segment(live, now, cause)
        return sorted([*batch.queue.requests(), *running, *self.transit.leaving.values()], key=attrgetter("id"))

    def crash(self, now: float) -> list[Live]:
        """Lose everything at once. Returns the requests that were here, without their KV."""
        batch, timeline = self.batch, self.timeline
        lost = self.halt(now, Cause.CRASHED)
        for live in lost:
            if live.id in batch.resident:
                live.swapped_tokens = live.resident_blocks = 0
            batch.host.drop(live)
            live.shared_blocks = live.computed_tokens = live.expected_cached_tokens = 0
            live.check_slot = live.check_tick = -1
            live.stage = HELD
        batch.queue.clear()
        batch.clear()
        timeline.stop()
        self.transit.clear()
        self.placed.crash()
        self._cancelling, self._pausing = [], []
        self.is_up = False
        timeline.note_change()
        return lost

    def slow_down(self, factor: float, now: float) -> None:
        """Multiply iteration times by this factor, from the next iteration on."""
        self.timeline.catch_up(now)
        self.timeline.slowdown = factor
        self.batch.is_changed = True
        self.timeline.wake_by(now)

    # At a boundary.

    def wake(self, now: float) -> None:
        """Handle boundary `k_end`, unless the engine launches the next iteration before it reports this one."""
        timeline, batch = self.timeline, self.batch
        if (
            self._reports_late
            and batch.prefill_tokens_left
            and not timeline.is_settled
            and self.scheduler.launches_first(now)
        ):
            return
        k = timeline.k_end
        if timeline.advances:
            if timeline.api_server is not None and k > timeline.k:
                timeline.send(timeline.api_server, k)
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
        if checks.ticks.least <= tick:
            for live in checks.due(tick):
                if live.check_tick == tick:  # no check of another request has changed this
                    live.generated_tokens = live.joined_generated + tick - live.joined_tick
                    self._check(live, now)
        if self._pausing:  # after the checks: a request that ends now is not paused
            pausing, self._pausing = self._pausing, []
            for live in pausing:
                self._pause_running(live, now)
        if self.transit.pausing:
            self.transit.pause_all(now)
        kernel = self._kernel
        if kernel.boundaries.least > now and not self._undecided and kernel.event_s > now and kernel.arrival_s > now:
            self.scheduler.schedule(now)
        else:
            timeline.note_change()
            timeline.request_decision()

    def decide(self, now: float) -> None:
        """Decide the next iteration, after everything else at this instant."""
        self.timeline.is_due = False
        if self.is_up:
            self.scheduler.schedule(now)

    def _end_prefills(self, now: float) -> None:
        """Account for the iteration's prefill chunks. A complete prompt gives a token, and its request decodes from now
        on."""
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
                live.prefill_end_s = self.timeline.ended_at(now)
                if self.timeline.api_server is not None:
                    self._api_server.add(now)
                live.generated_tokens += 1
                batch.generated_offset += 1
                if live.first_token_s != live.first_token_s and not (
                    self._sends_first_token and self._sends_first(live)
                ):
                    live.first_token_s = self._sent_s(live, now)
            batch.end_prefill(live)
            self._check(live, now)
            self.timeline.note_change()
            if live.decode_replica >= 0 and live.stage is DECODING and live.move is None:
                self._listener.on_prefilled(live, now)
            if live.sent_to is not None:
                self._listener.on_prompt_computed(live, now)

    def _sent_s(self, live: Live, now: float) -> float:
        """Time at which the client receives a token of the iteration that is reported now."""
        return now + live.response_s + self._api_server.late_s

    def _sends_first(self, live: Live) -> bool:
        """Whether the request's first token is sent with its KV cache, and more tokens follow."""
        return live.decode_replica >= 0 and live.output_tokens > 1

    def _check(self, live: Live, now: float) -> None:
        """Check a decoding request for its first token, the end of its reasoning and its end; set the next check."""
        batch = self.batch
        generated = live.generated_tokens
        if live.first_token_s != live.first_token_s and generated:
            if self._sends_first_token and self._sends_first(live):
                self.placed.requeue(live)
                batch.set_check(live)
                return
            live.first_token_s = self._sent_s(live, now)
        if live.answer_s != live.answer_s and generated > live.reasoning_tokens:
            answer_s = self._sent_s(live, now) if live.reasoning_tokens else live.first_token_s
            live.answer_s = max(answer_s, live.first_token_s)
            if batch.stalls is not None:
                batch.stalls.update(live)
        if generated >= live.output_tokens:
            if live.move is not None:
                live.move.abandon(now, MoveOutcome.ENDED)
            batch.stop_decode(live)
            batch.write_segment(live, self.timeline.ended_at(now), _FINISHED)
            self.placed.uncount(live)
            live.response_s += self._api_server.late_s
            self._listener.on_finished(live, now)
            return
        if 0 < live.turn_ends_at <= generated:
            live.turn = batch.tick
        if live.reasoning_tokens and live.phase is _REASONING and generated >= live.reasoning_tokens:
            self._end_reasoning(live, now)
            if live.stage is not DECODING:
                return
        elif batch.queue.queued_ordering is not None:
            self.placed.requeue(live)
        batch.set_check(live)

    def _end_reasoning(self, live: Live, now: float) -> None:
        live.phase = Phase.ANSWERING
        live.reasoning_end_s = self._sent_s(live, now)
        self.placed.requeue(live)
        if self.batch.stalls is not None:
            self.batch.stalls.update(live)
        self.timeline.note_change()
        self._listener.on_phase_changed(live, now)

    def _cancel_running(self, live: Live, now: float) -> None:
        if live.move is not None:
            live.move.abandon(now, MoveOutcome.ENDED)
        if live.stage is DECODING:
            self.batch.stop_decode(live)
        else:
            self.batch.stop_prefill(live)
        self.batch.write_segment(live, now, Cause.CANCELLED)
        self.placed.uncount(live)
        self._listener.on_cancelled(live, now)

    def _pause_running(self, live: Live, now: float) -> None:
        """Release a paused request: it decodes here, or waits here because it was preempted in the meantime. A request
        that has ended has already left."""
        if live.stage is WAITING:
            self.remove_waiting(live, now)
            self.transit.unqueue(live)  # it may be placed here again
        elif live.stage is DECODING:
            if live.move is not None:
                live.move.abandon(now, MoveOutcome.PREEMPTED)
            self.batch.stop_decode(live)
            self.batch.write_segment(live, now, Cause.PREEMPTED)
            self.placed.uncount(live)
        else:
            return
        live.computed_tokens = live.shared_blocks = 0
        self.placed.paused.add(live)
        self._listener.on_paused(live, now)

    # The prefix cache.

    def use_store(self, store: StoreClient | None) -> None:
        """Extend the prefix cache by a shared store, and by the engine's keeping. Call before the first request."""
        resources, keeping = self.resources, None
        if resources.caches_prefixes and resources.keep_s:
            keeping = Keeping(resources.keep_s, resources.keep_share, self._now, self._end_keeping_at)
        if store is not None or keeping is not None:
            self.batch.extend_cache(store, keeping)

    def _now(self) -> float:
        return self._kernel.now

    def _end_keeping_at(self, time_s: float, cache: PrefixCache) -> None:
        self._kernel.at(time_s, COMMAND, self.id - BEFORE, self._end_keeping, cache)

    def _end_keeping(self, now: float, cache: PrefixCache) -> None:
        if self.batch.prefixes is cache:
            cache.end_keeping(now, self.view.tick_now())
