"""The gateway's driver: control's clock is real time, and its effects are requests to engines."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from headway.control.decisions import DecisionObserver
from headway.control.live import HELD, NEVER, WAITING, Live
from headway.control.policies import Policies
from headway.control.recorder import Recorder
from headway.control.scaling import Scaling
from headway.control.service import Service
from headway.control.shadow import Shadow
from headway.core.fleet import Fallbacks, Role
from headway.core.record import Cause, Outcome
from headway.core.request import Phase
from headway.core.view import ReplicaView
from headway.gateway.clock import Clock, Deadlines
from headway.gateway.scheduling.control import LiveControl
from headway.gateway.scheduling.hold_timeouts import HoldTimeouts
from headway.gateway.scheduling.in_flight import InFlightRequest, PrefillLeg, ReleaseReason, State
from headway.gateway.scheduling.replica import LiveReplica
from headway.gateway.scheduling.request_state import Assignment
from headway.gateway.scheduling.roster import Roster
from headway.gateway.scheduling.scorer import AnswerScorer
from headway.gateway.scheduling.ticks import PolicyTicks
from headway.gateway.telemetry.metrics import PrometheusMetrics
from headway.gateway.upstream.engine import EngineEndpoint

if TYPE_CHECKING:
    from headway.gateway.accounts.budgets import Charge

log = logging.getLogger("headway.gateway")
# Module-level names: reading a member from its enum class takes as long as a dozen other steps.
FINISHED: Final = ReleaseReason.FINISHED
_HELD_STATE: Final = State.HELD
_PLACED: Final = State.PLACED
_FINISHED_OUTCOME: Final = Outcome.FINISHED
_CAUSES = {Outcome.FINISHED: Cause.FINISHED, Outcome.CANCELLED: Cause.CANCELLED, Outcome.REJECTED: Cause.CRASHED}
_UNRESPONSIVE, _REMOVED = "does not answer any more", "was removed"


class Driver:
    """Turns requests into control's events, and control's effects into requests to engines.

    Implements `control.effects.Effects` and `scheduler.Scheduler`. Belongs to one event loop.
    """

    def __init__(
        self,
        clock: Clock,
        replicas: Sequence[LiveReplica],
        names: dict[str, tuple[str, ...]],
        policies: Policies,
        seed: int,
        recorder: Recorder | None,
        metrics: PrometheusMetrics,
        hold_s: float | None,
        scorer: AnswerScorer | None,
        make_scaling: Callable[[dict[str, Service]], Scaling | None],
        decisions: DecisionObserver | None,
        on_ended: Callable[[InFlightRequest, Outcome, float], None],
        on_role: Callable[[int, Role, float], None],
        fallbacks: Fallbacks | None = None,
        view: Callable[[LiveReplica], ReplicaView] | None = None,
        new_shadow: Callable[[str], Shadow] | None = None,
    ) -> None:
        """`names` are the names that requests may use, by model. `on_ended(request, outcome, now)` and
        `on_role(replica, role, now)` are called after the event. `view` returns a replica as policies see it; None:
        unchanged. `new_shadow` creates a model's shadow policies, whose decisions have no effect."""
        self.clock, self.scorer, self._seed, self._decisions = clock, scorer, seed, decisions
        self._recorder, self.metrics = recorder, metrics
        self._on_ended, self._on_role = on_ended, on_role
        self.charge: Callable[[str, str, int, int, int], Charge] | None = None
        """The charge by model and pool for input, output and cached input tokens; None if keys have no budgets."""
        self.on_prefill_sent: Callable[[EngineEndpoint], None] = lambda replica: None
        """Called when the prefill replica of a dual dispatch has sent the KV cache."""
        self.replicas = list(replicas)
        self.requests: dict[int, InFlightRequest] = {}
        """Requests that have not ended."""
        self._reasoning: set[str] = set()
        """Models that have reasoned before an answer. Their new requests count as reasoning until they answer."""
        self.call_at = Deadlines(clock, self.requests).add
        """Calls `action(time_s, live)` at `time_s`, unless the request has ended."""
        self.control = control = LiveControl(self, recorder, notify=True)
        control.parts.new_shadow = new_shadow
        self.services = control.by_model
        self.holds = HoldTimeouts(clock, control, self.requests, self.replicas, hold_s)
        self.roster = Roster(clock, control, self.replicas, self.holds, view, policies.prompt_window is not None)
        self.ticks = PolicyTicks(clock, control)
        members = self.roster.members([*names])
        control.configure(policies, members, names, seed, make_scaling, decisions, fallbacks)
        self.roster.find_adapters()
        self.cascade = control.parts.cascade

    @property
    def now(self) -> float:
        return self.clock.now

    def change_policies(self, before: Policies, after: Policies) -> None:
        """Use other policies from now on. Raises HeadwayError, before any change, if a policy cannot be created."""
        in_flight = [request.live for request in self.requests.values() if request.reservation is not None]
        self.control.change_policies(before, after, self._seed, self._decisions, in_flight, self.now)
        self.roster.limit_prompts(after.prompt_window is not None)
        self.ticks.start()

    def take_turns(self, on: bool) -> None:
        """Set whether replaced policies will return later and must keep their state."""
        self.control.take_turns(on)

    def add_model(self, model: str, names: Sequence[str], policies: Policies) -> None:
        """Serve one more model. Its replicas are added separately."""
        self.control.add_service(policies, model, (), names, self._seed, self._decisions)
        self.control.note_parts()
        self.ticks.start()

    # Requests.

    def arrived(self, request: InFlightRequest) -> None:
        """Pass a new request to control. If a policy fails, the request is rejected and the error raised."""
        live = request.live
        self.requests[live.id] = request
        if self._reasoning and live.is_streamed and self._service_name(live) in self._reasoning:
            live.phase = Phase.REASONING
        try:
            self.control.on_arrival(live, self.clock.now)
        except BaseException:
            self.control.reject(live, self.now)
            raise
        if self.cascade is not None:
            request.needs_score = self.needs_score(live)
        if live.stage is HELD:
            self.holds.start(request)

    def _service_name(self, live: Live) -> str:
        service = self.services.get(live.model)
        return "" if service is None else service.model

    def phase_changed(self, live: Live) -> None:
        self._reasoning.add(self._service_name(live))
        self.control.on_phase_changed(live, live.answer_s)

    # Requests leave their replicas.

    def release(self, request: InFlightRequest, reason: ReleaseReason) -> None:
        if reason is FINISHED:
            request.detach()
            if request.outcome is None:
                self.control.on_finished(request.live, self.clock.now)
            return
        match reason:
            case ReleaseReason.REFUSED:
                request.detach()
                self.control.reject(request.live, self.now)
            case ReleaseReason.CANCELLED:
                if request.outcome is None:
                    self.control.client_left(request.live, self.now)
            case ReleaseReason.ACKNOWLEDGED:
                request.detach()
                self.control.room_freed(request.live, self.now)
            case ReleaseReason.EXHAUSTED:
                if self._leave(request, Cause.CRASHED):
                    self.control.exhausted(request.live, self.now)
                    self.holds.start(request)
            case ReleaseReason.MOVED:
                self._resume_after_move(request)
            case ReleaseReason.PREFILLED:
                self._hand_over_to_decode(request, is_stored=True, outcome="handed over")
            case ReleaseReason.PREFILL_NOT_STORED:
                self._hand_over_to_decode(request, is_stored=False, outcome="not kept")
            case ReleaseReason.PREFILL_FAILED:
                if not self._hand_over_to_decode(request, is_stored=False, outcome="failed", num_failures=1):
                    self._place_again(request)
            case ReleaseReason.PREFILL_LEG_FAILED:
                self._prefill_leg_failed(request)
            case ReleaseReason.FAILED | ReleaseReason.FAILED_BEFORE_FETCH:
                self._place_again(request, is_kv_intact=reason is ReleaseReason.FAILED_BEFORE_FETCH)

    def drop(self, request: InFlightRequest) -> None:
        """Free everything that the request holds, even if a policy's error prevented its end."""
        request.detach()
        if request.outcome is None:
            try:
                self.control.client_left(request.live, self.now)
            finally:
                self.requests.pop(request.live.id, None)
                if request.hold_timeout is not None:
                    request.hold_timeout.cancel()

    def _place_again(self, request: InFlightRequest, is_kv_intact: bool = False) -> None:
        """Let control place the request again after its replica failed. `is_kv_intact`: see FAILED_BEFORE_FETCH."""
        live, source = request.live, request.prefilled_by
        if not self._leave(request, Cause.CRASHED):
            return
        self.metrics.count_failure(live, self.replicas[live.replica].pool)
        if source is not None:
            if live.stage_index >= 0:
                self._write_segment(live, self.now, Cause.CRASHED)
            may_fetch = is_kv_intact and request.assignment.has_stored_kv
            if may_fetch and self.control.reassign_decode(live, source.id, self.now):
                return
        self.control.failed(live, self.now)
        self.holds.start(request)

    def _resume_after_move(self, request: InFlightRequest) -> None:
        """Continue at the move's target, or at the source if the target is gone or full."""
        source, target, live = request.replica, request.move_target, request.live
        assert source is not None and target is not None
        is_paused = request.state is State.PAUSED
        has_left = self._leave(request, Cause.PREEMPTED if is_paused else Cause.MOVED)
        self._end_move(request)
        if not has_left:
            return
        if is_paused:
            self.replicas[source.id].pause(live)
            self.control.on_paused(live, self.now)
            self.holds.start(request)
            return
        if self.replicas[source.id].is_single_phase:  # the chosen pair may be down already
            self.control.place(live, self.now)
            self.control.on_moved(live, self.now)
            return
        member = self.services[live.model].member(target.id)
        if member is not None and member.can_serve(live.prompt_tokens + live.output_tokens, live.lora):
            self.start(live, target.id, self.now)
            self.control.on_moved(live, self.now)
        else:
            self.start(live, source.id, self.now)

    @staticmethod
    def _end_move(request: InFlightRequest) -> None:
        if request.move_target is not None:
            request.move_target.num_arriving -= 1
            request.move_target = None
            request.live.move = None

    def _hand_over_to_decode(
        self, request: InFlightRequest, is_stored: bool, outcome: str, num_failures: int = 0
    ) -> bool:
        """Let control choose the decode replica. The replica fetches the KV cache if the cache is stored. `outcome` is
        counted. Returns False if no other replica can decode.
        """
        live, replica = request.live, request.replica
        if request.outcome is not None:
            return True
        self.metrics.count_prefill(live.model, outcome)
        request.return_connection()
        request.assignment = replace(request.assignment, is_prefill_only=False, has_stored_kv=is_stored)
        request.prefilled_by = replica
        live.attempt += num_failures
        self.control.on_prefilled(live, self.now)
        if request.replica is not replica:
            return True
        live.attempt -= num_failures
        request.assignment = replace(request.assignment, has_stored_kv=False)
        if not num_failures:
            request.enter(State.PLACED)  # the same replica decodes
        return False

    def prefill_leg_done(self, request: InFlightRequest) -> None:
        """Record that only the decode replica still runs the request."""
        live = request.live
        if request.outcome is not None or (leg := request.end_prefill_leg()) is None:
            return
        request.prefilled_by = leg.replica
        self.on_prefill_sent(leg.replica)
        self.metrics.count_prefill(live.model, "handed over")
        self._write_segment(live, self.now, Cause.MOVED, leg.replica.id)
        self.control.on_prompt_computed(live, self.now)
        self.control.on_moved(live, self.now)

    def _prefill_leg_failed(self, request: InFlightRequest) -> None:
        live, leg = request.live, request.prefill_leg
        if not self._leave(request, Cause.CRASHED, None if leg is None else leg.replica.id) or leg is None:
            return
        self.metrics.count_prefill(live.model, "failed")
        self.metrics.count_failure(live, leg.replica.pool)
        self.control.failed(live, self.now, leg.replica.id)
        self.holds.start(request)

    def _leave(self, request: InFlightRequest, cause: Cause, replica: int | None = None) -> bool:
        """Take a request off its replica, and record the stay. False if the request has ended. In a cascade, only stays
        with complete answers are recorded."""
        request.leave()
        if request.outcome is not None:
            return False
        if request.live.stage_index < 0:
            request.has_left = True
            self._write_segment(request.live, self.now, cause, replica)
        return True

    def _write_segment(self, live: Live, now: float, cause: Cause = Cause.FINISHED, replica: int | None = None) -> None:
        """Record one replica's part in a request of a cascade or combo, or with several attempts; by default the
        current replica's part."""
        if self._recorder is None:
            return
        replica = live.replica if replica is None else replica
        self._recorder.segments.write((
            live.id, replica, live.attempt, live.stage_index, live.enqueued_s, live.enqueued_s, NEVER, 0, 0, now, cause,
        ))  # fmt: skip

    # Cascades.

    def needs_score(self, live: Live) -> bool:
        return self.cascade is not None and live.stage_index >= 0 and not self.cascade.is_final(live)

    async def accept_or_escalate(self, request: InFlightRequest, score: float | None) -> None:
        self.scored(request, score)

    def scored(self, request: InFlightRequest, score: float | None) -> None:
        """Let the cascade accept the answer, or place the request at the next model."""
        assert self.scorer is not None
        live = request.live
        request.enter(State.HELD)
        request.prefilled_by = None
        stage, model = live.stage_index, live.model
        used = request.replica, live.prompt_tokens, live.generated_tokens, live.cached_tokens
        live.lengths += ((model, live.generated_tokens),)
        if score is None:
            self.control.unscored(live, self.scorer.accepts_unscored, self.now)
        else:
            live.quality += ((model, score),)
            self.control.on_judged(live, score, self.now)
        request.needs_score = self.needs_score(live)
        escalated = live.stage_index != stage
        self.metrics.count_judgement(model, "unscored" if score is None else "escalated" if escalated else "accepted")
        if escalated:
            request.escalated_tokens += used[1] + used[2]
            live.cached_tokens = 0
            if self.charge is not None and used[0] is not None:
                request.earlier_charges += (self.charge(model, used[0].pool, *used[1:]),)
            self.holds.start(request)

    # Replicas.

    def has_alternative(self, request: InFlightRequest, replica: int) -> bool:
        """Whether a replica other than this one could serve the request."""
        return self.services[request.live.model].is_served_without(replica)

    def fail_over(self, replica: LiveReplica, is_removed: bool = False) -> None:
        """Abort a replica's requests, so that they continue elsewhere if possible."""
        why = _REMOVED if is_removed else _UNRESPONSIVE
        for request in list(self.requests.values()):
            if request.prefill_leg is not None and request.prefill_leg.replica is replica:
                request.abort_prefill_leg(why)
            if request.replica is replica:
                request.abort(why)
                if request.reservation is not None and request.reservation.waits_for_slot:
                    self._place_again(request)

    def drain(self, replica: LiveReplica, on: bool) -> None:
        """Drain a replica, or end the drain. While other replicas can take requests, a draining replica gets none, and
        its movable requests move out."""
        self.roster.set_draining(replica, on)
        if not on:
            return
        service, now = self.services[replica.model], self.now
        for request in list(self.requests.values()):
            if request.replica is replica and request.can_move:
                target = service.choose(request.live, now)
                if target is not None and replica.id not in (target, request.live.decode_replica):
                    self.move(request.live, target, None, now)

    # Control's effects.

    def start(self, live: Live, replica: int, now: float, has_stored_kv: bool = False) -> None:
        """Reserve a place at the replica, and wake the request's task, which sends it."""
        if self.replicas[replica].is_single_phase or (self.roster.places_pairs_at_once and live.decode_replica >= 0):
            self._start_dual_dispatch(live, replica, now)
            return
        request = self.requests[live.id]
        request.enter(_PLACED)
        request.replica = endpoint = self.replicas[replica]
        service, fallbacks = self.services[live.model], self.control.fallbacks
        request.assignment = Assignment(
            live.decode_replica >= 0,
            has_stored_kv,
            live.allowed is None and len(service.members) > 1,
            fallbacks.are_used and fallbacks.has(live, service),
        )
        live.replica, live.enqueued_s = replica, now
        live.stage = WAITING
        request.reservation = reservation = endpoint.reserve(live)
        reservation.on_slot = request.wake
        request.wake()

    def _start_dual_dispatch(self, live: Live, prefill: int, now: float) -> None:
        """Reserve places at both replicas of a single-phase pair, and wake the request's task."""
        request, prefiller, decoder = self.requests[live.id], self.replicas[prefill], self.replicas[live.decode_replica]
        request.enter(State.PLACED)
        fallbacks = self.control.fallbacks
        has_fallback = fallbacks.are_used and fallbacks.has(live, self.services[live.model])
        request.assignment = Assignment(has_fallback=has_fallback)
        request.prefill_leg = PrefillLeg(prefiller, prefiller.reserve(live), live.generated_tokens)
        live.replica, live.decode_replica, live.enqueued_s = decoder.id, -1, now
        live.stage = WAITING
        request.replica = decoder
        request.reservation = reservation = decoder.reserve(live)
        reservation.count_tokens(0)  # another replica computes the prompt
        reservation.on_slot = request.wake
        request.wake()

    def served_by(self, request: InFlightRequest, replica: LiveReplica) -> None:
        """Record that a proxy sent the request to a replica other than the one that control chose."""
        live = request.live
        self.metrics.count_failure(live, self.replicas[live.replica].pool)
        self._leave(request, Cause.CRASHED)
        live.attempt += 1
        live.decode_replica = -1
        self.start(live, replica.id, self.now)
        request.send()
        self.control.on_moved(live, self.now)

    def cancel(self, live: Live, now: float) -> None:
        """Abort the request at its engine."""
        request = self.requests[live.id]
        request.abort("the request was cancelled")
        request.detach()
        self.control.on_cancelled(live, now)

    def move(self, live: Live, target: int, stage_blocks: int | None, now: float) -> None:
        """Abort the request at its replica. The request then continues at the target from its tokens so far."""
        self._abort_to_continue(live, target, State.MOVING)

    def pause(self, live: Live, now: float) -> None:
        """Abort the request at its replica. The request is then held, and later continues from its tokens so far."""
        self._abort_to_continue(live, live.replica, State.PAUSED)

    def _abort_to_continue(self, live: Live, target: int, state: State) -> None:
        request = self.requests.get(live.id)
        if request is None or not request.can_move:
            return
        request.enter(state)
        live.move = request
        request.move_target = self.replicas[target]
        request.move_target.num_arriving += 1
        request.abort("the request moves")

    def hand_over(self, live: Live, target: int, now: float) -> None:
        """Continue the request at the decode replica, which fetches the KV cache if it is stored."""
        request = self.requests[live.id]
        if request.reservation is not None:
            self._write_segment(live, now, Cause.MOVED)
        request.leave()
        has_stored_kv = request.assignment.has_stored_kv
        self.start(live, target, now, has_stored_kv)
        if has_stored_kv and request.reservation is not None:
            request.reservation.count_tokens(0)  # the prompt is already computed
        self.control.on_moved(live, now)

    def judge(self, live: Live, now: float) -> None:
        """Make the request's task fetch a score for the answer."""
        self._write_segment(live, now)
        request = self.requests[live.id]
        self._end_move(request)  # an answer may be complete before the move that was to continue it
        request.enter(State.SCORED)

    def set_role(self, replica: int, role: Role) -> None:
        """Change the kind of requests that the replica is sent. Its engine can run both phases."""
        self.replicas[replica].role = role
        self._on_role(replica, role, self.now)

    def notify_ended(self, live: Live, now: float, outcome: Outcome) -> None:
        """Wake the request's task, which answers the client."""
        request = self.requests.pop(live.id)
        is_away = request.state is _HELD_STATE
        if request.hold_timeout is not None:
            request.hold_timeout.cancel()
        if request.move_target is not None:
            self._end_move(request)
        request.end(outcome)
        if outcome is _FINISHED_OUTCOME and live.stage_index >= 0 and not self.needs_score(live):
            self._write_segment(live, now)
        elif live.stage_index < 0 and not is_away and (request.prefilled_by is not None or request.has_left):
            self._write_segment(live, now, _CAUSES[outcome])
        self._on_ended(request, outcome, now)
