"""The simulator's driver: replicas in virtual time, commanded by `control`.

Read `Cluster._arrive` and `Cluster.start` first: a request goes from the workload to control, and back to a replica.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import inf
from random import Random
from typing import Any, Final, Literal

from headway.control.control import Control
from headway.control.decisions import DecisionObserver
from headway.control.hold_queue import is_sharing
from headway.control.live import Live
from headway.control.observe import MutablePoolsView, Scrape
from headway.control.parts import Ticking
from headway.control.policies import Policies
from headway.control.recorder import Recorder
from headway.control.scaling import PoolState, Scaling
from headway.control.service import Member, Service
from headway.core.errors import HeadwayError, unknown
from headway.core.fleet import Fault, Fleet, Pool, Role, RoleChange, unit_of
from headway.core.pacer import Pacer
from headway.core.policy import Ordering
from headway.core.record import Cause, Outcome, Prefixes, Records
from headway.limits.tenants import TenantLimits
from headway.policies.ordering.fcfs import FcfsOrdering
from headway.sim.fleet import SimulatedFleet
from headway.sim.incidents import Incidents
from headway.sim.kernel import BEFORE, COMMAND, TICK, Kernel
from headway.sim.limits import SimulatedLimits
from headway.sim.observation import Observation
from headway.sim.replica import OrderReceived, Replica, Run
from headway.sim.replica_resources import Line, calibrated_line
from headway.sim.row_order import RowOrder
from headway.sim.schedulers import Schedulers, SharedControl
from headway.sim.transfers import KvTransfers
from headway.workload.quality_judges import noisy_score
from headway.workload.sources import RequestSource
from headway.workload.spill import SpillFile

Step = Literal["stretch", "exact"]
Progress = Callable[[float, int], None]

_PROGRESS_EVERY: Final = 1 << 11
_OBJECTS_PER_COLLECTION: Final = 1 << 20


def simulate(
    fleet: Fleet,
    source: RequestSource,
    policies: Policies,
    *,
    seed: int,
    step: Step = "stretch",
    faults: tuple[Fault, ...] = (),
    roles: tuple[RoleChange, ...] = (),
    until_s: float | None = None,
    scrape: Scrape | None = None,
    progress: Progress | None = None,
    line: Callable[[Pool], Line] | None = None,
    pacer: Pacer | None = None,
    decisions: DecisionObserver | None = None,
    order: RowOrder | None = None,
    limits: Mapping[str, TenantLimits] | None = None,
) -> Records:
    """Run a workload on a fleet. Deterministic: the same arguments give the same records on every machine.

    `progress(now_s, requests arrived)` is called at intervals. `until_s` stops the run; requests still in the system
    are recorded as unfinished. `line` replaces `perf`'s step-time model. `pacer` is the reading pace of answers.
    `decisions` observes the policies' choices. `order` receives the place of every row. `limits` are tenants' limits,
    by name. Raises HeadwayError if a model does not fit its GPUs.
    """
    with _rare_collections():
        cluster = Cluster(
            fleet,
            source,
            policies,
            seed,
            step,
            scrape=scrape or Scrape(),
            progress=progress,
            line=line or calibrated_line,
            pacer=pacer or Pacer(),
            observer=decisions,
            order=order,
            limits=SimulatedLimits(limits, fleet) if limits else None,
        )
        try:
            return cluster.run(faults, until_s, roles)
        finally:
            cluster.close()


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Collect garbage less often: a fleet of thousands of replicas has hundreds of thousands of objects, which live as
    long as the run, so that collections during it free nothing."""
    before = gc.get_threshold()
    if not 0 < before[0] < _OBJECTS_PER_COLLECTION:  # off, or another run's
        yield
        return
    gc.set_threshold(_OBJECTS_PER_COLLECTION, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


class Cluster:
    """A fleet in virtual time. Implements `control.effects.Effects` and `ScalingEffects`."""

    __deletable__ = ("_control", "_fleet", "_incidents", "_observation", "_transfers")

    def __init__(
        self,
        fleet: Fleet,
        source: RequestSource,
        policies: Policies,
        seed: int,
        step: Step,
        scrape: Scrape,
        progress: Progress | None,
        line: Callable[[Pool], Line],
        pacer: Pacer,
        observer: DecisionObserver | None = None,
        order: RowOrder | None = None,
        limits: SimulatedLimits | None = None,
    ) -> None:
        self._limits = limits
        """Tenants' limits; None: no tenant has limits."""
        self._observer, self._seed, self._order = observer, seed, order
        self._source, self._progress = source, progress
        self._kernel = kernel = Kernel()
        kernel.arrive = self._arrive
        if order is not None:
            order.follow(kernel)
        self._recorder = Recorder(bool(fleet.fallbacks.models), order, SpillFile, limits is not None)
        self._num_starting = 0
        self._last_s = 0.0
        """Time of the last arrival, or of the last request for a replica."""
        self._until_s: float | None = None
        notify = source.reactive or limits is not None
        self._schedulers: Schedulers | None = None
        """Several schedulers; None: one scheduler, which knows all placements."""
        if scrape.schedulers.num > 1:
            shared = SharedControl(self, self._recorder, notify)
            self._control: Control = shared
            self._schedulers = Schedulers(scrape.schedulers, shared, fleet, policies, seed)
        else:
            self._control = Control(self, self._recorder, notify)
        requests = source.table()
        _check_adapters(requests.loras, [name for pool in fleet.all_pools for name in pool.lora_names])
        self._network, self._gpu_limits, self._fallbacks = fleet.network, fleet.gpu_limits, fleet.fallbacks
        self._is_wide = len({pool.region for pool in fleet.all_pools}) > 1 or bool(requests.regions)
        run = Run(kernel, self._control, self._recorder, step == "exact", pacer, fleet.network, seed)
        self._fleet = SimulatedFleet(fleet, run, _replicas_ordering(policies), line)
        self._replicas, self._pools = self._fleet.replicas, self._fleet.pools
        self._observation = Observation(scrape, kernel, self._control, self._schedulers, self._is_active, seed)
        for replica in self._replicas:
            self._observation.add(replica)
        self._transfers = KvTransfers(kernel, self._fleet, self._control, self._recorder.moves)
        self._incidents = Incidents(kernel, self._fleet, self._transfers, self._control)
        self._configure(policies)

    def _configure(self, policies: Policies) -> None:
        """Register the replicas with control, by model."""
        names = {each.resources.model_name: each.resources.model_names for each in self._replicas}
        scaling = partial(self._scaling, policies)
        members = self._members(0)
        self._control.configure(policies, members, names, self._seed, scaling, self._observer, self._fallbacks)
        if self._schedulers is not None:
            self._schedulers.add(policies, self._members, names, self._seed, self._observer)
        elif self._observation.is_fresh:
            for service in self._control.services:
                service.view.changes = self._kernel.changes

    def _members(self, scheduler: int) -> dict[str, list[Member]]:
        """A scheduler's view of the replicas, by model."""
        deployments = {part.name: each.name for each in self._fleet.deployments.values() for part in unit_of(each)}
        members: dict[str, list[Member]] = {each.resources.model_name: [] for each in self._replicas}
        for replica in self._replicas:
            resources = replica.resources
            members[resources.model_name].append(self._member(replica, deployments[resources.name], scheduler))
        return members

    def _scaling(self, policies: Policies, services: dict[str, Service]) -> Scaling | None:
        if policies.scaler is None:
            return None
        pools = [PoolState(each, services) for each in self._fleet.deployments.values()]
        view = MutablePoolsView(Random(f"{self._seed}/scaler"))
        began_s = 0.0 if policies.began_s is None else policies.began_s
        return Scaling(policies.scaler(), view, pools, self, self._gpu_limits, policies.least, began_s)

    def _member(self, replica: Replica, deployment: str, scheduler: int = 0) -> Member:
        view, resources = self._observation.view(replica, scheduler), replica.resources
        member = Member(view, replica.max_request_tokens, resources.max_num_waiting, deployment, resources.loras)
        member.window = resources.max_concurrent
        return member

    # Control's effects.

    def start(self, live: Live, replica: int, now: float) -> None:
        if self._is_wide:
            there = self._replicas[replica]
            there.enqueue(live, now, delay_s=self._latency_s(live, there.view.region))
        else:
            self._replicas[replica].enqueue(live, now)

    def _latency_s(self, live: Live, region: str) -> float:
        """Latency between a request's region and another, each way."""
        median_s = self._network.latency_s(live.region, region)
        if not median_s or self._network.p90_to_median == 1:
            return median_s
        return self._network.varied_s(median_s, Random(f"{self._seed}/network/{live.id}").gauss(0.0, 1.0))

    def cancel(self, live: Live, now: float) -> None:
        self._replicas[live.replica].cancel(live, now)

    def move(self, live: Live, target: int, stage_blocks: int | None, now: float) -> None:
        self._transfers.begin(live, target, stage_blocks, now)

    def pause(self, live: Live, now: float) -> None:
        self._replicas[live.replica].pause(live, now)

    def hand_over(self, live: Live, target: int, now: float) -> None:
        pool = self._pools[live.replica]
        self._transfers.hand_over(live, target, pool.handover, pool.model.num_layers, now)

    def set_role(self, replica: int, role: Role) -> None:
        self._fleet.set_role(replica, role)

    def judge(self, live: Live, now: float) -> None:
        """Score the answer of a cascade stage after the judge's time."""
        assert self._control.parts.cascade is not None
        self._kernel.at(now + self._control.parts.cascade.config.judge_s, COMMAND, live.id, self._judge, live)

    def _judge(self, now: float, live: Live) -> None:
        assert self._control.parts.cascade is not None
        config = self._control.parts.cascade.config
        if self._limits is not None:
            self._limits.stage_ended(live, self._pools[live.replica].name, Outcome.FINISHED, now)
        quality = next((score for model, score in live.quality if model == live.model), 0.0)
        score = noisy_score(quality, config.judge_bias, config.judge_noise, self._seed, live.id, live.stage_index)
        self._control.on_judged(live, score, now)

    def start_replica(self, deployment: str, now: float) -> None:
        self._last_s = now
        unit, start_s = self._fleet.start_unit(deployment, now)
        for replica in unit:
            self._observation.add(replica)
        self._num_starting += 1
        self._kernel.at(now + start_s, COMMAND, unit[0].id - BEFORE, self._on_started, (deployment, unit))

    def _on_started(self, now: float, started: tuple[str, list[Replica]]) -> None:
        deployment, unit = started
        self._num_starting -= 1
        for replica in unit:
            replica.is_up = True
        self._control.on_unit_started(deployment, [self._member(replica, deployment) for replica in unit], now)

    def drain(self, replica: int, on: bool) -> None:
        self._replicas[replica].view.is_draining = on
        self._replicas[replica].timeline.note_change()

    def stop_replica(self, replica: int, now: float) -> None:
        self._fleet.give_back(replica, now)

    def call_at(self, time_s: float, action: Callable[[float, Any], None], argument: Any) -> None:
        self._kernel.at(time_s, COMMAND, argument.id, action, argument)

    def notify_ended(self, live: Live, now: float, outcome: Outcome) -> None:
        """Report a request's end to its tenant's limits and to the workload, which may send further requests."""
        if self._limits is not None:
            self._kernel.at(max(now, self._kernel.now), COMMAND, live.id, self._settle, (live, outcome))
        if self._source.reactive:
            self._source.ended(live, now, outcome)
            self._arm()

    def _settle(self, now: float, ended: tuple[Live, Outcome]) -> None:
        live, outcome = ended
        assert self._limits is not None
        self._limits.ended(live, self._pools[live.replica].name if live.replica >= 0 else "", outcome, now)

    # Arrivals.

    def _arm(self) -> None:
        """Schedule the next known arrival."""
        time_s, kernel = self._source.peek_s(), self._kernel
        if time_s is not None:
            kernel.arrival_s = time_s if time_s > kernel.now else kernel.now

    def _refusal(self, limits: SimulatedLimits, live: Live, now: float) -> int:
        cascade = self._control.parts.cascade
        return limits.refusal(live, now, 1 if cascade is None else cascade.num_models(live.model))

    def _arrive(self, now: float) -> None:
        live = self._source.pop(Live)
        self._last_s = now
        self._arm()
        if self._schedulers is not None:
            live.scheduler = self._schedulers.choose()
        if self._limits is not None and (reason := self._refusal(self._limits, live, now)):
            self._control.on_refused(live, now, reason)
        else:
            self._control.on_arrival(live, now)
        if not live.id % _PROGRESS_EVERY:
            self._recorder.flush()
            self._kernel.changes.limit()
            if self._progress is not None:
                self._progress(now, live.id)

    # The run.

    def run(
        self, faults: tuple[Fault, ...] = (), until_s: float | None = None, roles: tuple[RoleChange, ...] = ()
    ) -> Records:
        """Run to the end of the workload, or until `until_s`."""
        self._until_s = until_s
        self._incidents.schedule(faults, roles)
        self._observation.start()
        for i, ticking in enumerate(self._control.parts.ticking()):
            if ticking.interval_s is not None:
                self._kernel.at(ticking.interval_s, TICK, 2 + i, self._tick, (ticking, 2 + i))
        self._arm()
        self._kernel.run(inf if until_s is None else until_s)
        if self._order is not None:
            self._order.end()
        stop_s = max(self._last_s, self._incidents.last_s, self._control.last_s) if until_s is None else until_s
        unfinished = [live for replica in self._replicas for live in replica.halt(stop_s, Cause.UNFINISHED)]
        self._transfers.write_unfinished(stop_s)
        self._control.write_unfinished(unfinished, stop_s)
        # When the run stops, the last tokens may not have reached the client.
        return self._records(max(stop_s, self._control.last_s))

    def close(self) -> None:
        """Take the parts apart after the run. They refer to each other, so that thousands of replicas would wait for
        the garbage collector, which takes longer to find them than they take to be freed."""
        self._kernel.close()
        self._control.close()
        self._replicas.clear()
        self._schedulers = None
        del self._control, self._fleet, self._incidents, self._observation, self._transfers

    def _is_active(self, now: float) -> bool:
        """Whether anything besides ticks may still happen."""
        if (
            self._awaits_replicas()
            or self._source.peek_s() is not None
            or self._control.parts.has_placeable_waiter(now)
        ):
            return True
        return any(replica.placed.num_in_flight for replica in self._replicas)

    def _awaits_replicas(self) -> bool:
        """Whether replicas will start, stop or change. Without `until_s`, a start matters only to held requests."""
        if self._incidents.num_to_come:
            return True
        return bool(self._num_starting) and (self._until_s is not None or self._control.parts.has_held())

    def _tick(self, now: float, ticking: tuple[Ticking, int]) -> None:
        policy, key = ticking
        is_active = self._is_active(now)
        if is_active or self._control.parts.has_held():
            policy.tick(now)
        if is_active or self._awaits_replicas():
            assert policy.interval_s is not None
            self._kernel.at(now + policy.interval_s, TICK, key, self._tick, ticking)

    def _records(self, end_s: float) -> Records:
        table = self._source.table()
        return Records(
            workload=table.columns,
            models=table.models,
            regions=table.regions,
            tenants=table.tenants,
            loras=table.loras,
            requests=self._recorder.request_columns(),
            segments=self._recorder.segments.columns(),
            stretches=self._recorder.stretch_columns(),
            replicas=self._fleet.records(end_s),
            end_s=end_s,
            judge_usd=0.0 if self._control.parts.cascade is None else self._control.parts.cascade.config.judge_usd,
            prefixes=None if (p := table.prefix) is None else Prefixes(p.offsets, p.ids, p.tokens),
            moves=self._recorder.moves.columns(),
            drafts=self._recorder.drafts.columns() if any(p.engine.drafts is not None for p in self._pools) else {},
        )


def _replicas_ordering(policies: Policies) -> Callable[[], Ordering]:
    """The ordering of the replicas' own queues."""
    if policies.ordering_at != "gateway":
        return policies.ordering
    return OrderReceived if is_sharing(policies.ordering()) else FcfsOrdering


def _check_adapters(asked: Sequence[str], served: Sequence[str]) -> None:
    """Raise HeadwayError if requests ask for a LoRA adapter that no pool has."""
    for name in asked:
        if name and not served:
            what = f"requests ask for the LoRA adapter {name!r}; expected a pool of `fleet` with it in its `lora`"
            raise HeadwayError(f"workload: {what}")
        if name and name not in served:
            raise unknown("LoRA adapter", name, served, "workload")
