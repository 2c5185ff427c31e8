"""Rolls out the fleet that a scaler asks for: starts, drains and stops replicas."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from math import inf
from numbers import Integral

from headway.control.effects import ScalingEffects
from headway.control.live import Live
from headway.control.observe import MutablePoolsView
from headway.control.policies import Least
from headway.control.service import Member, Service
from headway.core.errors import HeadwayError, unknown, unusable
from headway.core.fleet import Combo, Pool, unit_of
from headway.core.policy import Scaler
from headway.core.view import PoolView, ReplicaView

Unit = list[Member]
"""Replicas that start and stop together: a single replica, or the replicas of one combo."""


class PoolState:
    """The state of one pool, or of all combos of one name. Implements `core.view.PoolView`."""

    def __init__(self, deployment: Pool | Combo, services: Mapping[str, Service]) -> None:
        parts = unit_of(deployment)
        first = parts[0]
        self.name, self.model, self.gpu, self.region = deployment.name, first.model.name, first.gpu.name, first.region
        self.usd_per_hour = sum(part.usd_per_hour for part in parts)
        self.gpus: Counter[str] = Counter()
        for part in parts:
            self.gpus[part.gpu.name] += part.parallel.num_gpus
        self.min_replicas = deployment.min_replicas
        self.max_replicas = sys.maxsize if deployment.max_replicas is None else deployment.max_replicas
        self.goodput_rps = deployment.goodput_rps if isinstance(deployment, Combo) else None
        self.service = services[first.model.name]
        self.members = [member for member in self.service.members if member.deployment == self.name]
        """Members not released yet, up or down."""
        self.num_starting = 0
        self.num_failed = 0
        self.num_queued_at_peers = 0
        """Requests in the model's hold queues at other gateways."""
        self.wanted = deployment.replicas
        """Number of units that the scaler last asked for."""

    def units(self) -> list[Unit]:
        """Units with at least one replica that is up."""
        units: dict[int, Unit] = {}
        for member in self.members:
            if member.is_up:
                units.setdefault(member.view.combo, []).append(member)
        return list(units.values())

    @property
    def num_held(self) -> int:
        """Units that occupy GPUs. Crashed units count: they may recover, and they cost money."""
        return len({member.view.combo for member in self.members}) + self.num_starting

    @property
    def num_down(self) -> int:
        """Number of units that are not released and have no replica that is up."""
        return self.num_held - self.num_starting - len(self.units())

    @property
    def num_serving(self) -> int:
        """Number of units that are up and not draining."""
        return sum(not unit[0].is_draining for unit in self.units())

    @property
    def num_queued(self) -> int:
        """Requests in the model's hold queue, which all its pools share."""
        return len(self.service.hold_queue.requests()) + self.num_queued_at_peers

    @property
    def replicas(self) -> Sequence[ReplicaView]:
        """Views of the replicas that are up."""
        return [member.view for unit in self.units() for member in unit]


class Scaling:
    """One scaler over all pools and combos."""

    def __init__(
        self,
        scaler: Scaler,
        view: MutablePoolsView,
        pools: Sequence[PoolState],
        effects: ScalingEffects,
        gpu_limits: Sequence[tuple[str, str, int]] = (),
        least: Mapping[str, Least] | None = None,
        began_s: float = 0.0,
    ) -> None:
        """`least`: pools whose `min_replicas` changes with the time of day; `began_s`: epoch time of time 0."""
        self.scaler = scaler
        self.interval_s = scaler.interval_s
        self._view = view
        self._effects = effects
        self._limits = {(region, gpu): count for region, gpu, count in gpu_limits}
        self._pools = {pool.name: pool for pool in pools}
        self._least = {name: each for name, each in (least or {}).items() if name in self._pools}
        self._began_s = began_s
        self._least_holds = dict.fromkeys(self._least, (inf, inf))
        """Maps each pool to (start, end) of its current minimum, in seconds since the epoch."""
        self._draining: list[tuple[Service, Unit]] = []
        views: list[PoolView] = list(pools)
        self._view.pools = views

    def use(self, scaler: Scaler) -> None:
        """Use another scaler from the next call on."""
        self.scaler, self.interval_s = scaler, scaler.interval_s

    def count_arrival(self, live: Live, model: str) -> None:
        """Count an arriving request as demand for `model`, the canonical name."""
        key = model, live.region, live.tier
        num, tokens = self._view.arrived.get(key, (0, 0))
        self._view.arrived[key] = num + 1, tokens + live.prompt_tokens

    def tick(self, now: float) -> None:
        """Ask the scaler for the target fleet and roll it out: start units, then drain, then stop."""
        self._view.now = now
        self._follow_schedules(now)
        changes = self._changes()
        for pool, change in changes:
            if change > 0:
                self._start_units(pool, change, now)
        for pool, change in changes:
            if change < 0:
                self._drain_units(pool, -change)
        self.stop_empty(now)

    def _follow_schedules(self, now: float) -> None:
        """Update the pool minimums that change with the time of day."""
        wall_s = self._began_s + now
        for name, least in self._least.items():
            from_s, until_s = self._least_holds[name]
            if not from_s <= wall_s < until_s:
                number, until_s = least.at(wall_s)
                self._pools[name].min_replicas = number
                self._least_holds[name] = wall_s, until_s

    def _changes(self) -> list[tuple[PoolState, int]]:
        """Units to add (or remove, if negative) by pool. Raises HeadwayError for an invalid target."""
        name = f"scaler {type(self.scaler).__name__}"
        changes = []
        returned: object = self.scaler.scale(self._view)
        if not isinstance(returned, Mapping) or not all(isinstance(each, Integral) for each in returned.values()):
            raise unusable(self.scaler, "scale", returned, "a whole number of replicas by pool, as in {'fast': 2}")
        asked = dict(returned)
        for pool_name in self._least:  # a scaler may have old bounds of a pool, or omit the pool
            pool = self._pools[pool_name]
            wanted = asked.get(pool_name, pool.num_serving + pool.num_starting)
            if wanted < pool.min_replicas:
                asked[pool_name] = pool.min_replicas
        for pool_name, wanted in asked.items():
            if pool_name not in self._pools:
                raise unknown("pool", str(pool_name), self._pools, name)
            pool = self._pools[pool_name]
            if not pool.min_replicas <= wanted <= pool.max_replicas:
                limits = f"{pool.min_replicas} to {pool.max_replicas}"
                raise HeadwayError(f"{name} wants {wanted} of {pool_name}; expected {limits}")
            pool.wanted = wanted
            changes.append((pool, wanted - pool.num_serving - pool.num_starting))
        return changes

    def _start_units(self, pool: PoolState, num: int, now: float) -> None:
        """Start units. Draining units return to service first, fullest first; then new units start while there are
        GPUs."""
        draining = sorted((unit for unit in pool.units() if unit[0].is_draining), key=_load, reverse=True)
        for unit in draining[:num]:
            self._drain(pool, unit, False)
        for _ in range(num - len(draining)):
            if not self.has_room(pool):
                return
            pool.num_starting += 1
            self._effects.start_replica(pool.name, now)

    def has_room(self, pool: PoolState) -> bool:
        """Whether the region has GPUs for one more unit. Units that start, drain or are down keep their GPUs."""
        for gpu, count in pool.gpus.items():
            limit = self._limits.get((pool.region, gpu))
            if limit is not None and self._num_gpus(pool.region, gpu) + count > limit:
                return False
        return True

    def _num_gpus(self, region: str, gpu: str) -> int:
        local = [pool for pool in self._pools.values() if pool.region == region]
        return sum(pool.gpus.get(gpu, 0) * pool.num_held for pool in local)

    def _drain_units(self, pool: PoolState, num: int) -> None:
        """Drain the least loaded units. A starting unit cannot be stopped, and one unit stays up while others start."""
        serving = sorted((unit for unit in pool.units() if not unit[0].is_draining), key=_load)
        for unit in serving[: min(num, len(serving) - bool(pool.num_starting))]:
            self._drain(pool, unit, True)

    def _drain(self, pool: PoolState, unit: Unit, on: bool) -> None:
        for member in unit:  # drain the whole unit first, so that no request moves between its members
            member.is_draining = on
        for member in unit:
            self._effects.drain(member.view.id, on)
        if on:
            self._draining.append((pool.service, unit))
        else:
            self._draining = [entry for entry in self._draining if entry[1][0] is not unit[0]]
        pool.service.refresh()

    def stop_empty(self, now: float) -> None:
        """Release the drained units without requests."""
        for service, unit in self._draining[:]:
            if any(member.view.num_in_flight or member.view.num_arriving for member in unit):
                continue
            self._draining.remove((service, unit))
            for member in unit:
                # A crashed replica is released too, and does not recover.
                member.is_up, member.is_gone = False, True
                self._effects.stop_replica(member.view.id, now)
            pool = self._pools[unit[0].deployment]
            pool.members = [member for member in pool.members if not member.is_gone]
            service.refresh()

    def on_started(self, name: str, members: Sequence[Member]) -> Service:
        """A unit of this pool or combo is up; its members may already be in the service. Returns the service."""
        pool = self._pools[name]
        pool.num_starting -= 1
        pool.service.members.extend(member for member in members if member not in pool.service.members)
        pool.members.extend(members)
        pool.service.refresh()
        return pool.service


def _load(unit: Unit) -> tuple[int, int]:
    return sum(member.view.num_in_flight for member in unit), -unit[0].view.id
