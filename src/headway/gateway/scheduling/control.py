"""Control and cascades for the gateway: single requests may fail, and answers are unknown beforehand."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Literal, NamedTuple

from msgspec.structs import replace

from headway.control.admissions import Admissions
from headway.control.assembly import held_ordering, new_admissions, new_migrations, windows
from headway.control.cascade_stages import CascadeStages
from headway.control.control import Control
from headway.control.decisions import DecisionObserver
from headway.control.effects import Effects
from headway.control.live import ENDED, HELD, Live
from headway.control.migrations import Migrations
from headway.control.policies import CascadeConfig, Policies
from headway.control.recorder import Recorder
from headway.control.service import Service
from headway.core.errors import HeadwayError
from headway.core.policy import Learner, Ordering, Router
from headway.core.record import Outcome
from headway.core.request import Phase
from headway.gateway.scheduling.kept_policies import KeptPolicies, Kind

log = logging.getLogger("headway.gateway")


class LiveCascadeStages(CascadeStages):
    """A cascade with unknown reasoning lengths until the tokens come."""

    def escalate(self, live: Live) -> None:
        """Reset the reasoning, because the next model begins its own."""
        live.reasoning_tokens = 0
        live.phase = Phase.ANSWERING
        super().escalate(live)


class _Parts(NamedTuple):
    """A service's router, ordering, migrations and admissions."""

    router: Router
    ordering: Ordering
    migrations: Migrations | None
    admissions: Admissions | None


def _with(
    policies: Policies, kind: Literal["migration", "admission"], policy: Callable[[Kind, Callable[[], Any]], Any]
) -> Policies:
    """The policies with another choice of one kind: the result of `policy`. A kind without a choice stays without."""
    choice = getattr(policies, kind)
    return policies if choice is None else replace(policies, **{kind: lambda: policy(kind, choice)})


class LiveControl(Control):
    """Control that also handles failures of single requests."""

    def __init__(self, effects: Effects, recorder: Recorder | None, notify: bool) -> None:
        super().__init__(effects, recorder, notify)
        self._releasing: set[Service] = set()
        self._kept: KeptPolicies | None = None
        """The policies' instances while policies take turns; None: a change creates new instances."""

    def num_kept(self, service: Service) -> int:
        """Number of requests that the service's admission policy holds."""
        admissions = self.parts.admissions.get(service)
        return 0 if admissions is None else len(admissions.held)

    def change_policies(
        self,
        before: Policies,
        after: Policies,
        seed: int,
        observer: DecisionObserver | None,
        in_flight: Sequence[Live],
        now: float,
    ) -> None:
        """Use other policies from now on. Raises HeadwayError, before any change, if a policy cannot be created.
        Unchanged policies keep their learnt state; scaler and cascade always stay. `in_flight`: the requests at
        replicas.
        """
        if self._kept is not None:
            self._keep(before, self._kept)
        made = [self._new_parts(service, before, after, seed, observer) for service in self.services]
        for service, new in zip(self.services, made, strict=True):
            held, kept = service.hold_queue.requests(), self.parts.admissions.get(service)
            service.use(new.router, new.ordering, *windows(after, service.model, self.fallbacks.of_fleet))
            self.parts.use(service, new.migrations, new.admissions)
            self.parts.limit(service, after)
            self.parts.add_learners(service)
            service.learners += self._aside(service)
            if service.sent is not None:
                for live in in_flight:
                    if self.service_of(live) is service:
                        service.started(live, live.replica, now)
                        if live.generated_tokens:
                            service.sent.start(live)
            for live in held:
                service.hold_queue.push(live, now)
            if kept is not None and kept is not new.admissions:
                for live in list(kept.held):
                    if new.admissions is None or not new.admissions.hold(live):
                        service.hold_queue.push(live, now)
        self.use_slo(after)
        self.max_hold_s = after.max_hold_s
        self.note_parts()
        for service in self.services:
            self.release_held(service, now)

    def _new_parts(
        self, service: Service, before: Policies, after: Policies, seed: int, observer: DecisionObserver | None
    ) -> _Parts:
        """A service's parts after a change of policies; unchanged parts are reused."""
        is_same_order = held_ordering(before) == held_ordering(after)
        kept = KeptPolicies() if self._kept is None else self._kept

        def policy(kind: Kind, choice: Callable[[], Any]) -> Any:
            return kept.of(service.model, kind, choice)

        migrations, admissions = self.parts.migrations.get(service), self.parts.admissions.get(service)
        if before.migration != after.migration:
            migrations = new_migrations(service, _with(after, "migration", policy), self.effects, seed, observer)
        if before.admission != after.admission:
            admissions = new_admissions(service, _with(after, "admission", policy), self.place, seed, observer)
        return _Parts(
            service.router if before.router == after.router else policy("router", after.router),
            service.hold_ordering if is_same_order else policy("ordering", held_ordering(after)),
            migrations,
            admissions,
        )

    def take_turns(self, on: bool) -> None:
        """Set whether replaced policies will return later and must keep their state.

        Inactive policies learn from all requests, because some of them count ended requests.
        """
        for service in self.services:
            aside = self._aside(service)
            service.learners = [each for each in service.learners if not any(each is other for other in aside)]
        self._kept = KeptPolicies() if on else None

    def _aside(self, service: Service) -> list[Learner]:
        """The kept learners of a service that are not its current policies."""
        migrations, admissions = self.parts.migrations.get(service), self.parts.admissions.get(service)
        present = [
            service.router,
            service.hold_ordering,
            None if migrations is None else migrations.policy,
            None if admissions is None else admissions.policy,
        ]
        kept = () if self._kept is None else self._kept.learners(service.model)
        return [each for each in kept if not any(each is other for other in present)]

    def _keep(self, before: Policies, kept: KeptPolicies) -> None:
        """Store the instances that serve now."""
        for service in self.services:
            kept.keep(service.model, "router", before.router, service.router)
            kept.keep(service.model, "ordering", held_ordering(before), service.hold_ordering)
            if (migrations := self.parts.migrations.get(service)) is not None:
                kept.keep(service.model, "migration", before.migration, migrations.policy)
            if (admissions := self.parts.admissions.get(service)) is not None:
                kept.keep(service.model, "admission", before.admission, admissions.policy)

    def _cascade_stages(self, config: CascadeConfig, stages: list[Service], random: Random) -> LiveCascadeStages:
        return LiveCascadeStages(config, config.policy(), stages, random)

    def release_held(self, service: Service, now: float) -> None:
        """Place held requests. If a policy raises an error for a request, the request is rejected, and the other
        requests are placed."""
        if service in self._releasing:
            return  # the outer call continues
        self._releasing.add(service)
        try:
            while not self._try_release_held(service, now):
                pass
        finally:
            self._releasing.discard(service)

    def _try_release_held(self, service: Service, now: float) -> bool:
        """Release once. False if a policy raised an error."""
        try:
            super().release_held(service, now)
        except Exception as error:
            live = service.hold_queue.first(now)
            if live is None:
                raise
            log.error("request %d is rejected: %s", live.id, error, exc_info=not isinstance(error, HeadwayError))
            self.end(live, now, Outcome.REJECTED)
            return False
        return True

    def failed(self, live: Live, now: float, replica: int | None = None) -> None:
        """Place the request at another replica than the failed replica (by default the request's own), or reject the
        request. Tokens already sent are kept.
        """
        service = self.service_of(live)
        failed = live.replica if replica is None else replica
        member = service.member(failed)
        live.attempt += 1
        live.stage = HELD
        if member is None or not member.is_up:
            self.place(live, now, jumps_queue=True)
        elif service.is_served_without(failed):
            self.place(live, now, jumps_queue=True, exclude=failed)
        else:
            self._refuse(live, now)

    def exhausted(self, live: Live, now: float) -> None:
        """Let a fallback answer a request after the last failed attempt at its model, or reject it."""
        live.attempt += 1
        live.stage = HELD
        self._refuse(live, now)

    def reassign_decode(self, live: Live, prefilled_by: int, now: float) -> bool:
        """Hand over to a decode replica other than the current one. Returns False if the combo has no other decode
        replica."""
        service = self.service_of(live)
        if service.member(prefilled_by) is None or service.member(live.replica) is None:
            return False
        chosen = service.choose_decoder(live, prefilled_by, exclude=live.replica)
        if chosen < 0 or chosen == prefilled_by:
            return False
        live.attempt += 1
        self.effects.hand_over(live, chosen, now)
        return True

    def reject(self, live: Live, now: float) -> None:
        """End the request as rejected, unless it has ended."""
        if live.stage is not ENDED:
            self.end(live, now, Outcome.REJECTED)

    def client_left(self, live: Live, now: float) -> None:
        self.on_timeout(now, live)

    def room_freed(self, live: Live, now: float) -> None:
        """Place held requests after an ended request has left its replica."""
        self.on_room(self.service_of(live), now)

    def unscored(self, live: Live, accept: bool, now: float) -> None:
        """Accept or escalate a cascade's answer without a score."""
        cascade = self.parts.cascade
        if cascade is None or cascade.judged.pop(live.id, None) is None:
            return
        if accept:
            self.end(live, now, Outcome.FINISHED, is_learned=True)
        else:
            cascade.escalate(live)
            self.place(live, now)
