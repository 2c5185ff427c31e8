"""Builds the parts of control for one model: its service, and the policies that act on its requests. Each part has its
own random number stream, so adding a part does not change the other parts' random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from headway.control.admissions import Admissions
from headway.control.decisions import DecisionObserver
from headway.control.effects import Effects
from headway.control.kv_pressure import KvPressure
from headway.control.live import Live
from headway.control.migrations import Migrations
from headway.control.observe import MutableFleetView
from headway.control.policies import Policies
from headway.control.preemptions import Preemptions
from headway.control.service import Member, Service
from headway.core.fleet import Fallbacks
from headway.core.policy import Ordering, PhasedOrdering
from headway.policies.ordering.fcfs import FcfsOrdering


def held_ordering(policies: Policies) -> Callable[[], Ordering]:
    """The ordering of hold queues."""
    return policies.ordering if policies.ordering_at != "replica" else FcfsOrdering


def windows(policies: Policies, model: str, fallbacks: Fallbacks) -> tuple[int | None, int | None]:
    """The model's request window and prompt window. A hosted model has neither: the windows describe the fleet's
    engines."""
    return (None, None) if model in fallbacks.hosted else (policies.window, policies.prompt_window)


def new_service(
    policies: Policies,
    model: str,
    members: Sequence[Member],
    fallbacks: Fallbacks,
    seed: int,
    observer: DecisionObserver | None,
) -> Service:
    """A model's service, with its own router and hold queue."""
    window, prompt_window = windows(policies, model, fallbacks)
    view = MutableFleetView(Random(f"{seed}/router/{model}"), wants_scores=observer is not None)
    ordering = held_ordering(policies)()
    return Service(model, members, policies.router(), ordering, window, view, observer, prompt_window)


def new_migrations(
    service: Service, policies: Policies, effects: Effects, seed: int, observer: DecisionObserver | None
) -> Migrations | None:
    """The migrations among a service's replicas; None if the policies have none."""
    if policies.migration is None:
        return None
    view, ordering = MutableFleetView(Random(f"{seed}/migration/{service.model}")), policies.ordering()
    view.phased = ordering if isinstance(ordering, PhasedOrdering) else None
    return Migrations(service, policies.migration(), view, effects.move, observer)


def new_admissions(
    service: Service,
    policies: Policies,
    place: Callable[[Live, float], None],
    seed: int,
    observer: DecisionObserver | None,
) -> Admissions | None:
    """The admission control of a service, which starts requests with `place`; None if the policies have none."""
    if policies.admission is None:
        return None
    random = Random(f"{seed}/admission/{service.model}")
    return Admissions(service, policies.admission(), random, place, observer)


def new_preemptions(service: Service, policies: Policies, effects: Effects) -> Any:
    """The preemptions at a service's replicas; None if the policies have none."""
    if policies.preempt_every_s is None:
        return None
    kind = Preemptions if service.sharing is None else KvPressure
    return kind(service, policies.preempt_every_s, effects.pause)
