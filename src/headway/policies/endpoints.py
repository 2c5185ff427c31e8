"""Memory utilisation of endpoints, and pools for batch or interactive requests (SageServe)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import TypeVar

from headway.core.view import PoolCounts, ReplicaView, RequestView
from headway.policies.arguments import require_at_least

T = TypeVar("T")
K = TypeVar("K")


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """The items by key, in order of appearance."""
    groups: dict[K, list[T]] = {}
    for item in items:
        of = key(item)
        if of in groups:
            groups[of].append(item)
        else:
            groups[of] = [item]
    return groups


def footprint(replica: ReplicaView, host_counts: bool = True) -> int:
    """KV blocks of a replica's requests (PASCAL, Algorithm 1: m_i): blocks on the GPU and, with `host_counts`, blocks
    of preempted requests in host memory and blocks that paused requests will need again."""
    if not host_counts:
        return replica.kv_blocks_used
    block = replica.block_size_tokens
    again = sum([-(-(each.prompt_tokens + each.generated_tokens) // block) for each in replica.paused])
    return replica.kv_blocks_used + replica.kv_blocks_host + again


def effective_use(replicas: Iterable[ReplicaView]) -> float:
    """Effective memory utilisation (SageServe, 6.1): KV blocks in use over KV blocks, of all replicas together.

    Weights are not counted. 1 without replicas or without KV cache.
    """
    used = total = 0
    for replica in replicas:
        used += replica.kv_blocks_used
        total += replica.kv_blocks_total
    return used / total if total else 1.0


def fullest_use(replicas: Iterable[ReplicaView]) -> float:
    """The highest `effective_use` over roles: a combo is full when its prefill or its decode replicas are full."""
    return max(map(effective_use, grouped(replicas, attrgetter("role")).values()), default=1.0)


def is_below(threshold: float, replicas: Sequence[ReplicaView]) -> bool:
    """Whether `effective_use` is below `threshold`, reading as few replicas as possible.

    KV use is the most expensive attribute of a replica, and routers need the answer for every arrival.
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
    """Pools that serve only interactive or only batch requests, recognised by the suffix of their names.

    Requests of tier `batch_tier` and above are batch requests. An empty suffix matches no pool.
    """

    def __init__(self, batch_tier: int, interactive_suffix: str, batch_suffix: str) -> None:
        require_at_least(1, batch_tier=batch_tier)
        self._batch_tier = batch_tier
        self._suffixes = (interactive_suffix, batch_suffix)
        self.are_there = bool(interactive_suffix or batch_suffix)

    def is_batch(self, request: RequestView) -> bool:
        return request.tier >= self._batch_tier

    def is_batch_tier(self, tier: int) -> bool:
        return tier >= self._batch_tier

    def serves(self, pool: str, is_batch: bool) -> bool:
        excluded = self._suffixes[0 if is_batch else 1]
        return not (excluded and pool.endswith(excluded))

    def serving(self, replicas: Sequence[ReplicaView], is_batch: bool) -> Sequence[ReplicaView]:
        if not self.are_there:
            return replicas
        return [replica for replica in replicas if self.serves(replica.pool, is_batch)]


def fewest_and_most(pool: PoolCounts) -> tuple[int, int]:
    """The pool's bounds, at least 1, because an empty pool shows no load to scale by."""
    return min(max(pool.min_replicas, 1), pool.max_replicas), pool.max_replicas


def within_bounds(pool: PoolCounts, number: int) -> int:
    """The number limited to the pool's bounds. Plans need no such limit: their problem contains the bounds."""
    fewest, most = fewest_and_most(pool)
    return min(max(number, fewest), most)
