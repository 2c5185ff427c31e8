"""Several schedulers in front of one simulated fleet: each sees its own requests at once, and the requests of the other
schedulers as they report them.

Like each of several gateways, each has its share of the arrivals, its own policies and its own hold queue. It reports
its load at the replicas to the others, with the gateway's classes (`control.peers`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any, NamedTuple

from headway.control.cache_index import SchedulersIndex
from headway.control.control import Control
from headway.control.decisions import DecisionObserver
from headway.control.live import PREFILLING, WAITING, Live
from headway.control.observe import SchedulersObservation
from headway.control.peers import GivenElsewhere, Load, PeerLoads, SharedReplica, load_of
from headway.control.policies import Policies
from headway.control.service import Member, Service
from headway.core.errors import HeadwayError
from headway.core.fleet import Fleet
from headway.core.policy import Ordering, PeerOrdering
from headway.core.view import ReplicaView, RequestView
from headway.sim.replica import Replica

_SEEDS_APART = 1_000_003


class OwnShare:
    """The requests of one scheduler at a replica, counted on demand. Implements `peers.OwnCounts`."""

    def __init__(self, replica: Replica, scheduler: int) -> None:
        self._replica, self._scheduler = replica, scheduler
        self._counted_at: tuple[int, ...] = ()
        self._load, self._requests = Load(), list[Live]()

    def _counted(self) -> Load:
        replica, placed = self._replica.view, self._replica.placed
        at = (
            placed.num_received,
            placed.num_in_flight,
            replica.prefill_tokens_left,
            replica.tokens_generated,
            replica.expected_cached_tokens,
        )
        if at == self._counted_at:
            return self._load
        self._counted_at = at
        self._requests = found = [live for live in replica.requests if live.scheduler == self._scheduler]
        in_iteration = {live.id: tokens for live, tokens in self._replica.batch.chunks}
        load = self._load = Load(len(found), queue_lengths=[0] * len(replica.queue_lengths))
        for live in found:
            if live.stage is PREFILLING:
                load.prefill_tokens_left += live.target_tokens - live.computed_tokens + in_iteration.get(live.id, 0)
            elif live.stage is WAITING and not live.swapped_tokens:
                load.prefill_tokens_left += live.target_tokens
            load.tokens_generated += live.generated_tokens
            load.expected_cached_tokens += live.expected_cached_tokens
            load.num_by_tier[live.tier] = load.num_by_tier.get(live.tier, 0) + 1
            load.queue_lengths[live.queue] += 1
        return load

    @property
    def num_in_flight(self) -> int:
        return self._counted().num_in_flight

    @property
    def prefill_tokens_left(self) -> int:
        return self._counted().prefill_tokens_left

    @property
    def tokens_generated(self) -> int:
        return self._counted().tokens_generated

    @property
    def expected_cached_tokens(self) -> int:
        return self._counted().expected_cached_tokens

    @property
    def num_by_tier(self) -> Mapping[int, int]:
        return self._counted().num_by_tier

    @property
    def queue_lengths(self) -> Sequence[int]:
        return self._counted().queue_lengths

    @property
    def requests(self) -> Sequence[Live]:
        self._counted()
        return self._requests


class SharedControl(Control):
    """Control with one service per model and scheduler. `Live.scheduler` names a request's scheduler."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.by_scheduler: list[dict[str, Service]] = []
        """Maps each scheduler to its services by every name of their models."""

    def add_schedulers(
        self,
        num: int,
        policies: Policies,
        members: Callable[[int], Mapping[str, Sequence[Member]]],
        names: Mapping[str, Sequence[str]],
        seed: int,
        observer: DecisionObserver | None,
    ) -> None:
        """Add the services of all schedulers except the first, which `configure` creates."""
        self.by_scheduler = [self.by_model]
        for scheduler in range(1, num):
            own_names: dict[str, Service] = {}
            for model, own in members(scheduler).items():
                apart = seed + scheduler * _SEEDS_APART
                service = self.parts.add_service(policies, model, own, self.fallbacks.of_fleet, apart, observer)
                for name in names[model]:
                    own_names.setdefault(name, service)
                self.parts.add_learners(service)
            self.by_scheduler.append(own_names)
        self.note_parts()

    def service_of(self, live: Live) -> Service:
        if not self.by_scheduler or not live.scheduler:
            return super().service_of(live)
        services = self.by_scheduler[live.scheduler]
        if live.model in services:
            return services[live.model]
        return services[super().service_of(live).model]


class SchedulerState(NamedTuple):
    """The report of one scheduler to the other schedulers."""

    loads: dict[int, Load]
    """Loads by replica; replicas without requests are missing."""
    given: list[tuple[str, dict[tuple[int, str], float]]]
    """Maps each model to the service given to each share."""
    placed: list[tuple[SchedulersIndex, list[RequestView]]]
    """Pairs of a replica's index and the prompts placed there since the last report."""


class Schedulers:
    """What the schedulers know of each other."""

    def __init__(
        self, config: SchedulersObservation, control: SharedControl, fleet: Fleet, policies: Policies, seed: int
    ) -> None:
        """Raises HeadwayError if the fleet or the policies need one scheduler."""
        parts = {
            "policies.scaling": policies.scaler,
            "cascade": policies.cascade,
            "combos": fleet.combos,
            "fallback": fleet.fallbacks.models,
        }
        for key, part in parts.items():
            if part:
                raise HeadwayError(f"observe: schedulers: {key} is simulated with one scheduler only; expected num: 1")
        self.config, self._control = config, control
        self._random = Random(f"{seed}/schedulers")
        self._own: list[dict[int, OwnShare]] = [{} for _ in range(config.num)]
        """Each scheduler's own requests, by replica id."""
        self.loads = [PeerLoads(self._on_change(scheduler)) for scheduler in range(config.num)]
        """Maps each scheduler to the loads that the other schedulers have reported to it."""
        self._given = [GivenElsewhere() for _ in range(config.num)]
        self._indexes: list[SchedulersIndex] = []

    def add(
        self,
        policies: Policies,
        members: Callable[[int], Mapping[str, Sequence[Member]]],
        names: Mapping[str, Sequence[str]],
        seed: int,
        observer: DecisionObserver | None,
    ) -> None:
        """Add all schedulers except the first."""
        self._control.add_schedulers(self.config.num, policies, members, names, seed, observer)

    def follow(self, index: SchedulersIndex) -> None:
        """Report the prompts placed at a replica to the other schedulers."""
        self._indexes.append(index)

    def choose(self) -> int:
        """The scheduler of the next arrival, chosen by a load balancer that knows nothing of them."""
        return self._random.randrange(self.config.num)

    def view(self, scheduler: int, replica: Replica, view: ReplicaView) -> SharedReplica:
        """A replica as a scheduler sees it. `view` has its engine's metrics."""
        own = self._own[scheduler][replica.id] = OwnShare(replica, scheduler)
        return SharedReplica(view, own, self.loads[scheduler].at(replica.id), self.config.shared)

    def _on_change(self, scheduler: int) -> Callable[[int, Load], None]:
        def change(replica: int, others: Load) -> None:
            for service in set(self._control.by_scheduler[scheduler].values()):
                if service.sent is not None and service.member(replica) is not None:
                    service.sent.set_elsewhere(replica, others.prompt_tokens, others.prefill_tokens_left)

        return change

    def is_away(self, now: float) -> bool:
        """Whether the shared store is unreachable."""
        return any(start_s <= now < end_s for start_s, end_s in self.config.away)

    def first_s(self, scheduler: int) -> float:
        """Time of a scheduler's first message; schedulers send at different moments."""
        return self.config.period_s * (scheduler + 1) / self.config.num

    def state(self, scheduler: int) -> SchedulerState:
        """The current report of a scheduler."""
        loads = {replica: load_of(own) for replica, own in self._own[scheduler].items() if own.num_in_flight}
        orderings = self._orderings(scheduler)
        given = [(model, dict(each.given())) for model, each in orderings if isinstance(each, PeerOrdering)]
        placed = [(index, each) for index in self._indexes if (each := index.take_placed(scheduler))]
        return SchedulerState(loads, given, placed)

    def receive(self, scheduler: int, state: SchedulerState, now: float) -> None:
        """Deliver a scheduler's report to all others."""
        for other in range(self.config.num):
            if other == scheduler:
                continue
            self.loads[other].update(scheduler, state.loads, now)
            orderings = dict(self._orderings(other))
            for model, given in state.given:
                for share, service in given.items():
                    self._given[other].report(scheduler, model, share, service, orderings[model])
            for index, placed in state.placed:
                index.placed_elsewhere(other, placed)

    def forget_silent(self, scheduler: int, now: float) -> None:
        """Let a scheduler forget others that were silent for longer than their lease."""
        self.loads[scheduler].forget_silent(now, self.config.lease_s)

    def _orderings(self, scheduler: int) -> list[tuple[str, Ordering]]:
        """Maps each model to the ordering of a scheduler's hold queue."""
        services = self._control.by_scheduler[scheduler].values()
        return [(service.model, service.hold_ordering) for service in dict.fromkeys(services)]
