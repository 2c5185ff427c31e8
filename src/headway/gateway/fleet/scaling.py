"""Carries out control's scaling decisions: starts replicas, counts replicas that are up, drains and stops
replicas."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from random import Random
from time import time

from headway.control.live import Live
from headway.control.observe import MutablePoolsView
from headway.control.policies import Least
from headway.control.scaling import PoolState, Scaling, Unit
from headway.control.service import Member, Service
from headway.core.errors import HeadwayError
from headway.core.fleet import Combo
from headway.core.policy import ChangesSettings, Learner, RemembersDemand, Scaler
from headway.gateway.fleet.actuator import Actuator
from headway.gateway.fleet.combos import ComboInstance
from headway.gateway.fleet.local_resources import Gpus, Ports
from headway.gateway.fleet.membership import FleetHost, LiveFleet
from headway.gateway.fleet.processes import LocalProcesses
from headway.gateway.fleet.specs import InferencePool, Kubernetes, Processes, ServedPool, ServingPlan
from headway.gateway.scheduling.replica import LiveReplica

log = logging.getLogger("headway.gateway")
MAX_DEMAND_CELLS = 10_000
"""Largest number of (model, region, tier) combinations by which demand is counted. Clients choose regions and tiers
freely."""
GpuLimits = Sequence[tuple[str, str, int]]


class ScalingWithFailures(Scaling):
    """Control's scaling, with starts that may fail. `give_up` is called to end the attempts to start a failed unit."""

    def __init__(
        self,
        scaler: Scaler,
        view: MutablePoolsView,
        pools: Sequence[PoolState],
        effects: LiveScaling,
        gpu_limits: GpuLimits,
        give_up: Callable[[PoolState], None],
        holding_gpus: frozenset[str],
        planner_messages: Callable[[], Sequence[str]],
        least: Mapping[str, Least] | None = None,
        wall_clock: Callable[[], float] = time,
    ) -> None:
        """`holding_gpus` are the pools and combos whose failed units keep their GPUs until they are given up.
        `planner_messages` returns all messages of the planner so far, for the log. `wall_clock`: seconds since the
        epoch, for `least`."""
        super().__init__(scaler, view, pools, effects, gpu_limits, least)
        self._wall_clock = wall_clock
        self._give_up, self._holding_gpus, self._planner_messages = give_up, holding_gpus, planner_messages
        self._num_logged = 0
        self._last_error = ""
        self.leads: Callable[[], bool] = lambda: True
        """Whether this gateway does the scaling for all gateways that share the fleet. Every gateway calls its
        scaler, so that a new leader's scaler has the same state."""
        self.settle_s = 0.0
        """Time from a decision to drain until every gateway that shares the fleet knows of it."""
        self._drained_s: dict[int, float] = {}
        """Maps each replica that this gateway drains to the start time of the drain."""
        self._drained_by_peers: set[int] = set()

    def _changes(self) -> list[tuple[PoolState, int]]:
        changes = super()._changes()
        return changes if self.leads() else []

    def _start_units(self, pool: PoolState, num: int, now: float) -> None:
        """Start units. Failed units are not replaced, because attempts to start them go on."""
        num_draining = sum(unit[0].is_draining for unit in pool.units())
        num = min(num, max(num - pool.num_failed, num_draining))
        if num > num_draining:
            self._make_room(pool)
        super()._start_units(pool, num, now)

    def _make_room(self, pool: PoolState) -> None:
        """Give up failed units of other pools until the GPUs suffice for one more unit of this pool."""
        for other in self._in_region(pool.region):
            for _ in range(self._num_holding(other) if other.gpus.keys() & pool.gpus.keys() else 0):
                if self.has_room(pool):
                    return
                self._give_up(other)

    def _num_holding(self, pool: PoolState) -> int:
        return pool.num_failed if pool.name in self._holding_gpus else 0

    def _num_gpus(self, region: str, gpu: str) -> int:
        failed = sum(pool.gpus.get(gpu, 0) * self._num_holding(pool) for pool in self._in_region(region))
        return super()._num_gpus(region, gpu) + failed

    def _in_region(self, region: str) -> list[PoolState]:
        return [pool for pool in self._pools.values() if pool.region == region]

    def stop_empty(self, now: float) -> None:
        """Stop drained units. Kept are a model's last unit while another unit is to start, and units to which another
        gateway may still send requests."""
        if not self.leads():
            return
        needed = [entry for entry in self._draining if self._is_needed(*entry) or not self._is_settled(entry[1], now)]
        self._draining = [entry for entry in self._draining if entry not in needed]
        super().stop_empty(now)
        self._draining += needed

    def _is_needed(self, service: Service, unit: Unit) -> bool:
        if any(member.is_up and not member.is_draining for member in service.members):
            return False
        return any(pool.num_starting + pool.num_failed for pool in self._pools.values() if pool.service is service)

    def _is_settled(self, unit: Unit, now: float) -> bool:
        return all(now - self._drained_s.get(member.view.id, now) >= self.settle_s for member in unit)

    def _drain(self, pool: PoolState, unit: Unit, on: bool) -> None:
        for member in unit:
            if on:
                self._drained_s[member.view.id] = self._view.now
            else:
                self._drained_s.pop(member.view.id, None)
        super()._drain(pool, unit, on)

    @property
    def drained(self) -> set[int]:
        """Replicas that this gateway decided to drain."""
        return {member.view.id for _, unit in self._draining for member in unit}

    def drain_as_peers(self, replicas: set[int]) -> None:
        """Drain exactly those replicas that other gateways drain."""
        changed, own = replicas ^ self._drained_by_peers, self.drained
        self._drained_by_peers = replicas
        for pool in self._pools.values():
            for member in pool.members:
                on = member.view.id in replicas
                if member.view.id in changed - own and member.is_draining != on:
                    self._effects.drain(member.view.id, on)

    def _undo_drains(self) -> None:
        """End the drains of this gateway, because another gateway scales now and decides anew."""
        for _, unit in self._draining[:]:
            self._drain(self._pools[unit[0].deployment], unit, False)

    def tick(self, now: float) -> None:
        """Scale, give up failed units beyond what is wanted, and log the planner's messages. Errors are logged once."""
        self._began_s = self._wall_clock() - now  # the machine may have slept, or its clock may have been set
        try:
            super().tick(now)
            self._last_error = ""
        except HeadwayError as error:
            if str(error) != self._last_error:
                log.error("%s", error)
            self._last_error = str(error)
        if not self.leads():
            self._undo_drains()
            return
        for pool in self._pools.values():
            num_holding = self._num_holding(pool)
            for _ in range(min(pool.num_serving + pool.num_starting + num_holding - pool.wanted, num_holding)):
                self._give_up(pool)
        planner_messages = self._planner_messages()
        for message in planner_messages[self._num_logged :]:
            log.info("%s", message)
        self._num_logged = len(planner_messages)

    @property
    def demand(self) -> dict[tuple[str, str, int], tuple[int, int]]:
        """Requests and prompt tokens so far, by model, region and tier."""
        return self._view.arrived

    def count_arrival(self, live: Live, model: str) -> None:
        """Count a request; beyond MAX_DEMAND_CELLS, new regions and tiers are counted together."""
        arrived = self._view.arrived
        cell = model, live.region, live.tier
        if cell not in arrived and len(arrived) >= MAX_DEMAND_CELLS:
            cell = model, "", 0
        num, tokens = arrived.get(cell, (0, 0))
        arrived[cell] = num + 1, tokens + live.prompt_tokens


class LiveScaling:
    """All pools whose replicas the gateway starts. Implements `control.effects.ScalingEffects` and `ActuatorHost`.

    Control learns of a unit (a pool's replica, or one instance of a combo) when all of it is up, as in a simulation.
    """

    def __init__(self, host: FleetHost, fleet: LiveFleet, plan: ServingPlan) -> None:
        self._host, self._fleet, self._plan = host, fleet, plan
        self._pools = fleet.pools
        self._deployments = {served.deployment.name: served.deployment for served in plan.pools}
        self._units = {served.deployment.name: served.unit for served in plan.pools}
        self._ports: dict[tuple[int, int], Ports] = {}
        self._gpus = None if plan.planned_gpus is None else Gpus(plan.planned_gpus)
        self._actuators = {name: self._actuator(s) for name, s in self._pools.items() if s.start is not None}
        self.control: ScalingWithFailures | None = None
        """The scaling part of control; None without a scaler."""
        self._states: dict[str, PoolState] = {}
        """The scaler's counts by deployment; empty without a scaler."""
        self._num_initial_left = {name: served.num_initial for name, served in self._pools.items()}
        """Number of replicas of the initial fleet that are not created yet, by pool."""
        self._waiting: set[int] = set()
        """Replicas that are up although their instances are not complete."""
        self._num_pods: dict[str, int] = {}
        """Pods requested from a cluster, by pool. Pools of processes are left out."""
        self._start_took_s: dict[str, float] = {}
        """Start-up time of the last started replica, by model."""
        fleet.on_removed.append(self._replica_removed)

    def _actuator(self, served: ServedPool) -> Actuator:
        if isinstance(served.start, Processes):
            ports = served.start.ports  # one entry for all pools of the model
            cascade = self._plan.policies.cascade
            gpus = self._gpus if cascade is not None and served.pool.model.name in cascade.models else None
            return LocalProcesses(served, served.start, self, self._ports.setdefault(ports, Ports(*ports)), gpus)
        if isinstance(served.start, InferencePool):
            from headway.gateway.fleet.inference_pool import InferencePoolPods

            return InferencePoolPods(served, served.start, self)
        assert isinstance(served.start, Kubernetes)
        from headway.gateway.fleet.kubernetes import Pods

        return Pods(served, served.start, self)

    def configure(self, services: dict[str, Service]) -> Scaling | None:
        """Create control's scaling with these services. None if the fleet file has no scaler."""
        for served in self._pools.values():
            pool = served.pool
            cached_tokens = served.kv_blocks * pool.engine.block_size_tokens + 1
            services[pool.model.name].announce(min(cached_tokens, pool.model.max_context_tokens))
        plan = self._plan
        if plan.policies.scaler is None:
            return None
        self._states |= {name: PoolState(deployment, services) for name, deployment in self._deployments.items()}
        holding_gpus = frozenset(
            served.deployment.name
            for served in self._pools.values()
            if served.combo is not None or isinstance(served.start, Kubernetes)
        )
        scaler = plan.policies.scaler()
        if plan.past_demand is not None and isinstance(scaler, RemembersDemand):
            scaler.remember(plan.past_demand)
        self.control = ScalingWithFailures(
            scaler=scaler,
            view=MutablePoolsView(Random(f"{plan.seed}/scaler")),
            pools=list(self._states.values()),
            effects=self,
            gpu_limits=plan.gpu_limits,
            give_up=self._give_up,
            holding_gpus=holding_gpus,
            planner_messages=plan.planner_messages,
            least=plan.policies.least,
        )
        return self.control

    def reconfigure(self, plan: ServingPlan) -> list[str]:
        """Apply another plan's goodputs and scaler settings, and return the changed settings."""
        for served in plan.pools:
            state = self._states.get(served.deployment.name)
            if served.combo is not None and state is not None:
                state.goodput_rps = served.combo.goodput_rps
        before, make = self._plan.policies.scaler, plan.policies.scaler
        self._plan = plan
        if self.control is None or make is None or make == before:
            return []
        self._use_scaler(make(), self.control)
        return [f"policies: scaling is {before} -> {make}"]

    def _use_scaler(self, made: Scaler, control: Scaling) -> None:
        """Replace the scaler by a scaler of the same class with other settings, which takes over the old scaler's
        state."""
        before: object = control.scaler
        if isinstance(made, ChangesSettings):
            made.go_on(before)
        if isinstance(made, Learner):
            for service in self._host.driver.services.values():
                service.learners = [made if each is before else each for each in service.learners]
        control.use(made)

    def start(self) -> None:
        for name, state in self._states.items():
            state.num_starting = self._deployments[name].replicas
        for actuator in self._actuators.values():
            actuator.start_initial()

    @property
    def leads(self) -> bool:
        return self.control is None or self.control.leads()

    async def stop(self) -> None:
        """Stop all processes. Pods stay as they are."""
        for actuator in self._actuators.values():
            await actuator.close()

    # Control's effects.

    def start_replica(self, deployment: str, now: float) -> None:
        """Start one more replica of a pool, or one more instance of a combo."""
        for pool, num in self._units[deployment].items():
            for _ in range(num):
                self._actuators[pool].add()

    def _give_up(self, state: PoolState) -> None:
        """Give up a failed unit: the newest one that control does not know. Remove its existing parts."""
        members: list[LiveReplica] = []
        if isinstance(self._deployments[state.name], Combo):
            instances = [each for each in self._fleet.combos.named(state.name) if not each.is_announced]
            members = instances[-1].members[:] if instances else []
        for member in members:
            self._leave(member)
            self._remove(member, at_once=True)
        for pool, num in self._units[state.name].items():
            self._actuators[pool].cancel(num - sum(member.pool == pool for member in members))
        self._recount(state.name, num_given_up=1)

    def drain(self, replica: int, on: bool) -> None:
        drained = self._fleet.replicas[replica]
        if on or self._fleet.status(drained) != "leaving":
            self._host.driver.drain(drained, on)

    def stop_replica(self, replica: int, now: float) -> None:
        """Remove an empty replica. A replica that ended during its drain is removed already."""
        stopped = self._fleet.replicas[replica]
        self._remove(stopped, at_once=False)
        if not any(member.is_up for member in self._host.driver.services[stopped.model].members):
            log.warning("%s: its last replica stops before another one is up: requests wait", stopped.model)

    def retry_after_s(self, live: Live) -> int:
        """Seconds that the client of a rejected request is advised to wait: until the request would be served in time,
        or until another replica is up. If neither is known: the time that the request has waited."""
        driver = self._host.driver
        if live.shed_s:
            return ceil(live.shed_s)
        if driver.control.service_of(live).any_up:
            return max(ceil(driver.now - live.arrival_s), 1)
        return self.expected_s(live.model)

    @property
    def react_s(self) -> float:
        """Seconds from a change of the load until a replica started for the new load is up. Estimated by the longest of
        the last starts."""
        interval_s = 0.0 if self.control is None else self.control.interval_s
        return interval_s + max(self._start_took_s.values(), default=0.0)

    def expected_s(self, model: str) -> int:
        """Estimated seconds until another replica of a model is up, by the last start; 1 if no start is known."""
        if model not in self._start_took_s:
            return 1
        now, replicas = self._host.driver.now, self._fleet.present()
        starts_s = [each.lifetime.start_s for each in replicas if each.is_starting and each.model == model]
        return max(ceil(self._start_took_s[model] - (now - min(starts_s, default=now))), 1)

    # Several gateways.

    @property
    def demand(self) -> dict[tuple[str, str, int], tuple[int, int]]:
        """Requests and prompt tokens so far of all gateways, by model, region and tier."""
        return {} if self.control is None else self.control.demand

    def num_held(self) -> dict[str, int]:
        """Requests in this gateway's hold queues, by model."""
        return {state.model: state.num_queued - state.num_queued_at_peers for state in self._states.values()}

    def use_peers(self, num_held: Mapping[str, int], drained: set[int]) -> None:
        """Take over the reports of other gateways: their numbers of held requests by model, and the replicas that they
        drain."""
        for state in self._states.values():
            state.num_queued_at_peers = num_held.get(state.model, 0)
        if self.control is not None:
            self.control.drain_as_peers(drained)

    def _remove(self, replica: LiveReplica, at_once: bool) -> None:
        if not replica.is_removed:
            self._fleet.remove(replica, at_once)

    # Events of replicas.

    def replica_up(self, replica: LiveReplica) -> None:
        """A replica was found healthy, for the first time or again."""
        driver = self._host.driver
        if not replica.is_starting:
            if replica.id not in self._waiting:
                driver.roster.replica_up(replica)
            return
        replica.is_starting = False
        replica.lifetime.end_down(driver.now)
        self._start_took_s[replica.model] = driver.now - replica.lifetime.start_s
        self._actuators[replica.pool].replica_up(replica)
        instance = self._fleet.combos.of(replica)
        if self.control is None:
            driver.roster.replica_up(replica)
        elif instance.is_announced:
            self._add_to_announced(instance, replica)
        else:
            self._waiting.add(replica.id)
            if instance.is_complete and self._waiting.issuperset(member.id for member in instance.members):
                self._announce(instance)
        self._recount(replica.deployment)

    def _announce(self, instance: ComboInstance) -> None:
        instance.is_announced = True
        members = [self._member(replica) for replica in instance.members]
        for replica, member in zip(instance.members, members, strict=True):
            self._waiting.discard(replica.id)
            member.is_up = self._host.health.is_up(replica)
        self._host.driver.control.on_unit_started(instance.name, members, self._host.driver.now)

    def _add_to_announced(self, instance: ComboInstance, replica: LiveReplica) -> None:
        self._states[instance.name].members.append(self._member(replica))
        self._host.driver.roster.replica_up(replica)

    def _member(self, replica: LiveReplica) -> Member:
        member = self._host.driver.services[replica.model].member(replica.id)
        assert member is not None
        return member

    def _leave(self, replica: LiveReplica) -> None:
        """Free the place of a replica that was replaced or given up."""
        self._fleet.combos.leave(replica)
        self._waiting.discard(replica.id)
        replica.is_starting = False

    def _replica_removed(self, replica: LiveReplica) -> None:
        """A replica was removed. If its instance was still starting, the instance's other parts are used as they
        are."""
        state, instance = self._states.get(replica.deployment), self._fleet.combos.of(replica)
        was_starting = replica.is_starting or replica.id in self._waiting
        self._leave(replica)
        if state is not None:
            _remove_member(state, replica)
            if was_starting and not instance.is_announced:
                instance.is_announced = True
                state.num_starting -= 1
                for each in [each for each in instance.members if each.id in self._waiting]:
                    self._waiting.discard(each.id)
                    self._add_to_announced(instance, each)
            self._recount(replica.deployment)
        if replica.pool in self._actuators:
            self._actuators[replica.pool].stop(replica)

    # Events that actuators report.

    def replica_created(self, pool: str, url: str) -> LiveReplica:
        fleet = self._fleet
        replica = fleet.create(fleet.pools[pool], url)
        replica.lifetime.start_down(replica.lifetime.start_s)
        replica.is_starting = True
        replica.is_initial = self._num_initial_left[pool] > 0
        self._num_initial_left[pool] -= replica.is_initial
        fleet.connect(replica)
        return replica

    def replica_lost(self, replica: LiveReplica, at_once: bool = True) -> bool:
        """Continue the replica's requests elsewhere if possible: `at_once`, or while the replica ends. Replace the
        replica unless it was draining."""
        state, is_replaced = self._states.get(replica.deployment), not replica.is_draining
        instance = self._fleet.combos.of(replica)
        if is_replaced:
            self._leave(replica)
        if state is not None:
            _remove_member(state, replica)
            if is_replaced and instance.is_announced and not instance.members:
                state.num_starting += 1  # the whole instance has ended, and starts again
        self._remove(replica, at_once)
        self._recount(replica.deployment)
        return is_replaced

    def set_unready(self, replica: LiveReplica, on: bool) -> None:
        """A replica is not ready, or is ready again."""
        self._fleet.set_unready(replica, on)

    def start_failed(self, pool: str, why: str) -> None:
        self._fleet.num_failed[pool] += 1
        self._fleet.last_failures[pool] = why
        self._recount(self._pools[pool].deployment.name)

    def start_recovered(self, pool: str, num_given_up: int = 0) -> None:
        self._fleet.num_failed[pool] -= 1
        self._recount(self._pools[pool].deployment.name, num_given_up)

    def wants_failed(self, pool: str) -> bool:
        state = self._states.get(pool)
        return state is None or state.wanted > state.num_serving + state.num_starting

    def has_room(self, pool: str) -> bool:
        state = self._states.get(pool)
        return state is None or self.control is None or self.control.has_room(state)

    def pods_requested(self, pool: str, num: int, num_not_up: int) -> None:
        self._num_pods[pool] = num
        name = self._pools[pool].deployment.name
        state, unit = self._states.get(name), self._units[name]
        if state is None or not self._num_pods.keys() >= unit.keys():
            return
        if self._pools[pool].combo is None:
            state.num_starting = max(num_not_up - state.num_failed, 0)
        else:
            num_units = min(self._num_pods[part] // num for part, num in unit.items())
            num_known = len({member.view.combo for member in state.members})
            state.num_starting, state.num_failed = max(num_units - num_known, 0), 0
        self._recount(name)

    def retire(self, replica: LiveReplica) -> None:
        """Drain a replica, then stop it."""
        if (state := self._states.get(replica.deployment)) is not None and not replica.is_of_combo:
            _remove_member(state, replica)
        elif replica.is_of_combo:
            self._fleet.combos.leave(replica)  # another replica may take the place of this one while its requests end
        self._remove(replica, at_once=False)

    def _recount(self, name: str, num_given_up: int = 0) -> None:
        """Recount the unannounced units. A unit with a failed part counts as failed, any other unit as starting."""
        state, unit = self._states.get(name), self._units[name]
        if state is None:
            return
        if self._num_pods.keys() >= unit.keys():
            num_given_up = 0  # the number of requested pods has been reduced already
        num_unannounced = state.num_starting + state.num_failed - num_given_up
        announced = [instance for instance in self._fleet.combos.named(name) if instance.is_announced]
        num_failed = max(-(-self._num_failed(pool, num, announced) // num) for pool, num in unit.items())
        state.num_failed = min(num_failed, num_unannounced)
        state.num_starting = num_unannounced - state.num_failed

    def _num_failed(self, pool: str, num: int, announced: Sequence[ComboInstance]) -> int:
        """Failed replicas of a pool with `num` replicas per unit, except those missing from announced instances."""
        members = [member for instance in announced for member in instance.members]
        num_present = sum(member.pool == pool and not member.is_starting for member in members)
        return max(self._fleet.num_failed[pool] - (len(announced) * num - num_present), 0)


def _remove_member(state: PoolState, replica: LiveReplica) -> None:
    state.members = [member for member in state.members if member.view.id != replica.id]
