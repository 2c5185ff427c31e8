"""Adds, drains and removes the gateway's replicas while it runs."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, Protocol

from msgspec.structs import replace

from headway.catalog.coefficients import Coefficients, corrected
from headway.core.errors import unknown
from headway.core.fleet import Pool, Role, RoleChange
from headway.core.policy import Ordering
from headway.core.record import ReplicaRecord
from headway.gateway.clock import Clock
from headway.gateway.errors import ApiError
from headway.gateway.fleet.combos import ComboInstances, in_order
from headway.gateway.fleet.specs import ServedPool, ServingPlan
from headway.gateway.scheduling.driver import Driver
from headway.gateway.scheduling.replica import LiveReplica, Slots
from headway.gateway.upstream.dialects import ADAPTERS
from headway.gateway.upstream.health import HealthMonitor
from headway.limits.budgets import TokenPrices
from headway.perf.engine_times import pool_times

MAX_FAILED_STARTS = 16
"""Number of failed starts whose ids are not reused yet. Attempts at a start never end, so ids are reused; the logs of
the last starts stay unambiguous."""
Status = Literal["up", "starting", "down", "ejected", "draining", "unready", "leaving"]


class FleetHost(Protocol):
    """The parts of the gateway that the fleet uses. They are created after the first replicas."""

    @property
    def driver(self) -> Driver: ...
    @property
    def health(self) -> HealthMonitor[LiveReplica]: ...


class LiveFleet:
    """All current and past replicas of the gateway. A replica's id is its index in `replicas`."""

    def __init__(self, host: FleetHost, plan: ServingPlan, clock: Clock) -> None:
        self._host, self._plan, self._clock = host, plan, clock
        self._ordering = plan.policies.ordering()
        self.pools = {served.pool.name: served for served in plan.pools}
        self.replicas: list[LiveReplica] = []
        self._served: list[ServedPool] = []
        """Maps each replica to its pool at the time when the replica was created."""
        self.times = {served.pool.name: pool_times(served.pool, served.coefficients) for served in plan.pools}
        """Expected service times of replicas, by pool."""
        self.combos = ComboInstances()
        self.num_failed: Counter[str] = Counter()
        """Wanted replicas that fail to start, by pool."""
        self.last_failures: dict[str, str] = {}
        """Why the last start failed, by pool."""
        self.on_added: list[Callable[[LiveReplica, ServedPool], None]] = []
        """Called with each replica that is added after the start."""
        self.on_removed: list[Callable[[LiveReplica], None]] = []
        """Called with each replica that is removed."""
        self._unused_ids: deque[int] = deque()
        """Ids of replicas that failed to start, oldest first."""
        self.leaving: set[int] = set()
        """Replicas that are removed once they are empty."""
        for served, url in in_order(plan.pools):
            self.create(served, url)

    def step_times(self, pool: str) -> tuple[Pool | None, Coefficients | None]:
        """A pool with its step times; None if the pool is gone or its GPU is unknown."""
        served = self.pools.get(pool)
        return (None, None) if served is None else (served.pool, served.coefficients)

    def correct(self, id: int, prefill: float, decode: float) -> None:
        """Multiply a replica's expected times of prefill and decode by these factors of its pool's model."""
        replica, served = self.replicas[id], self._served[id]
        if served.coefficients is None or replica.times is None:
            return
        is_as_said = prefill == decode == 1.0
        times = self.times[replica.pool] if is_as_said else None
        replica.times = times or pool_times(served.pool, corrected(served.coefficients, prefill, decode))

    def create(self, served: ServedPool, url: str) -> LiveReplica:
        """Create a replica that neither the driver nor the health monitor knows."""
        is_bounded = len(self._unused_ids) > MAX_FAILED_STARTS
        id = self._unused_ids.popleft() if is_bounded else len(self.replicas)
        replica = LiveReplica(
            id=id,
            pool=served.pool,
            url=url,
            adapter=ADAPTERS[served.api],
            kv_blocks=served.kv_blocks,
            ordering=self._ordering,
            pacer=self._plan.pacer,
            clock=self._clock,
            stale_s=self._plan.settings.stale_s,
            api_key=served.api_key,
            engine_model=served.engine_model,
            engine_ordering=self._plan.engine_ordering,
        )
        replica.times = times if (times := self.times[served.pool.name]).is_known else None
        replica.latency_of = self._plan.network.latency_s
        replica.on_adapters = lambda: self._host.driver.roster.adapters_changed(replica)
        self.combos.join(replica, served)
        if served.slots is not None:
            replica.kv_folder, replica.slots = served.slots, Slots()
        self.replicas[id : id + 1] = [replica]
        self._served[id : id + 1] = [served]
        return replica

    def connect(self, replica: LiveReplica) -> None:
        """Register a new replica with the driver and the health monitor."""
        self._host.driver.roster.add(replica)
        self._host.health.add(replica)
        for callback in self.on_added:
            callback(replica, self._served[replica.id])

    def served(self, replica: LiveReplica) -> ServedPool:
        """The replica's pool at the time when the replica was created."""
        return self._served[replica.id]

    def present(self) -> list[LiveReplica]:
        return [replica for replica in self.replicas if not replica.is_removed]

    def records(self) -> list[ReplicaRecord]:
        """All replicas' rows, without failed starts. Replicas are charged throughout, because the gateway does not know
        the cost of an engine that is down."""
        now = self._clock.now
        kept = [replica for replica in self.replicas if not self._has_failed_to_start(replica)]
        return [replica.record(self._served[replica.id].pool, now) for replica in kept]

    def usd(self, hosted_tokens: Mapping[int, Sequence[int]]) -> dict[tuple[str, str], float]:
        """Dollars so far by pool and model; the sums only grow. A replica that the gateway started is charged from its
        start, once it has served. `hosted_tokens`: see `PrometheusMetrics`."""
        usd: dict[tuple[str, str], float] = defaultdict(float)
        now = self._clock.now
        for replica in self.replicas:
            pool = self._served[replica.id].pool
            if replica.has_served or self._served[replica.id].start is None:
                paid_s = min(replica.lifetime.end_s, now) - replica.lifetime.start_s
                usd[replica.pool, replica.model] += paid_s / 3600 * pool.usd_per_hour
            if (tokens := hosted_tokens.get(replica.id)) is not None:
                cached_usd = pool.usd_per_million_cached_tokens
                prices = (
                    pool.usd_per_million_input_tokens,
                    pool.usd_per_million_input_tokens if cached_usd is None else cached_usd,
                    pool.usd_per_million_output_tokens,
                )
                usd[replica.pool, replica.model] += (
                    sum(num * price for num, price in zip(tokens, prices, strict=True)) / 1e6
                )
        return usd

    def usd_per_hour(self) -> float:
        """Cost per hour of the current replicas."""
        return sum(self._served[replica.id].pool.usd_per_hour for replica in self.present())

    def _has_failed_to_start(self, replica: LiveReplica) -> bool:
        """Whether the gateway started the replica and it ended before it was up."""
        return replica.is_removed and not replica.has_served and self._served[replica.id].start is not None

    def status(self, replica: LiveReplica) -> Status:
        if replica.id in self.leaving:
            return "leaving"
        if replica.is_draining:
            return "draining"
        if replica.is_unready:
            return "unready"
        if self._host.health.is_up(replica):
            return "up"
        if self._host.health.is_ejected(replica):
            return "ejected"
        return "starting" if replica.is_starting else "down"

    def failed(self) -> list[tuple[str, int, str]]:
        """Pools with wanted replicas that fail to start: the pool, the number of replicas, and why the last start
        failed."""
        return [(pool, num, self.last_failures[pool]) for pool, num in self.num_failed.items() if num]

    def find(self, id: int) -> LiveReplica:
        """The replica with this id. Raises ApiError if it does not exist."""
        if not 0 <= id < len(self.replicas) or self.replicas[id].is_removed:
            raise ApiError(404, f"there is no worker {id}", "not_found", "id")
        return self.replicas[id]

    def add(self, pool: str, url: str) -> LiveReplica:
        """Add a replica to a pool. It gets requests once it is healthy."""
        if pool not in self.pools:
            raise ApiError(400, str(unknown("pool", pool, self.pools)), "invalid_value", "pool")
        if any(replica.url == url for replica in self.present()):
            raise ApiError(409, f"{url} is a worker already", "duplicate", "url")
        replica = self.create(self.pools[pool], url)
        self.connect(replica)
        return replica

    def reconfigure(self, plan: ServingPlan, ordering: Ordering) -> list[str]:
        """Apply another plan, in which only pools with endpoints may differ. Returns the changes.

        New replicas are probed, and get requests once they are up. Replicas of removed endpoints, and all replicas of a
        pool whose properties changed, get no new requests and are removed once empty.
        """
        before, self._plan, self._ordering = self.pools.copy(), plan, ordering
        for replica in self.replicas:
            replica.engine_ordering = plan.engine_ordering
        changes: list[str] = []
        wanted = {served.pool.name: served for served in plan.pools}
        for name, old in before.items():
            if (served := wanted.get(name)) == old:
                continue
            if served is None:
                del self.pools[name]
            is_same = served is not None and _without_endpoints(old) == _without_endpoints(served)
            gone = {*old.endpoints} - {*(() if served is None else served.endpoints)}
            changes += self._retire(name, gone if is_same else None)
        for name, served in wanted.items():
            if before.get(name) != served:
                self.pools[name], self.times[name] = served, pool_times(served.pool, served.coefficients)
                changes += self._add_endpoints(served)
            previous = before.get(name)
            if previous is not None and previous.prices != served.prices:
                changes.append(f"fleet: {name}: other prices")
        return [*changes, *self._use_goodputs(before, wanted)]

    def _use_goodputs(self, before: Mapping[str, ServedPool], wanted: Mapping[str, ServedPool]) -> list[str]:
        """Update the goodput of replicas whose combos were profiled again."""
        was = {each.combo.name: each.combo.goodput_rps for each in before.values() if each.combo is not None}
        now = {each.combo.name: each.combo.goodput_rps for each in wanted.values() if each.combo is not None}
        changed = {name: goodput_rps for name, goodput_rps in now.items() if was.get(name, goodput_rps) != goodput_rps}
        for replica in self.present():
            if replica.deployment in changed:
                replica.goodput_rps = changed[replica.deployment]
        return [f"combos: {name}: goodput_rps is {_rate(was[name])} -> {_rate(rps)}" for name, rps in changed.items()]

    def _add_endpoints(self, served: ServedPool) -> list[str]:
        """Create replicas for a pool's endpoints that have none."""
        present = {replica.url for replica in self.present() if replica.id not in self.leaving}
        added = [url for url in served.endpoints if url not in present]
        for url in added:
            self.connect(self.create(served, url))
        return [f"fleet: {served.pool.name}: {url} is added" for url in added]

    def _retire(self, pool: str, urls: set[str] | None) -> list[str]:
        """Drain and remove a pool's replicas at these addresses; None means all."""
        staying = [replica for replica in self.present() if replica.pool == pool and replica.id not in self.leaving]
        gone = [replica for replica in staying if urls is None or replica.url in urls]
        for replica in gone:
            self.remove(replica, at_once=False)
        return [f"fleet: {pool}: {replica.url} is drained and removed" for replica in gone]

    def drain(self, replica: LiveReplica, on: bool) -> None:
        """Drain a replica, or (not `on`) end the drain. A draining replica gets no new requests while other replicas
        can take them, and its movable requests move out."""
        if replica.id in self.leaving:
            raise ApiError(409, f"{replica.name} is being removed", "conflict")
        self._host.driver.drain(replica, on)

    def set_unready(self, replica: LiveReplica, on: bool) -> None:
        """Mark a replica as not ready, or as ready again. An unready replica gets no requests while other replicas are
        ready."""
        if not replica.is_removed:
            self._host.driver.roster.set_unready(replica, on)

    def switch(self, replica: LiveReplica, role: Role) -> None:
        """Change a replica's role for new requests. Raises ApiError if its engine cannot serve the role."""
        if replica.is_single_phase:
            raise ApiError(409, f"{replica.name} was started for {replica.role}, and cannot do the other", "conflict")
        if not replica.is_of_combo or not replica.adapter.transfers_kv:
            raise ApiError(409, f"{replica.name} is in no combo whose engines hand KV caches over", "conflict")
        self._host.driver.control.change_role(replica.id, role, self._clock.now, is_ready=True)

    def record_role(self, replica: int, role: Role, now: float) -> None:
        self.replicas[replica].lifetime.set_role(role, now)

    def schedule_roles(self, changes: Iterable[RoleChange]) -> None:
        for change in changes:
            self._clock.at(change.at_s, self._change_role, change)

    def _change_role(self, now: float, change: RoleChange) -> None:
        control, clock = self._host.driver.control, self._clock
        if change.switch_s:
            done_s = now + change.switch_s
            clock.at(done_s, lambda now, replica: control.on_role_changed(replica, clock.now), change.replica)
        control.change_role(change.replica, change.role, clock.now, is_ready=not change.switch_s)

    def remove(self, replica: LiveReplica, at_once: bool) -> None:
        """Remove a replica once it is empty. `at_once`: abort its requests, which continue elsewhere."""
        driver = self._host.driver
        if replica.id not in self.leaving:
            self.leaving.add(replica.id)
            self._host.health.remove(replica)
            driver.drain(replica, True)
        if at_once:
            driver.fail_over(replica, is_removed=True)
        self.remove_empty()

    def remove_empty(self) -> None:
        """Remove the leaving replicas that have become empty."""
        for id in [id for id in self.leaving if not self.replicas[id].num_in_flight]:
            if id not in self.leaving:
                continue  # removed already, together with another replica
            replica = self.replicas[id]
            self.leaving.discard(id)
            replica.is_removed = True
            self._host.driver.roster.remove(replica)
            replica.client.close()
            self.combos.leave(replica)
            replica.lifetime.end(self._clock.now)
            if self._has_failed_to_start(replica):
                self._unused_ids.append(id)
            for callback in self.on_removed:
                callback(replica)


def _without_endpoints(served: ServedPool) -> ServedPool:
    pool = replace(
        served.pool,
        replicas=1,
        min_replicas=1,
        max_replicas=None,
        fallback=(),
        usd_per_million_input_tokens=0.0,
        usd_per_million_output_tokens=0.0,
        usd_per_million_cached_tokens=None,
    )
    combo = None if served.combo is None else replace(served.combo, goodput_rps=None)
    return replace(served, endpoints=(), prices=TokenPrices(), pool=pool, combo=combo)


def _rate(goodput_rps: float | None) -> str:
    return "unknown" if goodput_rps is None else f"{goodput_rps:.4g}"
