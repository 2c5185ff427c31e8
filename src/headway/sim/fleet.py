"""The replicas of a simulated fleet: creates, starts, releases and records them.

A *unit* starts and stops together: one replica of a pool, or all replicas of a combo. It is billed from its start.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from headway.core.errors import HeadwayError
from headway.core.fleet import Combo, Fleet, Parallel, Pool, Role, unit_of
from headway.core.policy import Ordering
from headway.core.record import ReplicaRecord
from headway.perf import memory
from headway.sim.kv_store import KvStore, StoreClient
from headway.sim.lifetime import Lifetime
from headway.sim.provisioning import InstanceSources
from headway.sim.replica import Replica, Run
from headway.sim.replica_resources import Line, PoolResources


class SimulatedFleet:
    """All replicas so far, numbered in order of creation."""

    __slots__ = (
        "_instance_sources",
        "_kv_kinds",
        "_kv_store",
        "_num_units",
        "_ordering",
        "_resources",
        "_run",
        "deployments",
        "lifetimes",
        "pools",
        "replicas",
    )

    def __init__(self, fleet: Fleet, run: Run, ordering: Callable[[], Ordering], line: Callable[[Pool], Line]) -> None:
        """Create the initial replicas. Raises HeadwayError if there is none."""
        self._run, self._ordering = run, ordering
        self._resources = {pool.name: PoolResources(pool, line(pool)) for pool in fleet.all_pools}
        deployments: list[Pool | Combo] = [*fleet.pools, *fleet.combos]
        self.deployments = {each.name: each for each in deployments}
        """Pools and combos, by name."""
        self.replicas: list[Replica] = []
        self.pools: list[Pool] = []
        """Holds, for each replica id, the pool."""
        self.lifetimes: list[Lifetime] = []
        """Holds, for each replica id, the lifetime."""
        self._num_units = 0
        self._instance_sources = InstanceSources(fleet, run.seed)
        self._kv_store = None if fleet.kv_store is None else KvStore(fleet.kv_store, self._now)
        self._kv_kinds: dict[tuple[str, float, int, Parallel], int] = {}
        """Numbers of the kinds of KV in the store."""
        for deployment in deployments:
            self._add_units(deployment, deployment.replicas, 0.0)
        if not self.replicas:
            raise HeadwayError("fleet: no replicas; at least one pool needs `replicas` of 1 or more")

    def _now(self) -> float:
        return self._run.kernel.now

    # Units.

    def _add_units(self, deployment: Pool | Combo, num: int, now: float) -> list[Replica]:
        goodput_rps = deployment.goodput_rps if isinstance(deployment, Combo) else None
        pools, added = unit_of(deployment), list[Replica]()
        for _ in range(num):
            self._num_units += 1
            added += [self._add(pool, now, goodput_rps) for pool in pools]
        return added

    def _add(self, pool: Pool, now: float, goodput_rps: float | None) -> Replica:
        resources, ordering = self._resources[pool.name], self._ordering()
        replica = Replica(len(self.replicas), resources, ordering, self._run, self._num_units, goodput_rps)
        replica.use_store(self._store_client(pool))
        self.replicas.append(replica)
        self.pools.append(pool)
        self.lifetimes.append(Lifetime(pool.role, now))
        return replica

    def _store_client(self, pool: Pool) -> StoreClient | None:
        """A replica's access to the shared KV store; None if its pool has none."""
        store = self._kv_store
        if store is None or not pool.engine.prefix_caching or pool.hosted is not None:
            return None
        if store.config.pools and pool.name not in store.config.pools:
            return None
        model, engine = pool.model.name.partition("@")[0], pool.engine
        shape = (model, engine.kv_dtype_bytes, engine.block_size_tokens, pool.parallel)
        kind = self._kv_kinds.setdefault(shape, len(self._kv_kinds))
        per_token = memory.kv_bytes_per_token(pool.model, engine.kv_dtype_bytes)
        return store.client(kind, per_token * engine.block_size_tokens, pool.network_bytes_per_s)

    def start_unit(self, deployment: str, now: float) -> tuple[list[Replica], float]:
        """Acquire and start another unit of a pool or combo. Returns its replicas, and the seconds until they serve."""
        unit = self._add_units(self.deployments[deployment], 1, now)
        start_s = max(self._instance_sources.acquire(replica.id, self.pools[replica.id], now) for replica in unit)
        for replica in unit:
            replica.is_up = False
            self.lifetimes[replica.id].start_down(now, now + start_s)
        return unit, start_s

    def give_back(self, replica: int, now: float) -> None:
        """Stop a replica permanently."""
        self.replicas[replica].is_up = False
        self.lifetimes[replica].end(now)
        self._instance_sources.give_back(replica, self.pools[replica])

    def set_role(self, replica: int, role: Role) -> None:
        """Change a replica's role, and record the time."""
        self.replicas[replica].view.role = role
        self.replicas[replica].timeline.note_change()
        self.lifetimes[replica].set_role(role, self._now())

    # Facts of replicas.

    def network_bytes_per_s(self, replica: int) -> float:
        """Network capacity of a replica, each way."""
        return self.pools[replica].network_bytes_per_s

    def kv_bytes_per_token(self, replica: int) -> float:
        """Bytes of one token's KV at a replica."""
        pool = self.pools[replica]
        return memory.kv_bytes_per_token(pool.model, pool.engine.kv_dtype_bytes)

    def records(self, end_s: float) -> tuple[ReplicaRecord, ...]:
        """The records of all replicas until the end of the run."""
        of_pool: dict[str, ReplicaRecord] = {}
        records = []
        for replica, pool, lifetime in zip(self.replicas, self.pools, self.lifetimes, strict=True):
            if pool.name not in of_pool:
                of_pool[pool.name] = self._pool_record(replica, end_s)
            alike = of_pool[pool.name]
            is_alike = lifetime.is_unchanged and lifetime.start_s == 0.0
            records.append(replace(alike, id=replica.id) if is_alike else self._record(alike, replica.id, end_s))
        return tuple(records)

    def _record(self, of_pool: ReplicaRecord, replica: int, end_s: float) -> ReplicaRecord:
        lifetime = self.lifetimes[replica]
        origin, replaces = self._instance_sources.origin(replica)
        return replace(
            of_pool,
            id=replica,
            up=lifetime.up(end_s),
            down=lifetime.down(end_s),
            origin=origin,
            replaces=replaces,
            for_prefill=lifetime.with_role("prefill", end_s),
            for_decode=lifetime.with_role("decode", end_s),
        )

    def _pool_record(self, replica: Replica, end_s: float) -> ReplicaRecord:
        """The record of one replica of a pool, as of all that served from the beginning to the end."""
        pool = self.pools[replica.id]
        lifetime = Lifetime(pool.role, 0.0)
        is_hosted = pool.hosted is not None
        return ReplicaRecord(
            id=replica.id,
            pool=pool.name,
            model=pool.model.name,
            gpu=pool.gpu.name,
            region=pool.region,
            num_gpus=pool.num_gpus,
            usd_per_hour=pool.usd_per_hour,
            watts=pool.gpu.watts * pool.num_gpus,
            kv_capacity_tokens=0 if is_hosted else replica.view.kv_blocks_total * pool.engine.block_size_tokens,
            max_num_seqs=replica.view.max_num_seqs,
            up=lifetime.up(end_s),
            for_prefill=lifetime.with_role("prefill", end_s),
            for_decode=lifetime.with_role("decode", end_s),
            usd_per_million_input_tokens=pool.usd_per_million_input_tokens if is_hosted else 0.0,
            usd_per_million_output_tokens=pool.usd_per_million_output_tokens if is_hosted else 0.0,
            usd_per_million_cached_tokens=pool.usd_per_million_cached_tokens if is_hosted else None,
            power=self._resources[pool.name].power(),
        )
