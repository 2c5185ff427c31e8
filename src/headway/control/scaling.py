"""How many replicas there are: what a scaler asks for, rolled out by starting, draining and stopping."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from headway.control.service import Member, Service
from headway.core.errors import HeadwayError, unknown
from headway.core.policy import Scaler
from headway.core.view import PoolView, ReplicaView
from headway.observe import FleetOfPools


class Effects(Protocol):
    """What a driver does when scaling says so."""

    def start_replica(self, pool: str, now: float) -> None:
        """Acquire one more; the driver answers with `Control.started` once it is up."""

    def drain(self, replica: int, on: bool) -> None:
        """Show it as draining, or no longer so."""

    def stop_replica(self, replica: int, now: float) -> None:
        """Give it back; it is empty."""


class PoolState:
    """One pool, as control knows it. Satisfies `core.view.PoolView`."""

    def __init__(self, name: str, model: str, gpu: str, region: str, limits: tuple[int, int], service: Service) -> None:
        self.name, self.model, self.gpu, self.region = name, model, gpu, region
        self.min_replicas, self.max_replicas = limits
        self.service = service
        self.num_starting = 0

    @property
    def members(self) -> list[Member]:
        """Those that are up."""
        return [m for m in self.service.members if m.is_up and m.view.pool == self.name]

    @property
    def replicas(self) -> Sequence[ReplicaView]:
        """What a scaler sees of them."""
        return [member.view for member in self.members]


class Scaling:
    """One scaler over all pools."""

    def __init__(self, scaler: Scaler, view: FleetOfPools, pools: Sequence[PoolState], effects: Effects) -> None:
        self.scaler = scaler
        self.interval_s = scaler.interval_s
        self._view = view
        self._effects = effects
        self._pools = {pool.name: pool for pool in pools}
        self._draining: dict[int, tuple[Service, Member]] = {}
        seen: list[PoolView] = list(pools)
        self._view.pools = seen

    def tick(self, now: float) -> None:
        """Ask how many replicas there should be, and see to it."""
        self._view.now = now
        for name, wanted in self.scaler.scale(self._view).items():
            if name not in self._pools:
                raise unknown("pool", str(name), self._pools, f"scaler {type(self.scaler).__name__}")
            pool = self._pools[name]
            if not pool.min_replicas <= wanted <= pool.max_replicas:
                limits = f"{pool.min_replicas} to {pool.max_replicas}"
                raise HeadwayError(
                    f"scaler {type(self.scaler).__name__} wants {wanted} replicas of {name}; expected {limits}"
                )
            self._roll_out(pool, wanted, now)

    def _roll_out(self, pool: PoolState, wanted: int, now: float) -> None:
        members = pool.members
        serving = [member for member in members if not member.is_draining]
        more = wanted - len(serving) - pool.num_starting
        if more > 0:
            draining = sorted((m for m in members if m.is_draining), key=_most_in_flight)
            for member in draining[:more]:
                self._drain(pool, member, False)
            for _ in range(more - len(draining)):
                pool.num_starting += 1
                self._effects.start_replica(pool.name, now)
        elif more < 0:
            # What is starting cannot be called off; what is up can.
            for member in sorted(serving, key=_fewest_in_flight)[: min(-more, len(serving) - 1)]:
                self._drain(pool, member, True)
            self.stop_empty(now)

    def _drain(self, pool: PoolState, member: Member, on: bool) -> None:
        member.is_draining = on
        if on:
            self._draining[member.view.id] = pool.service, member
        else:
            del self._draining[member.view.id]
        self._effects.drain(member.view.id, on)
        pool.service.refresh()

    def stop_empty(self, now: float) -> None:
        """Give back what drains and is empty."""
        for replica, (service, member) in list(self._draining.items()):
            if member.is_up and not member.view.num_in_flight and not member.view.num_arriving:
                del self._draining[replica]
                member.is_up = False
                service.refresh()
                self._effects.stop_replica(replica, now)

    def started(self, pool_name: str, member: Member) -> Service:
        """A replica is up. Returns the service that it is for."""
        pool = self._pools[pool_name]
        pool.num_starting -= 1
        pool.service.members.append(member)
        pool.service.refresh()
        return pool.service


def _fewest_in_flight(member: Member) -> tuple[int, int]:
    return member.view.num_in_flight, -member.view.id


def _most_in_flight(member: Member) -> tuple[int, int]:
    return -member.view.num_in_flight, member.view.id
