"""The life of a request, sans I/O: it arrives, is placed or held, and ends. A driver supplies clock and effects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from headway.control.admissions import Admissions
from headway.control.cascading import Cascading
from headway.control.live import ENDED, HELD, NEVER, Live
from headway.control.migrations import Migrations
from headway.control.recorder import Recorder
from headway.control.roles import Roles
from headway.control.scaling import Scaling
from headway.control.service import Member, Service
from headway.core.errors import HeadwayError
from headway.core.fleet import Role
from headway.core.record import Ended, Outcome
from headway.core.request import Phase

_FINISHED = Outcome.FINISHED


class Effects(Protocol):
    """What a driver does when control says so."""

    def start(self, live: Live, replica: int, now: float) -> None:
        """Send the request to a replica."""

    def cancel(self, live: Live, now: float) -> None:
        """Abort it there; the driver answers with `Control.cancelled`."""

    def move(self, live: Live, target: int, stage_blocks: int | None, now: float) -> None:
        """Take it to another replica, if that can be; the driver answers with `Control.moved` when it has."""

    def hand_over(self, live: Live, target: int, now: float) -> None:
        """Take a request whose prompt is computed to the replica that decodes, or let it go on where it is."""

    def judge(self, live: Live, now: float) -> None:
        """Have a cascade's answer scored; the driver answers with `Control.judged`."""

    def set_role(self, replica: int, role: Role) -> None:
        """A replica is for something else from now on."""

    def at(self, time_s: float, action: Callable[[float, Any], None], argument: Any) -> None:
        """Call `action(time_s, argument)` then."""

    def ended(self, live: Live, now: float, outcome: Outcome) -> None:
        """Tell whoever sent the request (if control was made to `notify`)."""


class Control:
    """The loop: arrived -> placed (or held until there is room) -> finished, cancelled or rejected."""

    def __init__(self, effects: Effects, recorder: Recorder, notify: bool) -> None:
        self.effects = effects
        self._roles = Roles(effects)
        self._notify = notify
        self._pack, self._put = recorder.requests.pack, recorder.requests.write
        self.last_s = 0.0
        """When a request last ended, or its stay with one model of a cascade."""
        self.serve({})

    def serve(
        self,
        services: dict[str, Service],
        migrations: Sequence[Migrations] = (),
        scaling: Scaling | None = None,
        cascade: Cascading | None = None,
        admissions: Sequence[Admissions] = (),
    ) -> None:
        """Take charge of these services, by each name of their models."""
        self._by_model = services
        self.services = list(dict.fromkeys(services.values()))
        self._only = self.services[0] if len(self.services) == 1 else None
        self._migrations = {each.service: each for each in migrations}
        self._scaling = scaling
        self._cascade = cascade
        self._admissions = {each.service: each for each in admissions}
        self._is_kept = cascade is not None or bool(admissions)
        """Whether requests may be elsewhere than at a replica or in front of them."""
        self._judged: dict[int, Live] = {}
        """Requests whose answers are being judged."""
        for service in self.services:
            if service in self._migrations:
                service.hear(self._migrations[service].policy)
            if service in self._admissions:
                service.hear(self._admissions[service].policy)
            if scaling is not None:
                service.hear(scaling.scaler)
            if cascade is not None:
                service.hear(cascade.policy)

    def arrived(self, live: Live, now: float) -> None:
        """A request comes in."""
        if live.reasoning_tokens:
            live.phase = Phase.REASONING
        if live.timeout_s is not None:
            self.effects.at(live.arrival_s + live.timeout_s, self._time_out, live)
        if self._is_kept or self._scaling is not None:
            self._let_in(live, now)
        else:
            self.place(live, now)

    def _let_in(self, live: Live, now: float) -> None:
        """It goes to a model of the cascade, is counted, and may be kept for later."""
        if self._cascade is not None and self._cascade.takes(live):
            self._cascade.enter(live, now)
        service = self._service(live)
        self._count(service, live)
        keeper = self._admissions.get(service)
        if keeper is None or not keeper.keeps(live):
            self.place(live, now)

    def _count(self, service: Service, live: Live) -> None:
        """A model is asked: its demand."""
        if self._scaling is not None:
            self._scaling.arrived(live, service.model)

    def place(self, live: Live, now: float) -> None:
        """A replica gets it, or it waits in front of them all."""
        service = self._service(live)
        if service.line and service.fits(live):
            service.hold(live, now)
            self.release(service, now)
        else:
            self._place_or_hold(service, live, now)

    def _service(self, live: Live) -> Service:
        """Who serves this request's model; a request that names none is for the only service."""
        service = self._by_model.get(live.model) if live.model else self._only
        if service is None:
            serves = ", ".join(service.model for service in self.services)
            raise HeadwayError(f"request {live.id} is for model {live.model!r}; the fleet serves: {serves}")
        return service

    def _place_or_hold(self, service: Service, live: Live, now: float) -> None:
        replica = service.choose(live, now)
        if replica is not None:
            self._place(live, replica, now)
        elif service.refuses(live):
            self._end(live, now, Outcome.REJECTED)
        else:
            service.hold(live, now)

    def _place(self, live: Live, replica: int, now: float) -> None:
        if live.placed_s != live.placed_s:
            live.placed_s = now
        self.effects.start(live, replica, now)

    def release(self, service: Service, now: float) -> None:
        """Place held requests, first in line first, while there is room."""
        while (live := service.first(now)) is not None:
            replica = service.choose(live, now)
            if replica is None:
                return
            service.unhold()
            self._place(live, replica, now)

    def finished(self, live: Live, now: float) -> None:
        """All its tokens are out."""
        cascade = self._cascade
        if cascade is None or live.stage_index < 0 or cascade.is_last(live):
            self._end(live, now, _FINISHED)
            return
        live.stage = HELD
        self.last_s = max(self.last_s, now)
        self._judged[live.id] = live
        service = self._service(live)
        self._tell(service, live, now, _FINISHED)
        self._made_room(service, now)
        self.effects.judge(live, now)

    def judged(self, live: Live, score: float, now: float) -> None:
        """A cascade's answer has its score: it will do, or the next model answers."""
        if self._judged.pop(live.id, None) is None:
            return
        assert self._cascade is not None
        if self._cascade.accepts(live, score, now):
            self._end(live, now, _FINISHED, told=True)
        else:
            self._cascade.escalate(live)
            self._count(self._service(live), live)
            self.place(live, now)

    def phase_changed(self, live: Live, now: float) -> None:
        """Reasoning is over."""
        if self._migrations:
            migrations = self._migrations.get(self._service(live))
            if migrations is not None:
                migrations.at_phase(live, now)

    def prefilled(self, live: Live, now: float) -> None:
        """Its prompt is computed, and it was to be decoded elsewhere."""
        service = self._service(live)
        target = service.member(live.decode)
        chosen = live.decode
        tokens = live.prompt_tokens + live.output_tokens
        if not service.pairs or target is None or target.view.role == "prefill" or not target.takes(tokens):
            chosen = service.decoder(live, live.replica)
        live.decode = -1
        if chosen >= 0 and chosen != live.replica:
            self.effects.hand_over(live, chosen, now)

    def moved(self, live: Live, source: int, now: float) -> None:
        """A request goes on at another replica."""
        live.moves += 1
        service = self._service(live)
        if service.line:
            self.release(service, now)
        if self._scaling is not None:
            self._scaling.stop_empty(now)

    def started(self, deployment: str, members: Sequence[Member], now: float) -> None:
        """The replicas of a pool or combo that scaling asked for are up."""
        assert self._scaling is not None
        self.release(self._scaling.started(deployment, members), now)

    def cancelled(self, live: Live, now: float) -> None:
        """The driver has aborted it."""
        self._end(live, now, Outcome.CANCELLED)

    def _time_out(self, now: float, live: Live) -> None:
        if live.stage is ENDED:
            return
        live.cancelled_s = now
        if live.stage is HELD:
            self._end(live, now, Outcome.CANCELLED)
        else:
            self.effects.cancel(live, now)

    def crashed(self, replica: int, lost: list[Live], now: float) -> None:
        """A replica is gone; what it had is placed anew, with the tokens that are already out kept."""
        for service in self.services:
            if (member := service.member(replica)) is not None:
                member.is_up = False
                self._roles.cover(service)
        for live in lost:
            live.attempt += 1
            if live.cancelled_s == live.cancelled_s:
                self._end(live, now, Outcome.CANCELLED)
            else:
                self._place_or_hold(self._service(live), live, now)

    def recovered(self, replica: int, now: float) -> None:
        """A replica is back, empty."""
        for service in self.services:
            if (member := service.member(replica)) is not None and not member.is_gone:
                member.is_up = True
                self._roles.cover(service)
                self.release(service, now)

    def switch(self, replica: int, role: Role, now: float, ready: bool) -> None:
        """A replica is to be for something else (Cauchy, section 3.6); it ends what it has begun.

        Unless it is `ready` at once, it takes nothing new until `switched`.
        """
        for service in self.services:
            if (member := service.member(replica)) is not None and not member.is_gone:
                member.role = role
                member.num_switches += not ready
                self._roles.rearrange(service, now)
                self.release(service, now)

    def switched(self, replica: int, now: float) -> None:
        """A replica that changed its role may be given requests again."""
        for service in self.services:
            if (member := service.member(replica)) is not None and not member.is_gone:
                member.num_switches -= 1
                self._roles.rearrange(service, now)
                self.release(service, now)

    def observed(self, now: float) -> None:
        """Views have been refreshed; there may be room that nobody saw."""
        for service in self.services:
            if service.line:
                self.release(service, now)

    def hopes(self, now: float) -> bool:
        """Somebody is held back who may be placed when views are refreshed."""
        return any(service.hopes(now) for service in self.services) or self._keeps()

    def _keeps(self) -> bool:
        """Somebody is kept for later, or waits for a judge."""
        return bool(self._judged) or any(admissions.held for admissions in self._admissions.values())

    def holds(self) -> bool:
        """Somebody is held back."""
        return any(service.line for service in self.services) or self._keeps()

    def close(self, unfinished: list[Live], now: float) -> None:
        """The run stops; what is still in the system is counted."""
        for service in self.services:
            unfinished = unfinished + service.held()
        unfinished = unfinished + list(self._judged.values())
        for admissions in self._admissions.values():
            unfinished = unfinished + admissions.lives()
        for live in sorted(unfinished, key=_by_id):
            self._write(live, now, Outcome.UNFINISHED)

    def _end(self, live: Live, now: float, outcome: Outcome, told: bool = False) -> None:
        live.stage = ENDED
        service = self._service(live)
        if self._is_kept:
            self._forget(live, service)
        end_s = now + live.response_s if live.cancelled_s != live.cancelled_s else live.cancelled_s
        if end_s > self.last_s:
            self.last_s = end_s
        self._write(live, end_s, outcome)
        if service.learners and not told:
            self._tell(service, live, end_s, outcome)
        if self._notify:
            self.effects.ended(live, end_s, outcome)
        if service.line or self._scaling is not None:
            self._made_room(service, now)

    def _forget(self, live: Live, service: Service) -> None:
        """A request that may have been kept, or be being judged, has ended."""
        self._judged.pop(live.id, None)
        if (keeper := self._admissions.get(service)) is not None:
            keeper.forget(live)

    @staticmethod
    def _tell(service: Service, live: Live, end_s: float, outcome: Outcome) -> None:
        """Let policies learn from the end of a request, or of its stay with one model of a cascade."""
        record = _as_ended(live, end_s, outcome)
        for learner in service.learners:
            learner.learn(record)

    def _made_room(self, service: Service, now: float) -> None:
        if service.line:
            self.release(service, now)
        if self._scaling is not None:
            self._scaling.stop_empty(now)

    def _write(self, live: Live, end_s: float, outcome: Outcome) -> None:
        if outcome is not _FINISHED:
            _forget_after(live, end_s)
        row = self._pack(
            live.id, outcome, live.attempt + 1, live.preemptions, live.replica, live.placed_s, live.admitted_s,
            live.first_token_s, live.answer_s, end_s, live.generated_tokens, live.cached_tokens,
            live.reasoning_end_s, live.moves, live.stage_index, live.score,
        )  # fmt: skip
        self._put(row)


def _forget_after(live: Live, end_s: float) -> None:
    """What was still on its way to the client when it gave up never came."""
    if live.first_token_s > end_s:
        live.first_token_s = NEVER
    if live.answer_s > end_s:
        live.answer_s = NEVER


def _as_ended(live: Live, end_s: float, outcome: Outcome) -> Ended:
    first = live.first_token_s
    return Ended(
        live.id, outcome, live.model, live.tier, live.replica, live.arrival_s, None if first != first else first, end_s,
        live.prompt_tokens, live.generated_tokens, live.slo_ttft_s, live.slo_tpot_s, live.slo_e2e_s,
    )  # fmt: skip


def _by_id(live: Live) -> int:
    return live.id
