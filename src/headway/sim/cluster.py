"""The simulator's driver: replicas in virtual time, commanded by `control`.

Read `Cluster._arrive` and `Cluster.start` first: a request goes from the workload to control, and back to a replica.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import Random
from typing import Any, Final, Literal

from headway.catalog.costs import costs
from headway.control.cache_index import CacheIndex, SchedulersIndex
from headway.control.control import Control, Ticking
from headway.control.decisions import DecisionObserver
from headway.control.live import Live
from headway.control.observe import CacheEvents, MutablePoolsView, ReplicaViews, Scrape
from headway.control.policies import Policies
from headway.control.recorder import Recorder
from headway.control.scaling import PoolState, Scaling
from headway.control.service import Member, Service
from headway.core.errors import HeadwayError, unknown
from headway.core.fleet import Combo, Fault, Fleet, Parallel, Pool, Role, RoleChange, unit_of
from headway.core.pacer import Pacer
from headway.core.policy import Ordering, SharingOrdering
from headway.core.record import Cause, Outcome, Prefixes, Records, ReplicaRecord
from headway.core.view import ReplicaView
from headway.limits.tenants import TenantLimits
from headway.perf import memory
from headway.perf.copies import NETWORK
from headway.policies.ordering.fcfs import FcfsOrdering
from headway.sim.fabric import Fabric
from headway.sim.incidents import Incidents
from headway.sim.kernel import ARRIVAL, BEFORE, COMMAND, TICK, Kernel
from headway.sim.kv_store import KvStore, StoreClient
from headway.sim.lifetime import Lifetime
from headway.sim.limits import SimulatedLimits
from headway.sim.provisioning import InstanceSources
from headway.sim.replica import OrderReceived, Replica, Run
from headway.sim.replica_resources import PoolResources, calibrated_line
from headway.sim.row_order import RowOrder
from headway.sim.schedulers import Schedulers, SharedControl
from headway.sim.spill import SpillFile
from headway.sim.timeline import Line
from headway.sim.transfers import KvTransfers
from headway.workload.quality_judges import noisy_score
from headway.workload.sources import RequestSource

Step = Literal["stretch", "exact"]
Progress = Callable[[float, int], None]

_PROGRESS_EVERY: Final = 1 << 11
_SEND: Final = -(1 << 16)
_RECEIVE: Final = -(1 << 15)
"""Places of schedulers' messages among the ticks of one instant."""


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
    are recorded as unfinished. `line` replaces `perf`'s step-time model. `pacer` is the pace at which answers are read.
    `decisions` observes the policies' choices. `order` learns the place of every row. `limits` are those of tenants, by
    name. Raises HeadwayError if a model does not fit its GPUs.
    """
    cluster = Cluster(
        fleet, source, policies, seed, step, scrape or Scrape(), progress, line or calibrated_line, pacer or Pacer(),
        decisions, order, SimulatedLimits(limits, fleet) if limits else None,
    )  # fmt: skip
    return cluster.run(faults, until_s, roles)


class Cluster:
    """A fleet in virtual time. Satisfies `control.effects.Effects` and `ScalingEffects`."""

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
        """None: no tenant has any."""
        self._observer, self._seed, self._order = observer, seed, order
        self._kernel = Kernel()
        if order is not None:
            order.follow(self._kernel)
        self._recorder = Recorder(bool(fleet.fallbacks.models), order, SpillFile, limits is not None)
        self._source = source
        self._progress = progress
        self._next_s = float("inf")
        self._armed = 0
        self._num_starting = 0
        self._last_s = 0.0
        """Time of the last arrival, or of the last request for a replica."""
        self._until_s: float | None = None
        self._ordering = _replicas_ordering(policies)
        self._resources = {pool.name: PoolResources(pool, line(pool)) for pool in fleet.all_pools}
        notify = source.reactive or limits is not None
        config = scrape.schedulers
        self._schedulers: Schedulers | None = None
        """None: there is one, which knows all that it has placed."""
        if config.num > 1:
            shared = SharedControl(self, self._recorder, notify)
            self._control: Control = shared
            self._schedulers = Schedulers(config, shared, fleet, policies, seed)
        else:
            self._control = Control(self, self._recorder, notify)
        self._run_parts = Run(self._kernel, self._control, self._recorder, step == "exact", pacer, fleet.network, seed)
        self._pools: list[Pool] = []
        self._replicas: list[Replica] = []
        self._lifetimes: list[Lifetime] = []
        deployments: list[Pool | Combo] = [*fleet.pools, *fleet.combos]
        self._deployments = {each.name: each for each in deployments}
        self._num_units = 0
        self._loras = {pool.name: pool.lora_names for pool in fleet.all_pools}
        _check_adapters(source.table().loras, [name for names in self._loras.values() for name in names])
        self._network, self._gpu_limits, self._fallbacks = fleet.network, fleet.gpu_limits, fleet.fallbacks
        self._is_wide = len({pool.region for pool in fleet.all_pools}) > 1 or bool(source.table().regions)
        self._instance_sources = InstanceSources(fleet, seed)
        self._kv_store = None if fleet.kv_store is None else KvStore(fleet.kv_store, self._read_clock)
        self._kv_kinds: dict[tuple[str, float, int, Parallel], int] = {}
        """Numbers of the kinds of KV in the store."""
        self._cache_events = CacheEvents(scrape.cache, Random(f"{seed}/cache events"))
        for deployment in self._deployments.values():
            for _ in range(deployment.replicas):
                self._add_unit(deployment, 0.0)
        if not self._replicas:
            raise HeadwayError("fleet: no replicas; at least one pool needs `replicas` of 1 or more")
        self._views = ReplicaViews([replica.view for replica in self._replicas], scrape, Random(f"{seed}/scrape"))
        fabric = Fabric(self._kernel, self._capacity, costs().kv_transfer[NETWORK].latency_s)
        self._transfers = KvTransfers(fabric, self._replicas, self._kv_bytes, self._control, self._recorder.moves)
        self._incidents = Incidents(self._kernel, self._replicas, self._lifetimes, self._transfers, self._control)
        self._configure(policies, seed)

    def _add_unit(self, deployment: Pool | Combo, now: float) -> list[Replica]:
        """Add a replica of a pool, or all replicas of a combo."""
        self._num_units += 1
        goodput_rps = deployment.goodput_rps if isinstance(deployment, Combo) else None
        return [self._add(each, now, goodput_rps) for each in unit_of(deployment)]

    def _add(self, pool: Pool, now: float, goodput_rps: float | None) -> Replica:
        """Add a replica, paid for from now on."""
        resources, ordering = self._resources[pool.name], self._ordering()
        replica = Replica(len(self._replicas), resources, ordering, self._run_parts, self._num_units, goodput_rps)
        replica.use_store(self._store_client(pool))
        self._index_cache(replica)
        self._replicas.append(replica)
        self._pools.append(pool)
        self._lifetimes.append(Lifetime(pool.role, now))
        return replica

    def _store_client(self, pool: Pool) -> StoreClient | None:
        """A replica's access to the shared store of KV, if there is one for its pool."""
        store = self._kv_store
        if store is None or not pool.engine.prefix_caching or pool.hosted is not None:
            return None
        if store.config.pools and pool.name not in store.config.pools:
            return None
        model, engine = pool.model.name.partition("@")[0], pool.engine
        shape = (model, engine.kv_dtype_bytes, engine.block_size_tokens, pool.parallel)
        kind = self._kv_kinds.setdefault(shape, len(self._kv_kinds))
        per_token = memory.kv_bytes_per_token(pool.model, pool.engine.kv_dtype_bytes)
        return store.client(kind, per_token * pool.engine.block_size_tokens, pool.network_bytes_per_s)

    def _index_cache(self, replica: Replica) -> None:
        """Have policies see a replica's prefix cache as the scenario's observation says."""
        config = self._cache_events.config
        source = config.source
        if source == "exact":
            return
        num, view = 1 if self._schedulers is None else self._schedulers.config.num, replica.view
        block, total = view.block_size_tokens, view.kv_blocks_total
        indexes = [CacheIndex(block, total, source == "placements", adds_placed=config.placed) for _ in range(num)]
        replica.placed.cache_index = index = indexes[0]
        if self._schedulers is not None:
            replica.placed.cache_index = index = shared = SchedulersIndex(indexes)
            self._schedulers.follow(shared)
        if source == "events":
            replica.batch.report_cache_changes()
            self._cache_events.add(index, view)

    def _configure(self, policies: Policies, seed: int) -> None:
        """Hand the replicas to control, model by model."""
        names = {pool.model.name: pool.names for pool in self._pools}
        scaling = partial(self._scaling, policies, seed)
        members = self._members(0)
        self._control.configure(policies, members, names, seed, scaling, self._observer, self._fallbacks)
        if self._schedulers is not None:
            self._schedulers.add(policies, self._members, names, seed, self._observer)
        elif not self._views.scrape_config.period_s:
            for service in self._control.services:
                service.view.changes = self._kernel.changes

    def _members(self, scheduler: int) -> dict[str, list[Member]]:
        """The replicas by model, as a scheduler sees them."""
        deployments = {part.name: each.name for each in self._deployments.values() for part in unit_of(each)}
        members: dict[str, list[Member]] = {pool.model.name: [] for pool in self._pools}
        for replica in self._replicas:
            pool = self._pools[replica.id]
            members[pool.model.name].append(self._member(replica, deployments[pool.name], scheduler))
        return members

    def _scaling(self, policies: Policies, seed: int, services: dict[str, Service]) -> Scaling | None:
        if policies.scaler is None:
            return None
        pools = [PoolState(each, services) for each in self._deployments.values()]
        view = MutablePoolsView(Random(f"{seed}/scaler"))
        began_s = 0.0 if policies.began_s is None else policies.began_s
        return Scaling(policies.scaler(), view, pools, self, self._gpu_limits, policies.least, began_s)

    def _member(self, replica: Replica, deployment: str, scheduler: int = 0) -> Member:
        view: ReplicaView = self._views.views[replica.id]
        if self._schedulers is not None:
            view = self._schedulers.view(scheduler, replica, view)
        pool = self._pools[replica.id]
        loras, hosted = self._loras[pool.name], pool.hosted
        member = Member(view, replica.max_request_tokens, replica.max_num_waiting, deployment, loras)
        member.window = None if hosted is None else hosted.max_concurrent
        return member

    def _read_clock(self) -> float:
        return self._kernel.now

    def _capacity(self, replica: int) -> float:
        return self._pools[replica].network_bytes_per_s

    def _kv_bytes(self, replica: int) -> float:
        pool = self._pools[replica]
        return memory.kv_bytes_per_token(pool.model, pool.engine.kv_dtype_bytes)

    # Control's effects.

    def start(self, live: Live, replica: int, now: float) -> None:
        if self._is_wide:
            there = self._replicas[replica]
            there.enqueue(live, now, delay_s=self._latency_s(live, there.view.region))
        else:
            self._replicas[replica].enqueue(live, now)

    def _latency_s(self, live: Live, region: str) -> float:
        """Latency between a request's own region and another, each way."""
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
        self._replicas[replica].view.role = role
        self._replicas[replica].timeline.note_change()
        self._lifetimes[replica].set_role(role, self._kernel.now)

    def judge(self, live: Live, now: float) -> None:
        """Score the answer of a cascade stage after the judge's time."""
        assert self._control.cascade is not None
        self._kernel.at(now + self._control.cascade.config.judge_s, COMMAND, live.id, self._judge, live)

    def _judge(self, now: float, live: Live) -> None:
        assert self._control.cascade is not None
        config = self._control.cascade.config
        if self._limits is not None:
            self._limits.stage_ended(live, self._pools[live.replica].name, Outcome.FINISHED, now)
        quality = next((score for model, score in live.quality if model == live.model), 0.0)
        score = noisy_score(quality, config.judge_bias, config.judge_noise, self._seed, live.id, live.stage_index)
        self._control.on_judged(live, score, now)

    def start_replica(self, deployment: str, now: float) -> None:
        self._last_s = now
        unit = self._add_unit(self._deployments[deployment], now)
        start_s = max(self._instance_sources.acquire(replica.id, self._pools[replica.id], now) for replica in unit)
        for replica in unit:
            replica.is_up = False
            self._lifetimes[replica.id].start_down(now, now + start_s)
            self._views.add(replica.view)
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
        self._replicas[replica].is_up = False
        self._lifetimes[replica].end(now)
        self._instance_sources.give_back(replica, self._pools[replica])

    def call_at(self, time_s: float, action: Callable[[float, Any], None], argument: Any) -> None:
        self._kernel.at(time_s, COMMAND, argument.id, action, argument)

    def notify_ended(self, live: Live, now: float, outcome: Outcome) -> None:
        """Report the end of a request to its tenant's limits, and to the workload, which may react with others."""
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
        """Schedule the next known arrival, unless an earlier one is scheduled."""
        time_s = self._source.peek_s()
        if time_s is not None and time_s < self._next_s:
            self._next_s = time_s
            self._armed = armed = self._armed + 1
            now = self._kernel.now
            self._kernel.push((time_s if time_s > now else now, ARRIVAL, 0, armed, self._arrive, armed))

    def _refusal(self, limits: SimulatedLimits, live: Live, now: float) -> int:
        cascade = self._control.cascade
        return limits.refusal(live, now, 1 if cascade is None else cascade.num_models(live.model))

    def _arrive(self, now: float, armed: int) -> None:
        if armed != self._armed:
            return
        live = self._source.pop(Live)
        self._last_s = now
        self._next_s = float("inf")
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
        if self._views.scrape_config.period_s:
            self._kernel.at(0.0, TICK, 0, self._scrape)
        if self._views.scrape_config.cache.source == "events":
            self._kernel.at(self._cache_events.config.period_s, TICK, -2, self._collect_cache_events)
        if self._schedulers is not None and self._schedulers.config.shared:
            for scheduler in range(self._schedulers.config.num):
                start_s = self._schedulers.first_s(scheduler)
                self._kernel.at(start_s, TICK, _SEND - scheduler, self._send_state, scheduler)
        for i, ticking in enumerate(self._control.ticking()):
            if ticking.interval_s is not None:
                self._kernel.at(ticking.interval_s, TICK, 2 + i, self._tick, (ticking, 2 + i))
        self._arm()
        self._kernel.run(float("inf") if until_s is None else until_s)
        if self._order is not None:
            self._order.end()
        stop_s = max(self._last_s, self._incidents.last_s, self._control.last_s) if until_s is None else until_s
        unfinished = [live for replica in self._replicas for live in replica.halt(stop_s, Cause.UNFINISHED)]
        self._transfers.write_unfinished(stop_s)
        self._control.write_unfinished(unfinished, stop_s)
        # The last tokens may still be on their way to the client when the run stops.
        return self._records(max(stop_s, self._control.last_s))

    def _is_active(self, now: float) -> bool:
        """Whether anything besides ticks is still to happen."""
        if self._awaits_replicas() or self._source.peek_s() is not None or self._control.has_placeable_waiter(now):
            return True
        return any(replica.placed.num_in_flight for replica in self._replicas)

    def _awaits_replicas(self) -> bool:
        """Whether replicas will start, stop or change. Without `until_s`, a start matters only to held requests."""
        if self._incidents.num_to_come:
            return True
        return bool(self._num_starting) and (self._until_s is not None or self._control.has_held())

    def _tick(self, now: float, ticking: tuple[Ticking, int]) -> None:
        policy, key = ticking
        is_active = self._is_active(now)
        if is_active or self._control.has_held():
            policy.tick(now)
        if is_active or self._awaits_replicas():
            assert policy.interval_s is not None
            self._kernel.at(now + policy.interval_s, TICK, key, self._tick, ticking)

    def _scrape(self, now: float, _: Any) -> None:
        config = self._views.scrape_config
        if self._is_active(now):
            self._kernel.at(now + config.period_s, TICK, 0, self._scrape)
        self._kernel.at(now + config.delay_s, TICK, 1, self._show, self._views.scrape(now))

    def _show(self, now: float, samples: Any) -> None:
        self._views.show(samples)
        self._control.on_views_refreshed(now)

    def _collect_cache_events(self, now: float, _: Any) -> None:
        config = self._cache_events.config
        if self._is_active(now):
            self._kernel.at(now + config.period_s, TICK, -2, self._collect_cache_events)
        batches = self._cache_events.collect()
        if batches:
            self._kernel.at(now + config.delay_s, TICK, -1, self._apply_cache_events, batches)

    def _apply_cache_events(self, _: float, batches: Any) -> None:
        self._cache_events.apply(batches)

    def _send_state(self, now: float, scheduler: int) -> None:
        """A scheduler sends the others what it has at the replicas."""
        assert self._schedulers is not None
        config = self._schedulers.config
        if self._is_active(now):
            self._kernel.at(now + config.period_s, TICK, _SEND - scheduler, self._send_state, scheduler)
        self._schedulers.forget_silent(scheduler, now)
        if not self._schedulers.is_away(now):
            state = self._schedulers.state(scheduler)
            self._kernel.at(now + config.delay_s, TICK, _RECEIVE - scheduler, self._receive_state, (scheduler, state))

    def _receive_state(self, now: float, message: Any) -> None:
        assert self._schedulers is not None
        scheduler, state = message
        self._schedulers.receive(scheduler, state, now)
        self._control.on_views_refreshed(now)

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
            replicas=tuple(self._replica_record(replica, end_s) for replica in self._replicas),
            end_s=end_s,
            judge_usd=0.0 if self._control.cascade is None else self._control.cascade.config.judge_usd,
            prefixes=None if (p := table.prefix) is None else Prefixes(p.offsets, p.ids, p.tokens),
            moves=self._recorder.moves.columns(),
            drafts=self._recorder.drafts.columns() if any(p.engine.drafts is not None for p in self._pools) else {},
        )

    def _replica_record(self, replica: Replica, end_s: float) -> ReplicaRecord:
        pool = self._pools[replica.id]
        lifetime = self._lifetimes[replica.id]
        num_gpus, is_hosted = pool.num_gpus, pool.hosted is not None
        return ReplicaRecord(
            replica.id, pool.name, pool.model.name, pool.gpu.name, pool.region, num_gpus, pool.usd_per_hour,
            pool.gpu.watts * num_gpus, 0 if is_hosted else replica.view.kv_blocks_total * pool.engine.block_size_tokens,
            replica.view.max_num_seqs,
            lifetime.up(end_s), lifetime.down(end_s), *self._instance_sources.origin(replica.id),
            lifetime.with_role("prefill", end_s), lifetime.with_role("decode", end_s),
            pool.usd_per_million_input_tokens if is_hosted else 0.0,
            pool.usd_per_million_output_tokens if is_hosted else 0.0,
            pool.usd_per_million_cached_tokens if is_hosted else None,
            power=self._resources[pool.name].power,
        )  # fmt: skip


def _replicas_ordering(policies: Policies) -> Callable[[], Ordering]:
    """The ordering of the replicas' own queues."""
    if policies.ordering_at != "gateway":
        return policies.ordering
    return OrderReceived if isinstance(policies.ordering(), SharingOrdering) else FcfsOrdering


def _check_adapters(asked: Sequence[str], served: Sequence[str]) -> None:
    """HeadwayError if requests ask for a LoRA adapter that no pool has."""
    for name in asked:
        if name and not served:
            what = f"requests ask for the LoRA adapter {name!r}; expected a pool of `fleet` with it in its `lora`"
            raise HeadwayError(f"workload: {what}")
        if name and name not in served:
            raise unknown("LoRA adapter", name, served, "workload")
