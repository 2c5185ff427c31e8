"""The parts of control by model: services and the policies that act on their requests, plus scaler and cascade."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headway.control import assembly
from headway.control.admissions import Admissions
from headway.control.cascade_stages import CascadeStages
from headway.control.decisions import DecisionObserver
from headway.control.effects import Effects
from headway.control.kv_pressure import KvPressure
from headway.control.live import Live
from headway.control.migrations import Migrations
from headway.control.policies import Policies
from headway.control.preemptions import Preemptions
from headway.control.scaling import Scaling
from headway.control.service import Member, Service
from headway.control.shadow import Shadow
from headway.control.shedding import Shedding
from headway.core.fleet import Fallbacks

Ticking = Migrations | Admissions | Preemptions | KvPressure | Scaling
"""A policy that a driver calls every `interval_s` through `tick(now)`; an interval of None means never."""


class Parts:
    """The services of all models, and the policies beside their routers: admission, shedding, migration, scaling and
    cascade."""

    __slots__ = (
        "_effects",
        "_place",
        "admissions",
        "by_model",
        "cascade",
        "migrations",
        "new_shadow",
        "scaling",
        "services",
        "shedding",
    )

    def __init__(self, effects: Effects, place: Callable[[Live, float], None]) -> None:
        self._effects, self._place = effects, place
        self.by_model: dict[str, Service] = {}
        """Services by every name of their models; with several schedulers, the first scheduler's services."""
        self.services: list[Service] = []
        self.migrations: dict[Service, Migrations] = {}
        self.admissions: dict[Service, Admissions] = {}
        self.shedding: dict[Service, Shedding] = {}
        self.scaling: Scaling | None = None
        self.cascade: CascadeStages | None = None
        self.new_shadow: Callable[[str], Shadow] | None = None
        """Creates the candidate's policies of a model, which run in shadow; None: there is no candidate."""

    def add_service(
        self,
        policies: Policies,
        model: str,
        members: Sequence[Member],
        fallbacks: Fallbacks,
        seed: int,
        observer: DecisionObserver | None,
    ) -> Service:
        """Create the service of one more model, with its own policies. No name refers to it yet."""
        service = assembly.new_service(policies, model, members, fallbacks, seed, observer)
        if self.new_shadow is not None:
            service.follow(self.new_shadow(model))
        self.services.append(service)
        migrations = assembly.new_migrations(service, policies, self._effects, seed, observer)
        admissions = assembly.new_admissions(service, policies, self._place, seed, observer)
        self.use(service, migrations, admissions)
        self.limit(service, policies)
        return service

    def use(self, service: Service, migrations: Migrations | None, admissions: Admissions | None) -> None:
        """Replace a service's migrations and admissions."""
        self.migrations.pop(service, None)
        self.admissions.pop(service, None)
        if migrations is not None:
            self.migrations[service] = migrations
            service.add_learner(migrations.policy)
        if admissions is not None:
            self.admissions[service] = admissions
            service.add_learner(admissions.policy)

    def limit(self, service: Service, policies: Policies) -> None:
        """Pause and shed a service's requests as the policies say."""
        service.preemptions = assembly.new_preemptions(service, policies, self._effects)
        shedding = self.shedding.pop(service, None)
        if (share := policies.shed_ttft_share) is not None:
            self.shedding[service] = shedding = shedding or Shedding(service)
            shedding.share = share
            service.add_learner(shedding)

    def add_learners(self, service: Service) -> None:
        """Let the policies outside a service learn from its requests."""
        if self.scaling is not None:
            service.add_learner(self.scaling.scaler)
        if self.cascade is not None:
            service.add_learner(self.cascade.policy)

    def close(self) -> None:
        """Let go of the services, and of what belongs to them."""
        for parts in (self.by_model, self.migrations, self.admissions, self.shedding, self.services):
            parts.clear()
        self.scaling = None

    def ticking(self) -> list[Ticking]:
        """The policies to call at intervals, in their fixed order."""
        preemptions = [service.preemptions for service in self.services if service.preemptions is not None]
        parts: list[Ticking] = [*self.migrations.values(), *self.admissions.values(), *preemptions]
        return parts if self.scaling is None else [*parts, self.scaling]

    def has_placeable_waiter(self, now: float) -> bool:
        """Whether a held request may be placed later without another arrival, end or start."""
        return any(service.has_placeable_waiter(now) for service in self.services) or self._has_kept()

    def has_held(self) -> bool:
        """Whether any request is held."""
        return any(service.hold_queue for service in self.services) or self._has_kept()

    def _has_kept(self) -> bool:
        is_judging = self.cascade is not None and bool(self.cascade.judged)
        return is_judging or any(admissions.held for admissions in self.admissions.values())

    def held_requests(self) -> list[Live]:
        """Requests in hold queues and those that admission policies hold."""
        held = [live for service in self.services for live in service.hold_queue.requests()]
        return held + [live for admissions in self.admissions.values() for live in admissions.held]
