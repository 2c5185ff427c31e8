"""Where one more replica comes from: spot instances that were given back before, or new."""

from __future__ import annotations

from headway.core.fleet import Pool, Provisioning
from headway.sim.makeup import start_up_s

Kind = tuple[str, str, int]
"""(region, GPU, how many of it)."""


class Sources:
    """Spot instances by what they could become, oldest first. Without `Provisioning`, everything is new."""

    def __init__(self, provisioning: Provisioning | None) -> None:
        self._provisioning = provisioning
        self._spots: dict[Kind, list[tuple[str, int]]] = {}
        self._origins: dict[int, tuple[str, int]] = {}

    def give(self, replica: int, pool: Pool) -> None:
        """A replica is given back."""
        if self._provisioning is not None:
            self._spots.setdefault(_kind(pool), []).append((pool.model.name, replica))

    def take(self, replica: int, pool: Pool) -> float:
        """The best source for one more: seconds until it serves."""
        config = self._provisioning
        if config is None:
            self._origins[replica] = "new", -1
            return start_up_s(pool)
        spots = self._spots.get(_kind(pool), [])
        for spot in spots:
            if spot[0] == pool.model.name:
                spots.remove(spot)
                self._origins[replica] = "reclaimed", spot[1]
                return config.reclaim_s
        if spots:
            self._origins[replica] = "redeployed", spots.pop(0)[1]
            return config.redeploy_s
        self._origins[replica] = "new", -1
        return start_up_s(pool) if config.acquire_s is None else config.acquire_s

    def origin(self, replica: int) -> tuple[str, int]:
        """Where a replica came from, and the spot instance that it was."""
        return self._origins.get(replica, ("initial", -1))


def _kind(pool: Pool) -> Kind:
    return pool.region, pool.gpu.name, pool.parallel.num_gpus
