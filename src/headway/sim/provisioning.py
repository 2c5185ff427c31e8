"""Sources of additional replicas: released spot instances, or new instances."""

from __future__ import annotations

from random import Random

from headway.core.fleet import Fleet, Pool
from headway.sim.replica_resources import start_up_s

InstanceType = tuple[str, str, int]
"""(region, GPU, number of GPUs)."""
NORMAL_P999 = 3.0902
"""99.9th percentile of the standard normal distribution."""


class InstanceSources:
    """Spot instances by type, oldest first. Without `Provisioning`, every instance is new."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self._provisioning, self._seed = fleet.provisioning, seed
        began = [*(p for p in fleet.pools if p.replicas), *(p for c in fleet.combos if c.replicas for p in c.parts)]
        self._weights_s = {(pool.region, pool.model.name): 0.0 for pool in began}
        """Maps each region and model to the time from which the region has the model's weights."""
        self._spots: dict[InstanceType, list[tuple[str, int]]] = {}
        self._origins: dict[int, tuple[str, int]] = {}

    def give_back(self, replica: int, pool: Pool) -> None:
        """Turn a replica into a spot instance."""
        if self._provisioning is not None:
            self._spots.setdefault(_instance_type(pool), []).append((pool.model.name, replica))

    def acquire(self, replica: int, pool: Pool, now: float) -> float:
        """Acquire an instance from the fastest source. Returns seconds until the replica serves."""
        start_s = self._acquire(replica, pool)
        config = self._provisioning
        if config is None or config.remote_s is None:
            return start_s
        weights_s = self._weights_s.setdefault((pool.region, pool.model.name), now + config.remote_s)
        return max(start_s, weights_s - now)

    def _acquire(self, replica: int, pool: Pool) -> float:
        config = self._provisioning
        if config is None:
            self._origins[replica] = "new", -1
            return start_up_s(pool)
        spots = self._spots.get(_instance_type(pool), [])
        for spot in spots:
            if spot[0] == pool.model.name:
                spots.remove(spot)
                self._origins[replica] = "reclaimed", spot[1]
                return self._reclaim_s(replica)
        if spots:
            self._origins[replica] = "redeployed", spots.pop(0)[1]
            return config.redeploy_s
        self._origins[replica] = "new", -1
        return start_up_s(pool) if config.acquire_s is None else config.acquire_s

    def _reclaim_s(self, replica: int) -> float:
        """Draw a time per replica, so that no decision changes the times of other replicas."""
        config = self._provisioning
        assert config is not None
        if config.reclaim_max_s is None:
            return config.reclaim_s
        normal = min(Random(f"{self._seed}/reclaim/{replica}").gauss(0.0, 1.0) / NORMAL_P999, 1.0)
        return float(config.reclaim_s * (config.reclaim_max_s / config.reclaim_s) ** normal)

    def origin(self, replica: int) -> tuple[str, int]:
        """The kind of source of a replica, and the replica whose spot instance it uses; -1 = none."""
        return self._origins.get(replica, ("initial", -1))


def _instance_type(pool: Pool) -> InstanceType:
    return pool.region, pool.gpu.name, pool.parallel.num_gpus
