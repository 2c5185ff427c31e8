"""The gateway's driver: control's clock is the wall's, its effects are requests to engines."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from headway.control.control import Ticking
from headway.control.decisions import DecisionObserver
from headway.control.live import HELD, NEVER, WAITING, Live
from headway.control.policies import Policies
from headway.control.recorder import Recorder
from headway.control.scaling import Scaling
from headway.control.service import Member, Service
from headway.core.fleet import Role
from headway.core.record import Cause, Outcome
from headway.gateway.clock import Clock
from headway.gateway.fleet.replica import LiveReplica
from headway.gateway.scheduling import sglang_disaggregation
from headway.gateway.scheduling.control import LiveControl
from headway.gateway.scheduling.hand_over import move_out, pass_on
from headway.gateway.scheduling.in_flight import InFlightRequest
from headway.gateway.scheduling.scorer import AnswerScorer, Confidence
from headway.gateway.scheduling.scoring import scored
from headway.gateway.telemetry.histogram import Histogram
from headway.gateway.upstream.engine import EngineEndpoint

log = logging.getLogger("headway.gateway")
_CAUSES = {Outcome.FINISHED: Cause.FINISHED, Outcome.CANCELLED: Cause.CANCELLED, Outcome.REJECTED: Cause.CRASHED}


class Driver:
    """Control's effects, and what it is told, in real time. Belongs to one event loop."""

    def __init__(
        self,
        clock: Clock,
        replicas: Sequence[LiveReplica],
        names: dict[str, tuple[str, ...]],
        policies: Policies,
        seed: int,
        recorder: Recorder,
        max_tokens: Callable[[LiveReplica], int],
        hold_s: float,
        jury: AnswerScorer | None,
        scaling: Callable[[dict[str, Service]], Scaling | None],
        decisions: DecisionObserver | None = None,
    ) -> None:
        self._clock, self._hold_s = clock, hold_s
        self._jury = jury
        self._recorder = recorder
        self._max_tokens = max_tokens
        self.replicas = list(replicas)
        self.tickets: dict[int, InFlightRequest] = {}
        """Requests that have not ended."""
        self.on_ended: Callable[[InFlightRequest, Outcome, float], None] = lambda ticket, outcome, now: None
        self.on_sending: Callable[[InFlightRequest, float, float], None] = lambda ticket, read_s, now: None
        self.gaps: Callable[[InFlightRequest], Histogram] = lambda ticket: Histogram(())
        """Where a request's times between tokens are counted."""
        self.on_judged: Callable[[str, str], None] = lambda model, outcome: None
        self.on_prefilled: Callable[[str, str], None] = lambda model, outcome: None
        self.on_role: Callable[[int, Role, float], None] = lambda replica, role, now: None
        self.control = LiveControl(self, recorder, notify=True)
        members = {model: [self._member(r) for r in self.replicas if r.model == model] for model in names}
        self.control.configure(policies, members, names, seed, scaling, decisions)
        self.services = self.control.by_model
        self.cascade = self.control.cascade

    @property
    def now(self) -> float:
        """Seconds since the start."""
        return self._clock.now

    def waiting(self) -> list[Live]:
        """Requests in hold queues, and those that admission policies hold."""
        return self.control.held_requests()

    def start_ticking(self) -> None:
        """Let policies that want to be asked now and then be asked."""
        for policy in self.control.ticking():
            if policy.interval_s is not None:
                self._clock.at(self.now + policy.interval_s, self._tick, policy)

    def _tick(self, now: float, policy: Ticking) -> None:
        assert policy.interval_s is not None
        self._clock.at(now + policy.interval_s, self._tick, policy)
        policy.tick(self.now)

    # What requests do.

    def arrived(self, ticket: InFlightRequest) -> None:
        """A request comes in."""
        self.tickets[ticket.live.id] = ticket
        try:
            self.control.on_arrival(ticket.live, self.now)
        except BaseException:  # a policy failed, and nobody waits for this request
            self.control.refused(ticket.live, self.now)
            raise
        self.hope(ticket)

    # Of cascades.

    def judges(self, live: Live) -> bool:
        """Its present model's answer will be judged."""
        return self.cascade is not None and live.stage_index >= 0 and not self.cascade.is_final(live)

    def confidence(self) -> Confidence | None:
        """What listens to how sure a model is, if that is what answers are judged by."""
        return None if self._jury is None else self._jury.confidence()

    async def score(
        self, ticket: InFlightRequest, question: str, answer: str, confidence: Confidence | None
    ) -> float | None:  # fmt: skip
        """What an answer is worth, 0 to 100; None: no judge could tell, or nobody waits for it any more."""
        assert self._jury is not None
        return await self._jury.rate(ticket, question, answer, confidence)

    async def judged(self, ticket: InFlightRequest, score: float | None) -> None:
        """Its score, if there is one: it will do, or the next model answers."""
        self.scored(ticket, score)

    def scored(self, ticket: InFlightRequest, score: float | None) -> None:
        """The same, at once."""
        assert self._jury is not None
        scored(self, ticket, score, self._jury.accepts_unjudged)

    def wrote(self, live: Live, now: float, cause: Cause = Cause.FINISHED, by: int | None = None) -> None:
        """Write down one replica's part in a request that was with several: of a cascade, or of a combo."""
        segments = self._recorder.segments
        segments.write(segments.pack(
            live.id, live.replica if by is None else by, live.attempt,
            live.stage_index, live.enqueued_s, live.enqueued_s, NEVER, 0, 0, now,
            cause,
        ))  # fmt: skip

    def hope(self, ticket: InFlightRequest) -> None:
        """A request that no replica is up for waits for one, but not for ever."""
        if ticket.live.stage is HELD and ticket.outcome is None and not self._any_up(ticket):
            if ticket.despair is not None:
                ticket.despair.cancel()
            ticket.despair = self._clock.at(self.now + self._hold_s, self._despair, ticket)
            ticket.timers.append(ticket.despair)

    def _any_up(self, ticket: InFlightRequest) -> bool:
        return self.services[ticket.live.model].any_up

    def _despair(self, now: float, ticket: InFlightRequest) -> None:
        if ticket.live.stage is HELD and not self._any_up(ticket):
            self.control.refused(ticket.live, now)

    def sending(self, ticket: InFlightRequest, read_s: float) -> None:
        """It goes to a replica for the first time; its last byte had come by `read_s`."""
        self.on_sending(ticket, read_s, self.now)

    def phase_changed(self, live: Live) -> None:
        """Its reasoning is over."""
        self.control.on_phase_changed(live, live.answer_s)

    def finished(self, ticket: InFlightRequest) -> None:
        """Its answer is out, or its client has been told why there is none."""
        ticket.leave()
        if ticket.outcome is None:
            self.control.on_finished(ticket.live, self.now)

    def prefilled(self, ticket: InFlightRequest, kept: bool) -> None:
        """Its prompt is computed for another replica, and its KV cache kept; or not, and who decodes does it all."""
        pass_on(self, ticket, kept, "handed over" if kept else "not kept")

    def unprefilled(self, ticket: InFlightRequest) -> None:
        """Its prefill replica failed it: who was to decode does all of it, else it is placed anew."""
        if not pass_on(self, ticket, False, "failed", failures=1):
            self.failed(ticket, again=True)

    # Of who computes its prompt at the same time as another waits for it.
    computed, half_failed = sglang_disaggregation.computed, sglang_disaggregation.failed

    def failed(self, ticket: InFlightRequest, again: bool, untouched: bool = False) -> None:
        """Its replica failed it: it is placed anew, or turned away. `untouched`: what was kept for it still is."""
        live, source = ticket.live, ticket.prefilled_by
        ticket.leave()
        if ticket.outcome is not None:
            return
        if not again:
            self.control.refused(live, self.now)
            return
        if source is not None:
            self.wrote(live, self.now, Cause.CRASHED)
            if ticket.is_kept and untouched and self.control.other_decodes(live, source.id, self.now):
                return
        self.control.failed(live, self.now)
        self.hope(ticket)

    def refused(self, ticket: InFlightRequest) -> None:
        """Nobody will have it."""
        ticket.leave()
        self.control.refused(ticket.live, self.now)

    def gave_up(self, ticket: InFlightRequest) -> None:
        """Its client is gone, or it has run out of time."""
        if ticket.outcome is None:
            self.control.gave_up(ticket.live, self.now)

    def emptied(self, ticket: InFlightRequest) -> None:
        """A request that had ended already has left its replica only now."""
        ticket.leave()
        self.control.emptied(ticket.live, self.now)

    def forget(self, ticket: InFlightRequest) -> None:
        """Nobody waits for it any more, even if a policy failed where its end should have been told."""
        ticket.leave()
        self.gave_up(ticket)
        self.tickets.pop(ticket.live.id, None)
        for timer in ticket.timers:
            timer.cancel()

    def landed(self, ticket: InFlightRequest) -> None:
        """A request that is to move has left its replica: it goes on at the other one, or where it was if that is
        gone."""
        source, target, live = ticket.replica, ticket.moving_to, ticket.live
        assert source is not None and target is not None
        ticket.leave()
        self._end_move(ticket)
        member = self.services[live.model].member(target.id)
        if ticket.outcome is not None:
            return
        if self.replicas[source.id].is_single_phase:  # with whom it goes on was for then
            self.control.place(live, self.now)
            self.control.on_moved(live, self.now)
            return
        if member is not None and member.can_serve(live.prompt_tokens + live.output_tokens):
            self.start(live, target.id, self.now)
            self.control.on_moved(live, self.now)
        else:
            self.start(live, source.id, self.now)

    def _end_move(self, ticket: InFlightRequest) -> None:
        if ticket.moving_to is not None:
            ticket.moving_to.num_arriving -= 1
            ticket.moving_to = None
            ticket.live.move = None

    # What replicas do.

    def up(self, replica: EngineEndpoint) -> None:
        """A replica is there, or there again."""
        self.control.on_recovered(replica.id, self.now)

    def down(self, replica: EngineEndpoint) -> None:
        """A replica is to be given nothing. Its streams go on, as long as they do."""
        self.control.on_crashed(replica.id, [], self.now)

    def abandon(self, replica: LiveReplica) -> None:
        """A replica is gone, or hangs: what it streams goes on elsewhere, if it can."""
        for ticket in list(self.tickets.values()):
            if ticket.half is not None and ticket.half.replica is replica:
                ticket.stop_half("does not answer any more")
            if ticket.replica is replica:
                ticket.stop("does not answer any more")
                if ticket.seat is not None and ticket.seat.waits:
                    self.failed(ticket, again=True)

    def add(self, replica: LiveReplica) -> None:
        """One more is there, which is not up yet."""
        self.replicas.append(replica)
        service = self.services[replica.model]
        service.members.append(self._member(replica))
        service.refresh()

    def _member(self, replica: LiveReplica) -> Member:
        """As control knows one that has not been seen to be up."""
        member = Member(replica, self._max_tokens(replica), None, replica.deployment)
        member.is_up, member.is_single_phase = False, replica.is_single_phase
        return member

    def gone(self, replica: LiveReplica) -> None:
        """A replica is empty, and does not come back."""
        service = self.services[replica.model]
        service.members = [member for member in service.members if member.view is not replica]
        service.refresh()

    def drain(self, replica: LiveReplica, on: bool) -> None:
        """Give it nothing more, as long as there are others, and move out what can be moved; or use it again."""
        service, now = self.services[replica.model], self.now
        member = service.member(replica.id)
        assert member is not None
        member.is_draining = replica.is_draining = on
        service.refresh()
        if not on:
            self.control.release_held(service, now)
            return
        move_out(self, replica)

    # Control's effects.

    def start(self, live: Live, replica: int, now: float) -> None:
        """Count the request at its replica at once; its own task sends it."""
        self._start(live, replica, now, is_kept=False)

    def _start(self, live: Live, replica: int, now: float, is_kept: bool) -> None:
        if self.replicas[replica].is_single_phase:
            sglang_disaggregation.begin(self, live, replica, now)
            return
        ticket = self.tickets[live.id]
        ticket.replica = self.replicas[replica]
        ticket.is_split, ticket.is_kept = live.decode_replica >= 0, is_kept
        live.replica, live.enqueued_s = replica, now
        live.enter(WAITING)
        ticket.seat = seat = ticket.replica.take(live)
        seat.called = ticket.wake
        ticket.wake()

    def cancel(self, live: Live, now: float) -> None:
        """Close the connection, on which engines abort."""
        ticket = self.tickets[live.id]
        ticket.stop("the request was cancelled")
        ticket.leave()
        self.control.on_cancelled(live, now)

    def move(self, live: Live, target: int, stage_blocks: int | None, now: float) -> None:
        """Have the request leave its replica; it is continued at the other one by what it has said so far."""
        ticket = self.tickets.get(live.id)
        if ticket is None or not ticket.can_move or not ticket.is_streaming:
            return
        live.move = ticket
        ticket.moving_to = self.replicas[target]
        ticket.moving_to.num_arriving += 1
        ticket.stop("the request moves")

    def hand_over(self, live: Live, target: int, now: float) -> None:
        """Have the request go on at the replica that decodes, which fetches what is kept for it."""
        ticket = self.tickets[live.id]
        if ticket.seat is not None:
            self.wrote(live, now, Cause.MOVED)
        ticket.leave()
        self._start(live, target, now, ticket.is_kept)
        if ticket.is_kept and ticket.seat is not None:
            ticket.seat.produced(0)  # its prompt is computed
        self.control.on_moved(live, now)

    def judge(self, live: Live, now: float) -> None:
        """Have the request's own task see to it."""
        self.wrote(live, now)
        self.tickets[live.id].is_unjudged = True

    def set_role(self, replica: int, role: Role) -> None:
        """A role is what a replica is given: its engine does either."""
        self.replicas[replica].role = role
        self.on_role(replica, role, self.now)

    def call_at(self, time_s: float, action: Callable[[float, Any], None], argument: Any) -> None:
        """Call `action(time_s, argument)` then."""
        self.tickets[argument.id].timers.append(self._clock.at(time_s, action, argument))

    def notify_ended(self, live: Live, now: float, outcome: Outcome) -> None:
        """Tell the task that answers the client."""
        ticket = self.tickets.pop(live.id)
        ticket.outcome = outcome
        if ticket.judgement is not None:
            ticket.judgement.cancel()
        for timer in ticket.timers:
            timer.cancel()
        self._end_move(ticket)
        ticket.wake()
        if outcome is Outcome.FINISHED and live.stage_index >= 0 and not self.judges(live):
            self.wrote(live, now)
        elif live.stage_index < 0 and ticket.prefilled_by is not None:
            self.wrote(live, now, _CAUSES[outcome])
        self.on_ended(ticket, outcome, now)
