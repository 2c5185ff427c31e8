"""How full a model's endpoints are, and whose work each of them does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headway.core.view import PoolCounts, ReplicaView, RequestView
from headway.policies.arguments import require_at_least


def effective_use(replicas: Iterable[ReplicaView]) -> float:
    """Effective memory utilisation (SageServe, 6.1): KV cache in use over KV cache there is, of all of them together.

    Weights are not in it. Without any cache, or any replica, they are full.
    """
    used = total = 0
    for replica in replicas:
        used += replica.kv_blocks_used
        total += replica.kv_blocks_total
    return used / total if total else 1.0


def fullest_use(replicas: Iterable[ReplicaView]) -> float:
    """The `effective_use` of the role that uses more: a combo is full when those who decode are, or who prefill."""
    by_role: dict[str, list[ReplicaView]] = {}
    for replica in replicas:
        by_role.setdefault(replica.role, []).append(replica)
    return max(map(effective_use, by_role.values()), default=1.0)


def is_below(threshold: float, replicas: Sequence[ReplicaView]) -> bool:
    """Whether `effective_use` is below it: the same answer, with no more of them read than that takes.

    To say how much is in use is an engine's dearest answer, and is asked for at every arrival.
    """
    total = sum([replica.kv_blocks_total for replica in replicas])
    if not total:
        return threshold > 1.0
    least, most = 0, total
    for replica in replicas:
        used = replica.kv_blocks_used
        least += used
        most += used - replica.kv_blocks_total
        if most / total < threshold:
            return True
        if least / total >= threshold:
            return False
    return least / total < threshold


class Silos:
    """Pools whose names end in one of two ways serve interactive, or batch, work only; all others serve both.

    Batch (non-interactive) are the requests of tier `batch_tier` and above; no name ends in "".
    """

    def __init__(self, batch_tier: int, interactive_suffix: str, batch_suffix: str) -> None:
        require_at_least("batch_tier", batch_tier, 1)
        self._batch_tier = batch_tier
        self._suffixes = (interactive_suffix, batch_suffix)
        self.are_there = bool(interactive_suffix or batch_suffix)

    def is_batch(self, request: RequestView) -> bool:
        """It is not interactive."""
        return request.tier >= self._batch_tier

    def is_batch_tier(self, tier: int) -> bool:
        """Requests of this tier are not interactive."""
        return tier >= self._batch_tier

    def serves(self, pool: str, is_batch: bool) -> bool:
        """Whether a pool does such work."""
        kept_out = self._suffixes[0 if is_batch else 1]
        return not (kept_out and pool.endswith(kept_out))

    def serving(self, replicas: Sequence[ReplicaView], is_batch: bool) -> Sequence[ReplicaView]:
        """Those of the replicas that do such work."""
        if not self.are_there:
            return replicas
        return [replica for replica in replicas if self.serves(replica.pool, is_batch)]


def within_bounds(pool: PoolCounts, number: int) -> int:
    """Within the pool's bounds, and never none: an empty pool says nothing of its load."""
    return min(max(number, pool.min_replicas, 1), pool.max_replicas)
