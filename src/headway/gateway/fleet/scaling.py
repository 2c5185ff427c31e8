"""Carries out control's scaling: replicas are started, count once they are up, are drained, and stopped."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from math import ceil, inf
from random import Random

from msgspec.structs import replace

from headway.control.live import Live
from headway.control.observe import MutablePoolsView
from headway.control.policies import Policies
from headway.control.scaling import PoolState, Scaling, Unit
from headway.control.service import Service
from headway.core.errors import HeadwayError
from headway.core.fleet import Combo, Pool, unit_of
from headway.core.policy import Scaler
from headway.gateway.fleet.actuator import Actuator
from headway.gateway.fleet.combo_readiness import ComboReadiness
from headway.gateway.fleet.combos import combos_of
from headway.gateway.fleet.local_resources import Gpus, Ports
from headway.gateway.fleet.membership import FleetHost, LiveFleet
from headway.gateway.fleet.processes import LocalProcesses
from headway.gateway.fleet.replica import LiveReplica
from headway.gateway.fleet.specs import Kubernetes, Processes, ServedPool

log = logging.getLogger("headway.gateway")
MAX_DEMAND_CELLS = 10_000
"""Combinations of model, region and tier by which demand is counted; clients choose regions and tiers freely."""
GpuLimits = Sequence[tuple[str, str, int]]


class ScalingWithFailures(Scaling):
    """Control's scaling where starts may fail. `give_up` is called to stop the attempts to start a failed unit."""

    def __init__(
        self,
        scaler: Scaler,
        view: MutablePoolsView,
        pools: Sequence[PoolState],
        effects: LiveScaling,
        gpu_limits: GpuLimits,
        give_up: Callable[[PoolState], None],
        holding_gpus: frozenset[str],
        news: Callable[[], Sequence[str]],
    ) -> None:
        """`holding_gpus` are the pools and combos whose failed units keep their GPUs until they are given up. `news`
        are the planner's messages so far, for the log."""
        super().__init__(scaler, view, pools, effects, gpu_limits)
        self._give_up, self._holding_gpus, self._news = give_up, holding_gpus, news
        self._num_logged = 0
        self._last_error = ""

    def _start_units(self, pool: PoolState, num: int, now: float) -> None:
        """Start units, but none in place of failed ones, whose attempts go on."""
        num_draining = sum(unit[0].is_draining for unit in pool.units())
        num = min(num, max(num - pool.num_failed, num_draining))
        if num > num_draining:
            self._make_room(pool)
        super()._start_units(pool, num, now)

    def _make_room(self, pool: PoolState) -> None:
        """Give up failed units of other pools until there are GPUs for one more unit of this one."""
        for other in self._in_region(pool.region):
            for _ in range(self._num_holding(other) if other.gpus.keys() & pool.gpus.keys() else 0):
                if self.has_room(pool):
                    return
                self._give_up(other)

    def _num_holding(self, pool: PoolState) -> int:
        """Failed units that hold GPUs."""
        return pool.num_failed if pool.name in self._holding_gpus else 0

    def _num_gpus(self, region: str, gpu: str) -> int:
        failed = sum(pool.gpus.get(gpu, 0) * self._num_holding(pool) for pool in self._in_region(region))
        return super()._num_gpus(region, gpu) + failed

    def _in_region(self, region: str) -> list[PoolState]:
        return [pool for pool in self._pools.values() if pool.region == region]

    def stop_empty(self, now: float) -> None:
        """Stop drained units, but keep a model's last one while another, for which there is room, starts."""
        needed = [entry for entry in self._draining if self._is_needed(*entry)]
        self._draining = [entry for entry in self._draining if entry not in needed]
        super().stop_empty(now)
        self._draining += needed

    def _is_needed(self, service: Service, unit: Unit) -> bool:
        if any(member.is_up and not member.is_draining for member in service.members):
            return False
        return any(pool.num_starting + pool.num_failed for pool in self._pools.values() if pool.service is service)

    def tick(self, now: float) -> None:
        """Scale, give up failed units beyond what is wanted, and log the planner's news. An error is logged once."""
        try:
            super().tick(now)
            self._last_error = ""
        except HeadwayError as error:
            if str(error) != self._last_error:
                log.error("%s", error)
            self._last_error = str(error)
        for pool in self._pools.values():
            num_holding = self._num_holding(pool)
            for _ in range(min(pool.num_serving + pool.num_starting + num_holding - pool.wanted, num_holding)):
                self._give_up(pool)
        news = self._news()
        for message in news[self._num_logged :]:
            log.info("%s", message)
        self._num_logged = len(news)

    def count_arrival(self, live: Live, model: str) -> None:
        """Count a request; beyond MAX_DEMAND_CELLS, new regions and tiers are counted together."""
        arrived = self._view.arrived
        cell = model, live.region, live.tier
        if cell not in arrived and len(arrived) >= MAX_DEMAND_CELLS:
            cell = model, "", 0
        num, tokens = arrived.get(cell, (0, 0))
        arrived[cell] = num + 1, tokens + live.prompt_tokens


class LiveScaling:
    """All pools whose replicas the gateway starts. Satisfies `control.effects.ScalingEffects` and `ActuatorHost`."""

    def __init__(
        self,
        host: FleetHost,
        fleet: LiveFleet,
        policies: Policies,
        seed: int,
        hold_s: float,
        gpu_limits: GpuLimits,
        planned_gpus: int | None,
        news: Callable[[], Sequence[str]],
    ) -> None:
        """`planned_gpus` GPUs of this machine are shared by the models of the cascade. `news`: see
        ScalingWithFailures."""
        self._host, self._fleet, self._policies = host, fleet, policies
        self._seed, self._hold_s, self._gpu_limits, self._news = seed, hold_s, gpu_limits, news
        self._pools = fleet.pools
        self._deployments: dict[str, Pool | Combo] = {s.deployment.name: s.deployment for s in self._pools.values()}
        self._combos = combos_of(list(self._pools.values()))
        self._ports: dict[tuple[int, int], Ports] = {}
        self._gpus = None if planned_gpus is None else Gpus(planned_gpus)
        self._actuators = {name: self._actuator(s) for name, s in self._pools.items() if s.start is not None}
        self._scaling: Scaling | None = None
        self._states: dict[str, PoolState] = {}
        self._num_initial_left = {name: served.num_initial for name, served in self._pools.items()}
        """By pool, how many of the next replicas belong to the initial fleet."""
        self._readiness = ComboReadiness(host, fleet, self._combos, self._states)
        self._unawaited: set[int] = set()
        """Starting replicas that are counted as failed."""
        self._start_took_s: dict[str, float] = {}
        """By model, the time that the last replica took to start."""
        fleet.on_removed.append(self._replica_removed)

    def _actuator(self, served: ServedPool) -> Actuator:
        pool = replace(served.pool, replicas=served.num_initial)
        if isinstance(served.start, Processes):
            spec = served.start
            ports = self._ports.setdefault(spec.ports, Ports(*spec.ports))  # shared by pools of a model's shapes
            return LocalProcesses(pool, spec, self, ports, self._gpus_of(served))
        assert isinstance(served.start, Kubernetes)
        from headway.gateway.fleet.kubernetes import Pods

        return Pods(pool, served.start, self)

    def _gpus_of(self, served: ServedPool) -> Gpus | None:
        cascade = self._policies.cascade
        is_planned = cascade is not None and served.pool.model.name in cascade.models
        return self._gpus if is_planned else None

    def configure(self, services: dict[str, Service]) -> Scaling | None:
        """Create control's scaling over these services. None if the fleet file has no scaler."""
        for served in self._pools.values():
            pool = served.pool
            cached_tokens = served.kv_blocks * pool.engine.block_size_tokens + 1
            services[pool.model.name].announce(min(cached_tokens, pool.model.max_context_tokens))
        if self._policies.scaler is None:
            return None
        self._states |= {name: PoolState(deployment, services) for name, deployment in self._deployments.items()}
        holding_gpus = frozenset(
            served.deployment.name for served in self._pools.values()
            if served.combo is not None or isinstance(served.start, Kubernetes)
        )  # fmt: skip
        self._scaling = ScalingWithFailures(
            self._policies.scaler(), MutablePoolsView(Random(f"{self._seed}/scaler")), list(self._states.values()),
            self, self._gpu_limits, self._give_up, holding_gpus, self._news,
        )  # fmt: skip
        return self._scaling

    def start(self) -> None:
        for combo in self._combos:
            self.expect(combo.name, combo.replicas)
        for actuator in self._actuators.values():
            actuator.start_initial()

    async def stop(self) -> None:
        """Stop all processes. Pods stay as they are."""
        for actuator in self._actuators.values():
            await actuator.close()

    # Control's effects.

    def start_replica(self, deployment: str, now: float) -> None:
        """Start one more replica of a pool, or one more instance of a combo."""
        for pool in unit_of(self._deployments[deployment]):
            self._actuators[pool.name].add()

    def _give_up(self, state: PoolState) -> None:
        """Give up a failed unit, and remove what exists of it."""
        parts = unit_of(self._deployments[state.name])
        is_combo = parts[0].name not in self._states
        members = self._readiness.give_up(state.name) if is_combo else []
        for member in members:
            self._remove(member, at_once=True)
        for part in parts:
            num = part.replicas if is_combo else 1
            self._actuators[part.name].cancel(num - sum(member.pool == part.name for member in members))
        if is_combo:
            self._readiness.recount(state.name, num_given_up=1)

    def drain(self, replica: int, on: bool) -> None:
        """Start or stop draining a replica."""
        self._host.driver.drain(self._fleet.replicas[replica], on)

    def stop_replica(self, replica: int, now: float) -> None:
        """Remove a replica that is empty. One that ended while it drained is removed already."""
        stopped = self._fleet.replicas[replica]
        self._remove(stopped, at_once=False)
        if not any(member.is_up for member in self._host.driver.services[stopped.model].members):
            log.warning("%s: its last replica stops before another one is up: requests wait, each for up to %g s",
                        stopped.model, self._hold_s)  # fmt: skip

    def expected_s(self, model: str) -> int:
        """Estimate when another replica of a model is up, by the last start; 1 if none is known."""
        if model not in self._start_took_s:
            return 1
        now, fleet = self._host.driver.now, self._fleet
        starts_s = [fleet.lifetimes[id].start_s for id in fleet.starting if fleet.replicas[id].model == model]
        return max(ceil(self._start_took_s[model] - (now - min(starts_s, default=now))), 1)

    def _remove(self, replica: LiveReplica, at_once: bool) -> None:
        if replica in self._fleet.present():
            self._fleet.remove(replica, at_once)

    # Events of replicas.

    def replica_up(self, replica: LiveReplica) -> None:
        """A replica was found healthy, for the first time or again."""
        driver = self._host.driver
        if replica.id not in self._fleet.starting:
            if not self._readiness.waits(replica):
                driver.replica_up(replica)
            return
        self._fleet.starting.discard(replica.id)
        lifetime = self._fleet.lifetimes[replica.id]
        lifetime.down = ((lifetime.start_s, driver.now),)
        self._start_took_s[replica.model] = driver.now - lifetime.start_s
        self._actuators[replica.pool].replica_up(replica)
        self._await_again(replica)
        if self._scaling is None:
            driver.replica_up(replica)
        elif replica.is_of_combo:
            self._readiness.replica_up(replica)
            self._recount(replica.pool)
        else:
            member = driver.services[replica.model].member(replica.id)
            assert member is not None
            member.is_up = True
            driver.control.on_unit_started(replica.pool, [member], driver.now)

    def _replica_removed(self, replica: LiveReplica) -> None:
        state = self._states.get(replica.deployment)
        if replica.id in self._fleet.starting:
            self._fleet.starting.discard(replica.id)
            self._await_again(replica)
            if state is not None and not replica.is_of_combo:
                state.num_starting -= 1
        if state is not None:
            _remove_member(state, replica)
            if replica.is_of_combo:
                self._readiness.replica_removed(replica)
                self._recount(replica.pool)
        if replica.pool in self._actuators:
            self._actuators[replica.pool].stop(replica)

    # Events that actuators report.

    def replica_created(self, pool: str, url: str, is_awaited: bool = True) -> LiveReplica:
        fleet = self._fleet
        replica = fleet.create(fleet.pools[pool], url)
        lifetime = fleet.lifetimes[replica.id]
        lifetime.down = ((lifetime.start_s, inf),)
        if self._num_initial_left[pool] > 0:
            self._num_initial_left[pool] -= 1
        else:
            lifetime.origin = "new"
        fleet.starting.add(replica.id)
        if not is_awaited:
            self._unawaited.add(replica.id)
        fleet.connect(replica)
        return replica

    def replica_lost(self, replica: LiveReplica) -> bool:
        """Its requests continue elsewhere if they can. It is replaced unless it drained."""
        was_up, is_awaited = replica.id not in self._fleet.starting, replica.id not in self._unawaited
        self._fleet.starting.discard(replica.id)
        self._unawaited.discard(replica.id)
        state, is_replaced = self._states.get(replica.deployment), not replica.is_draining
        if replica.is_of_combo:
            self._readiness.replica_lost(replica, is_replaced)
        elif state is not None:
            if was_up:
                _remove_member(state, replica)
            if is_awaited:
                state.num_starting += is_replaced - (not was_up)
        self._remove(replica, at_once=True)
        self._recount(replica.pool)
        return is_replaced

    def start_failed(self, pool: str, why: str) -> None:
        self._fleet.num_failed[pool] += 1
        self._fleet.last_failures[pool] = why
        if (state := self._states.get(pool)) is not None:
            state.num_failed += 1
            state.num_starting -= 1
        self._recount(pool)

    def start_recovered(self, pool: str) -> None:
        self._fleet.num_failed[pool] -= 1
        if (state := self._states.get(pool)) is not None:
            state.num_failed -= 1
        self._recount(pool)

    def _recount(self, pool: str) -> None:
        """Recount the instances of the combo that the pool is a part of."""
        self._readiness.recount(self._pools[pool].deployment.name)

    def _await_again(self, replica: LiveReplica) -> None:
        """Count a replica that had failed as starting, before it is counted as up or removed."""
        if replica.id in self._unawaited:
            self._unawaited.discard(replica.id)
            if (state := self._states.get(replica.pool)) is not None:
                state.num_starting += 1

    def wants_failed(self, pool: str) -> bool:
        state = self._states.get(pool)
        return state is None or state.wanted > state.num_serving + state.num_starting

    def has_room(self, pool: str) -> bool:
        state = self._states.get(pool)
        return state is None or self._scaling is None or self._scaling.has_room(state)

    def pods_requested(self, pool: str, num: int) -> None:
        self._readiness.pods_requested(pool, num)

    def expect(self, pool: str, num: int) -> None:
        """So many replicas of a pool are requested and not up; of a part of a combo, its instances are recounted."""
        if pool in self._states:
            self._states[pool].num_starting = max(num - self._states[pool].num_failed, 0)
        elif (served := self._pools.get(pool)) is not None and served.combo is not None:
            self._readiness.expect(served.combo)

    def retire(self, replica: LiveReplica) -> None:
        """Drain a replica, then have it stopped."""
        if replica.pool in self._states:
            _remove_member(self._states[replica.pool], replica)
        elif replica.is_of_combo:
            self._fleet.combos.leave(replica)  # its place is free for another one while its requests end
        self._remove(replica, at_once=False)


def _remove_member(state: PoolState, replica: LiveReplica) -> None:
    state.members = [member for member in state.members if member.view is not replica]
