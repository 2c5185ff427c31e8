"""The life of a request, without I/O. A driver supplies the clock and the effects.

Read `Control.on_arrival`, `place`, `release_held` and `on_finished` first: they are the loop. Every other `on_` method
handles one more event of a request or a replica.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from random import Random
from typing import Final

from mypy_extensions import mypyc_attr

from headway.control.cascade_stages import CascadeStages
from headway.control.decisions import DecisionObserver
from headway.control.effects import Effects
from headway.control.live import ENDED, HELD, Live
from headway.control.model_fallbacks import ModelFallbacks
from headway.control.parts import Parts
from headway.control.policies import CascadeConfig, FallbackConfig, Policies
from headway.control.recorder import Recorder
from headway.control.roles import Roles, memberships
from headway.control.scaling import Scaling
from headway.control.sent_prompts import SentPrompts
from headway.control.service import Member, Service
from headway.core.errors import HeadwayError, unknown
from headway.core.fleet import Fallbacks, Role
from headway.core.record import Outcome
from headway.core.request import Phase

_FINISHED: Final = Outcome.FINISHED


@mypyc_attr(allow_interpreted_subclasses=True)
class Control:
    """Places requests on replicas, holds requests when no replica has room, and follows each request to its end."""

    def __init__(self, effects: Effects, recorder: Recorder | None, notify: bool) -> None:
        """`recorder` records the requests; None: nothing is recorded."""
        self.effects = effects
        self._notify = notify
        self._recorder = recorder
        self._roles = Roles(effects)
        self.last_s = 0.0
        """Latest end of a request or of a cascade stage."""
        self.parts = Parts(effects, self.place)
        self.by_model, self.services = self.parts.by_model, self.parts.services
        self.fallbacks = ModelFallbacks()
        self.max_hold_s: float | None = None
        """Longest hold before the first placement, in seconds; None: no limit."""
        self._only: Service | None = None
        self._has_entry_steps = False
        self._slo: Policies | None = None
        """The policies whose SLOs apply to requests without their own; None: no default SLOs."""

    def close(self) -> None:
        """Let go of the services, which refer to the replicas, when a run is over."""
        self.parts.close()
        self._only, self.fallbacks = None, ModelFallbacks()

    # The loop.

    def on_arrival(self, live: Live, now: float) -> None:
        """A request arrives: count it in the demand, enter the cascade, and place it unless admission holds it."""
        if live.reasoning_tokens:
            live.phase = Phase.REASONING
        if live.lora:
            live.name_kv_by_adapter()
        if self._slo is not None and live.deadline_s is None:
            self._add_slo(live, self._slo)
        if live.timeout_s is not None:
            self.effects.call_at(live.arrival_s + live.timeout_s, self.on_timeout, live)
        if self._has_entry_steps and self._is_kept_on_entry(live, now):
            return
        self.place(live, now)

    @staticmethod
    def _add_slo(live: Live, default: Policies) -> None:
        if live.slo_ttft_s is None:
            live.slo_ttft_s = default.slo_ttft_s
        if live.slo_tpot_s is None:
            live.slo_tpot_s = default.slo_tpot_s
        if live.slo_e2e_s is None:
            live.slo_e2e_s = default.slo_e2e_s

    def place(
        self,
        live: Live,
        now: float,
        jumps_queue: bool = False,
        exclude: int | None = None,
        fallback: Service | None = None,
    ) -> None:
        """Start a request on the replica that the router chooses, or hold it, or reject it. `fallback`: the service
        that answers in place of the request's own service."""
        service = self.service_of(live) if fallback is None else fallback
        if fallback is None and self.fallbacks.are_used:
            service = self.fallbacks.answering(live, service, now)
        if service.hold_queue.num and not jumps_queue and service.fits(live):
            self._hold(service, live, now)
            self.release_held(service, now)
        elif (replica := service.choose(live, now, exclude)) is not None:
            if service.sent is not None:
                service.started(live, replica, now)
            self.effects.start(live, replica, now)
        elif why := service.why_rejected(live, exclude):
            self._refuse(live, now, why)
        else:
            self._hold(service, live, now, exclude)

    def _hold(self, service: Service, live: Live, now: float, exclude: int | None = None) -> None:
        """Hold a request; if it was never placed, only for a limited time."""
        service.hold(live, now, exclude)
        if self.max_hold_s is not None and live.placed_s != live.placed_s:
            self.effects.call_at(now + self.max_hold_s, self.on_held_for_long, live)

    def release_held(self, service: Service, now: float) -> None:
        """Place held requests in rank order while a replica has room."""
        queue = service.hold_queue
        refused: list[Live] = []
        while (live := queue.first(now)) is not None:
            replica = service.choose(live, now)
            if replica is not None:
                if service.shadow is not None:
                    service.compare_order(live, now)
                queue.pop(now)
                service.started(live, replica, now)
                self.effects.start(live, replica, now)
            elif service.is_without_candidate(live):
                queue.pop(now)
                refused.append(live)
            elif not self._start_below_share(service, now):
                break
        for live in refused:
            self._refuse(live, now)

    def _start_below_share(self, service: Service, now: float) -> bool:
        """Start a request of a share below its fair part, although another request ranks first: room is reserved for
        it."""
        queue = service.hold_queue
        live = queue.next_below_share()
        replica = None if live is None else service.choose(live, now)
        if live is None or replica is None:
            return False
        queue.remove(live, now)
        service.started(live, replica, now)
        self.effects.start(live, replica, now)
        return True

    def on_finished(self, live: Live, now: float) -> None:
        """A request has all its tokens: end the request, unless a cascade must judge its answer."""
        cascade = self.parts.cascade
        if cascade is None or live.stage_index < 0 or cascade.is_final(live):
            self.end(live, now, _FINISHED)
            return
        live.stage = HELD
        self.last_s = max(self.last_s, now)
        cascade.judged[live.id] = live
        service = self.service_of(live)
        service.ended(live, now)
        service.teach(live, now, _FINISHED)
        self.on_room(service, now)
        self.effects.judge(live, now)

    def end(self, live: Live, now: float, outcome: Outcome, is_learned: bool = False) -> None:
        """End a request: record it, report it, and reuse its room. `is_learned`: the policies have already learned from
        it."""
        live.stage = ENDED
        service = self.service_of(live)
        if self._has_entry_steps:
            if self.parts.cascade is not None:
                self.parts.cascade.judged.pop(live.id, None)
            if (admissions := self.parts.admissions.get(service)) is not None:
                admissions.discard(live)
        end_s = now + live.response_s if live.cancelled_s != live.cancelled_s else live.cancelled_s
        if end_s > self.last_s:
            self.last_s = end_s
        if outcome is not _FINISHED:
            live.forget_after(end_s)
        if self._recorder is not None:
            self._recorder.write_request(live, end_s, outcome)
        if service.sent is not None:
            service.ended(live, end_s)
        if service.learners and not is_learned:
            service.teach(live, end_s, outcome)
        if self._notify:
            self.effects.notify_ended(live, end_s, outcome)
        if service.hold_queue.num or self.parts.scaling is not None:
            self.on_room(service, now)

    def on_refused(self, live: Live, now: float, reason: int) -> None:
        """A tenant's limit denies a request before any policy sees it. `reason` is a key of `REFUSED`."""
        live.stage = ENDED
        if now > self.last_s:
            self.last_s = now
        if self._recorder is not None:
            self._recorder.write_request(live, now, Outcome.REJECTED, reason)
        if self._notify:
            self.effects.notify_ended(live, now, Outcome.REJECTED)

    # Steps of the loop.

    def service_of(self, live: Live) -> Service:
        """The service of the request's model; the only service if the request names no model."""
        service = self.by_model.get(live.model) if live.model else self._only
        if service is None:
            serves = ", ".join(service.model for service in self.services)
            names = f"is for model {live.model!r}" if live.model else "names no model"
            raise HeadwayError(f"request {live.id} {names}; the fleet serves: {serves}")
        return service

    def _is_kept_on_entry(self, live: Live, now: float) -> bool:
        if self.parts.cascade is not None and self.parts.cascade.serves(live):
            self.parts.cascade.enter(live, now)
        service = self.service_of(live)
        self._count_demand(service, live)
        admissions, shedding = self.parts.admissions.get(service), self.parts.shedding.get(service)
        is_held = admissions is not None and admissions.hold(live)
        if service.shadow is not None and service.shadow.compares_admission:
            service.compare_admission(live, is_held, now)
        if is_held:
            return True
        return shedding is not None and (why := shedding.why(live, now)) != "" and self._refuse(live, now, why)

    def _count_demand(self, service: Service, live: Live) -> None:
        if self.parts.scaling is not None:
            self.parts.scaling.count_arrival(live, service.model)

    def on_room(self, service: Service, now: float) -> None:
        """A request has left a replica: release held requests, and stop drained replicas."""
        if service.hold_queue.num:
            self.release_held(service, now)
        if self.parts.scaling is not None:
            self.parts.scaling.stop_empty(now)

    def _refuse(self, live: Live, now: float, why: str = "") -> bool:
        """Let a fallback answer a request, or reject it. Returns True: the service is done with the request."""
        service = self.service_of(live)
        target = self.fallbacks.after_rejection(live, service, now)
        if target is not None:
            self.place(live, now, fallback=target)
            return True
        if why:
            service.note_refusal(live, now, why)
        self.end(live, now, Outcome.REJECTED)
        return True

    def _move_held(self, now: float) -> None:
        """Move requests that are held by models without replicas to their fallbacks."""
        for fallback in self.fallbacks.while_down():
            for live in fallback.home.take_held():
                target = self.fallbacks.take_held(live, fallback, now)
                if target is None:
                    fallback.home.hold_queue.push(live, now)
                else:
                    self.place(live, now, fallback=target)

    # Other events of requests.

    def on_judged(self, live: Live, score: float, now: float) -> None:
        """An answer was scored: accept it, or let the next cascade stage answer."""
        cascade = self.parts.cascade
        if cascade is None or cascade.judged.pop(live.id, None) is None:
            return
        if cascade.accepts(live, score, now):
            self.end(live, now, _FINISHED, is_learned=True)
        else:
            cascade.escalate(live)
            self._count_demand(self.service_of(live), live)
            self.place(live, now)

    def on_phase_changed(self, live: Live, now: float) -> None:
        """A request has ended its reasoning."""
        if self.parts.migrations:
            migrations = self.parts.migrations.get(self.service_of(live))
            if migrations is not None:
                migrations.at_phase(live, now)

    def on_prefilled(self, live: Live, now: float) -> None:
        """A prefill-only replica has finished a prompt: hand the request over to its decode replica."""
        service = self.service_of(live)
        target = service.member(live.decode_replica)
        chosen = live.decode_replica
        tokens = live.prompt_tokens + live.output_tokens
        if (
            not service.names_decoder
            or target is None
            or target.view.role == "prefill"
            or not target.can_serve(tokens, live.lora)
        ):
            chosen = service.choose_decoder(live, live.replica)
        live.decode_replica = -1
        if chosen >= 0 and chosen != live.replica:
            self.effects.hand_over(live, chosen, now)

    def on_prompt_computed(self, live: Live, now: float) -> None:
        """A replica has computed a prompt: it may now have room for a request held by the prompt window."""
        if live.sent_to is None:
            return
        SentPrompts.start(live)
        service = self.service_of(live)
        if service.hold_queue.num:
            self.release_held(service, now)

    def on_moved(self, live: Live, now: float) -> None:
        """A request has moved to another replica."""
        live.moves += 1
        service = self.service_of(live)
        if service.sent is not None:
            service.sent.move(live, live.replica)
        self.on_room(service, now)

    def on_paused(self, live: Live, now: float) -> None:
        """A request was paused at its replica to make room for a held request. Hold the paused request until there is
        room."""
        live.preemptions += 1
        service = self.service_of(live)
        service.hold(live, now)
        if service.preemptions is not None:
            service.preemptions.paused(live)
        self.release_held(service, now)

    def on_cancelled(self, live: Live, now: float) -> None:
        """The driver has aborted the request."""
        self.end(live, now, Outcome.CANCELLED)

    def on_timeout(self, now: float, live: Live) -> None:
        """The client has given up."""
        if live.stage is ENDED:
            return
        live.cancelled_s = now
        if live.stage is HELD:
            self.end(live, now, Outcome.CANCELLED)
        else:
            self.effects.cancel(live, now)

    def on_held_for_long(self, now: float, live: Live) -> None:
        """A request was held for `max_hold_s`: unless it has been placed, a fallback answers it or it is rejected."""
        cascade = self.parts.cascade
        is_judged = cascade is not None and live.id in cascade.judged
        if live.stage is HELD and live.placed_s != live.placed_s and not is_judged:
            self._refuse(live, now, "it was held for too long")

    # Events of replicas.

    def on_unit_started(self, deployment: str, members: Sequence[Member], now: float) -> None:
        """All replicas of a unit that scaling started are up."""
        assert self.parts.scaling is not None
        self.release_held(self.parts.scaling.on_started(deployment, members), now)
        self._move_held(now)

    def on_crashed(self, replica: int, lost: Sequence[Live], now: float) -> None:
        """A replica is down. Place its requests again; they keep their generated tokens."""
        for service in self.services:
            if (member := service.member(replica)) is not None:
                member.is_up = False
                self._roles.cover(service)
        self._move_held(now)
        for live in lost:
            live.attempt += 1
            if live.cancelled_s == live.cancelled_s:
                self.end(live, now, Outcome.CANCELLED)
            else:
                self.place(live, now, jumps_queue=True)

    def on_recovered(self, replica: int, now: float) -> None:
        """A replica is up again, with no requests."""
        for service, member in memberships(self.services, replica):
            member.is_up = True
            self._roles.cover(service)
            self.release_held(service, now)
        self._move_held(now)

    def change_role(self, replica: int, role: Role, now: float, is_ready: bool) -> None:
        """Change a replica's role (Cauchy, section 3.6). Requests that have started there stay.

        Unless `is_ready`, the replica takes no new request until `on_role_changed`.
        """
        for service, member in memberships(self.services, replica):
            member.role = role
            member.num_switches += not is_ready
            self._roles.rearrange(service, now)
            self.release_held(service, now)

    def on_role_changed(self, replica: int, now: float) -> None:
        """A replica has finished a role change and takes requests again."""
        for service, member in memberships(self.services, replica):
            member.num_switches -= 1
            self._roles.rearrange(service, now)
            self.release_held(service, now)

    def on_views_refreshed(self, now: float) -> None:
        """Views were refreshed and may show new room: release held requests."""
        for service in self.services:
            if service.hold_queue.num:
                self.release_held(service, now)

    # Set-up, queries and the end of a run.

    def configure(
        self,
        policies: Policies,
        members: Mapping[str, Sequence[Member]],
        names: Mapping[str, Sequence[str]],
        seed: int,
        scaling: Callable[[dict[str, Service]], Scaling | None],
        observer: DecisionObserver | None = None,
        fallbacks: Fallbacks | None = None,
    ) -> None:
        """Create one service per model, with new policies.

        `members`: replicas by model; `names`: every name of each model; `scaling`: creates the scaling part.
        """
        self.fallbacks.of_fleet = fallbacks or Fallbacks()
        self.max_hold_s = policies.max_hold_s
        parts = self.parts
        for model in members:
            self.add_service(policies, model, members[model], names[model], seed, observer)
        parts.scaling = scaling(self.by_model)
        if policies.cascade is not None:
            config = policies.cascade
            for name in config.models:
                if name not in self.by_model:
                    raise unknown("model", name, self.by_model, "cascade")
            stages = [self.by_model[name] for name in config.models]
            parts.cascade = self._cascade_stages(config, stages, Random(f"{seed}/cascade"))
        for service in self.services:
            parts.add_learners(service)
        self.use_fallbacks(self.fallbacks.of_fleet, policies.fallback)
        self.use_slo(policies)
        self.note_parts()

    def add_service(
        self,
        policies: Policies,
        model: str,
        members: Sequence[Member],
        names: Sequence[str],
        seed: int,
        observer: DecisionObserver | None,
    ) -> None:
        """Create the service of one more model. A name that another model has is skipped."""
        service = self.parts.add_service(policies, model, members, self.fallbacks.of_fleet, seed, observer)
        for name in names:
            self.by_model.setdefault(name, service)

    def use_slo(self, policies: Policies) -> None:
        """Give requests without their own SLOs the SLOs of `policies` from now on."""
        is_none = policies.slo_ttft_s is policies.slo_tpot_s is policies.slo_e2e_s is None
        self._slo = None if is_none else policies

    def use_fallbacks(self, fallbacks: Fallbacks, config: FallbackConfig) -> None:
        """Use these fallbacks from now on. Unchanged fallbacks keep their state."""
        self.fallbacks.use(fallbacks, config, self.by_model, self.parts.scaling)

    def note_parts(self) -> None:
        """Record which steps of an arrival the current parts need."""
        fallbacks = {name for names in self.fallbacks.of_fleet.models.values() for name in names}
        services = dict.fromkeys(self.by_model.values())
        asked = [service for service in services if service.model not in fallbacks]
        self._only = asked[0] if len(asked) == 1 else None
        compares_admission = any(each.shadow and each.shadow.compares_admission for each in self.services)
        parts = self.parts
        has_parts = parts.cascade or parts.admissions or parts.shedding or parts.scaling
        self._has_entry_steps = bool(has_parts or compares_admission)

    def _cascade_stages(self, config: CascadeConfig, stages: list[Service], random: Random) -> CascadeStages:
        return CascadeStages(config, config.policy(), stages, random)

    def write_unfinished(self, unfinished: Sequence[Live], now: float) -> None:
        """Record every request in the system as unfinished: the `unfinished` requests at the replicas, and the requests
        that control holds."""
        judged = [] if self.parts.cascade is None else self.parts.cascade.judged.values()
        for live in sorted([*unfinished, *judged, *self.parts.held_requests()], key=attrgetter("id")):
            live.forget_after(now)
            if self._recorder is not None:
                self._recorder.write_request(live, now, Outcome.UNFINISHED)
