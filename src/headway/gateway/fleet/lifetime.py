"""What the records say of a replica: how long it was there, and what it was for."""

from __future__ import annotations

from msgspec import Struct

from headway.core.fleet import Pool, Role
from headway.core.record import ReplicaRecord
from headway.gateway.fleet.replica import LiveReplica
from headway.sim.lifetime import role_intervals


class ReplicaLifetime(Struct):
    """How long a replica was there."""

    pool: Pool
    start_s: float
    end_s: float | None = None
    """None: it still is."""
    down: tuple[tuple[float, float], ...] = ()
    """While it started; gateways do not know of engines that others start."""
    origin: str = "initial"
    """As a record of replicas has it."""
    roles: list[tuple[float, Role]] = []
    """What it was for, from when on."""

    def record(self, replica: LiveReplica, now: float) -> ReplicaRecord:
        """Its row; the gateway does not know what an engine that is down costs, so it is paid for throughout."""
        pool, num_gpus = self.pool, self.pool.parallel.num_gpus
        end_s = now if self.end_s is None else self.end_s
        return ReplicaRecord(
            replica.id, pool.name, pool.model.name, pool.gpu.name, pool.region, num_gpus, pool.usd_per_hour,
            pool.gpu.watts * num_gpus, replica.kv_blocks_total * replica.block_size_tokens, replica.max_num_seqs,
            ((self.start_s, end_s),), tuple((start_s, min(to_s, end_s)) for start_s, to_s in self.down), self.origin,
            for_prefill=role_intervals(self.roles, "prefill", end_s),
            for_decode=role_intervals(self.roles, "decode", end_s),
        )  # fmt: skip
