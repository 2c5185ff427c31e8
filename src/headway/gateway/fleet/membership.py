"""Replicas that come and go while the gateway runs: added, drained, and taken away."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from headway.core.errors import unknown
from headway.core.fleet import Role, RoleChange
from headway.core.policy import Ordering
from headway.gateway.errors import ApiError
from headway.gateway.fleet.replica import LiveReplica

if TYPE_CHECKING:
    from headway.gateway.gateway import Gateway

Status = Literal["up", "starting", "down", "draining", "leaving"]


class LiveFleet:
    """All replicas, for who runs the gateway."""

    def __init__(self, gateway: Gateway, ordering: Ordering) -> None:
        self._gateway, self._ordering = gateway, ordering
        self._leaving: set[int] = set()
        """Taken away, but not empty."""
        self._gone: set[int] = set()

    def present(self) -> list[LiveReplica]:
        """All but those that have gone."""
        return [replica for replica in self._gateway.replicas if replica.id not in self._gone]

    def status(self, replica: LiveReplica) -> Status:
        if replica.id in self._leaving:
            return "leaving"
        if replica.is_draining:
            return "draining"
        if self._gateway.health.is_up(replica):
            return "up"
        return "starting" if self._gateway.scaling.is_starting(replica) else "down"

    def failed(self) -> list[tuple[str, int, str]]:
        """Pools with wanted replicas that fail to start: the pool, how many replicas, and the last start's error."""
        scaling = self._gateway.scaling
        return [(pool, num, scaling.why_of[pool]) for pool, num in scaling.failed_of.items() if num]

    def find(self, id: int) -> LiveReplica:
        """ApiError where there is none."""
        found = next((replica for replica in self.present() if replica.id == id), None)
        if found is None:
            raise ApiError(404, f"there is no worker {id}", "not_found", "id")
        return found

    def add(self, pool: str, url: str) -> LiveReplica:
        """One more replica of a pool. It is given requests when it has been seen to be well."""
        gateway = self._gateway
        pools = {served.pool.name: served for served in gateway.plan.pools}
        if pool not in pools:
            raise ApiError(400, str(unknown("pool", pool, pools)), "invalid_value", "pool")
        if any(replica.url == url for replica in self.present()):
            raise ApiError(409, f"{url} is a worker already", "duplicate", "url")
        replica = gateway.new_replica(pools[pool], url, self._ordering)
        gateway.driver.add(replica)
        gateway.health.add(replica)
        return replica

    def drain(self, replica: LiveReplica, on: bool) -> None:
        """Give it nothing more, as long as there are others, and move out what can be moved; or use it again."""
        if replica.id in self._leaving:
            raise ApiError(409, f"{replica.name} is being taken away", "conflict")
        self._gateway.driver.drain(replica, on)

    def switch(self, replica: LiveReplica, role: Role) -> None:
        """It is for something else from now on, or for both phases again; what it has begun, it ends."""
        if replica.is_single_phase:
            raise ApiError(409, f"{replica.name} was started for {replica.role}, and cannot do the other", "conflict")
        if not replica.is_of_combo or not replica.adapter.transfers_kv:
            raise ApiError(409, f"{replica.name} is of no combo whose engines hand KV caches over", "conflict")
        self._gateway.driver.control.change_role(replica.id, role, self._gateway.driver.now, is_ready=True)

    def expect(self, changes: Iterable[RoleChange]) -> None:
        """Let roles change at their times."""
        for change in changes:
            self._gateway.clock.at(change.at_s, self._change, change)

    def _change(self, now: float, change: RoleChange) -> None:
        control, clock = self._gateway.driver.control, self._gateway.clock
        if change.switch_s:
            clock.at(
                now + change.switch_s, lambda now, replica: control.on_role_changed(replica, clock.now), change.replica
            )
        control.change_role(change.replica, change.role, clock.now, is_ready=not change.switch_s)

    def remove(self, replica: LiveReplica, at_once: bool) -> None:
        """Take it away, when it is empty; `at_once`: what it streams goes on elsewhere, if it can."""
        driver = self._gateway.driver
        if replica.id not in self._leaving:
            self._leaving.add(replica.id)
            self._gateway.health.remove(replica)
            driver.drain(replica, True)
        if at_once:
            driver.fail_over(replica)
        self.ended()

    def ended(self) -> None:
        """A request has: whoever was to leave and is empty is gone."""
        if not self._leaving:
            return
        for id in [id for id in self._leaving if not self._gateway.replicas[id].num_in_flight]:
            if id not in self._leaving:
                continue  # what came of another one that went has seen to it
            self._leaving.discard(id)
            self._gone.add(id)
            self._gateway.driver.remove(self._gateway.replicas[id])
            self._gateway.replicas[id].client.close()
            self._gateway.units.leave(self._gateway.replicas[id])
            self._gateway.terms[id].end_s = self._gateway.clock.now
            self._gateway.scaling.gone(self._gateway.replicas[id])
            for told in self._gateway.on_gone:
                told(self._gateway.replicas[id])
