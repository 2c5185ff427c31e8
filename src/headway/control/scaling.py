"""How many replicas there are: what a scaler asks for, rolled out by starting, draining and stopping."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

from headway.control.live import Live
from headway.control.observe import FleetOfPools
from headway.control.service import Member, Service
from headway.core.errors import HeadwayError, unknown
from headway.core.fleet import Combo, Pool, unit_of
from headway.core.policy import Scaler
from headway.core.view import PoolView, ReplicaView


class Effects(Protocol):
    """What a driver does when scaling says so."""

    def start_replica(self, deployment: str, now: float) -> None:
        """Acquire one more of a pool or combo; the driver answers with `Control.started` once all of it is up."""

    def drain(self, replica: int, on: bool) -> None:
        """Show it as draining, or no longer so."""

    def stop_replica(self, replica: int, now: float) -> None:
        """Give it back; it is empty."""


Unit = list[Member]
"""What comes and goes as one: a replica, or the replicas of a combo."""


class PoolState:
    """One pool or kind of combo, as control knows it. Satisfies `core.view.PoolView`."""

    def __init__(self, deployment: Pool | Combo, services: Mapping[str, Service]) -> None:
        unit = unit_of(deployment)
        pool = unit[0]
        self.name, self.model, self.gpu, self.region = deployment.name, pool.model.name, pool.gpu.name, pool.region
        self.usd_per_hour = sum(each.usd_per_hour for each in unit)
        self.gpus: Counter[str] = Counter()
        for each in unit:
            self.gpus[each.gpu.name] += each.parallel.num_gpus
        self.min_replicas = deployment.min_replicas
        self.max_replicas = sys.maxsize if deployment.max_replicas is None else deployment.max_replicas
        self.goodput_rps = deployment.goodput_rps if isinstance(deployment, Combo) else None
        self.service = services[pool.model.name]
        self.members = [member for member in self.service.members if member.deployment == self.name]
        """Those that have not been given back, up or not."""
        self.num_starting = 0
        self.num_failed = 0
        self.wanted = deployment.replicas
        """What the scaler said last."""

    def units(self) -> list[Unit]:
        """Those of which something is up."""
        found: dict[int, Unit] = {}
        for member in self.members:
            if member.is_up:
                found.setdefault(member.view.combo, []).append(member)
        return list(found.values())

    @property
    def num_held(self) -> int:
        """Those that have GPUs, crashed ones too: they may come back, and are paid for."""
        return len({member.view.combo for member in self.members}) + self.num_starting

    @property
    def num_down(self) -> int:
        """Those of which nothing is up, and that have not been given back."""
        return self.num_held - self.num_starting - len(self.units())

    @property
    def num_serving(self) -> int:
        """Those that do not drain."""
        return sum(not unit[0].is_draining for unit in self.units())

    @property
    def num_queued(self) -> int:
        """Those that wait in front, for any of the model's pools."""
        return len(self.service.held())

    @property
    def replicas(self) -> Sequence[ReplicaView]:
        """What a scaler sees of them."""
        return [member.view for unit in self.units() for member in unit]


class Scaling:
    """One scaler over all pools and combos."""

    def __init__(
        self,
        scaler: Scaler,
        view: FleetOfPools,
        pools: Sequence[PoolState],
        effects: Effects,
        gpu_limits: Sequence[tuple[str, str, int]] = (),
    ) -> None:
        self.scaler = scaler
        self.interval_s = scaler.interval_s
        self._view = view
        self._effects = effects
        self._limits = {(region, gpu): count for region, gpu, count in gpu_limits}
        self._pools = {pool.name: pool for pool in pools}
        self._draining: list[tuple[Service, Unit]] = []
        seen: list[PoolView] = list(pools)
        self._view.pools = seen

    def arrived(self, live: Live, model: str) -> None:
        """Count a request for this model, by whichever of its names it asks."""
        key = model, live.region, live.tier
        num, tokens = self._view.arrived.get(key, (0, 0))
        self._view.arrived[key] = num + 1, tokens + live.prompt_tokens

    def tick(self, now: float) -> None:
        """Ask how many there should be, and see to it."""
        self._view.now = now
        name = f"scaler {type(self.scaler).__name__}"
        # What is added stands before what is given back.
        wishes = []
        for pool_name, wanted in self.scaler.scale(self._view).items():
            if pool_name not in self._pools:
                raise unknown("pool", str(pool_name), self._pools, name)
            pool = self._pools[pool_name]
            if not pool.min_replicas <= wanted <= pool.max_replicas:
                limits = f"{pool.min_replicas} to {pool.max_replicas}"
                raise HeadwayError(f"{name} wants {wanted} of {pool_name}; expected {limits}")
            pool.wanted = wanted
            wishes.append((pool, wanted - pool.num_serving - pool.num_starting))
        for pool, more in wishes:
            if more > 0:
                self._add(pool, more, now)
        for pool, more in wishes:
            if more < 0:
                self._remove(pool, -more)
        self.stop_empty(now)

    def _add(self, pool: PoolState, more: int, now: float) -> None:
        draining = sorted((unit for unit in pool.units() if unit[0].is_draining), key=_load, reverse=True)
        for unit in draining[:more]:
            self._drain(pool, unit, False)
        for _ in range(more - len(draining)):
            if not self.has_room(pool):
                return
            pool.num_starting += 1
            self._effects.start_replica(pool.name, now)

    def has_room(self, pool: PoolState) -> bool:
        """Whether the region has the GPUs for one more; what starts, drains or is down has its own still."""
        for gpu, count in pool.gpus.items():
            limit = self._limits.get((pool.region, gpu))
            if limit is not None and self._num_gpus(pool.region, gpu) + count > limit:
                return False
        return True

    def _num_gpus(self, region: str, gpu: str) -> int:
        here = [pool for pool in self._pools.values() if pool.region == region]
        return sum(pool.gpus.get(gpu, 0) * pool.num_held for pool in here)

    def _remove(self, pool: PoolState, fewer: int) -> None:
        """What is starting cannot be called off; what is up can, but for one while others start."""
        serving = sorted((unit for unit in pool.units() if not unit[0].is_draining), key=_load)
        for unit in serving[: min(fewer, len(serving) - bool(pool.num_starting))]:
            self._drain(pool, unit, True)

    def _drain(self, pool: PoolState, unit: Unit, on: bool) -> None:
        for member in unit:  # before anything is moved out, so that it does not go to another one of them
            member.is_draining = on
        for member in unit:
            self._effects.drain(member.view.id, on)
        if on:
            self._draining.append((pool.service, unit))
        else:
            self._draining = [entry for entry in self._draining if entry[1][0] is not unit[0]]
        pool.service.refresh()

    def stop_empty(self, now: float) -> None:
        """Give back what drains and is empty, all of a combo together."""
        for service, unit in self._draining[:]:
            if any(member.view.num_in_flight or member.view.num_arriving for member in unit):
                continue
            self._draining.remove((service, unit))
            for member in unit:
                # One that has crashed is given back, too, and does not recover.
                member.is_up, member.is_gone = False, True
                self._effects.stop_replica(member.view.id, now)
            pool = self._pools[unit[0].deployment]
            pool.members = [member for member in pool.members if not member.is_gone]
            service.refresh()

    def started(self, name: str, members: Sequence[Member]) -> Service:
        """One more is up; it may have been the service's before. Returns the service that it is for."""
        pool = self._pools[name]
        pool.num_starting -= 1
        pool.service.members.extend(member for member in members if member not in pool.service.members)
        pool.members.extend(members)
        pool.service.refresh()
        return pool.service


def _load(unit: Unit) -> tuple[int, int]:
    return sum(member.view.num_in_flight for member in unit), -unit[0].view.id
