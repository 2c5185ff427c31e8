"""Freeness: how far a replica is from full, in KV blocks per running request (K-tier Llumnix, section 3.2)."""

from __future__ import annotations

from math import inf

from headway.core.view import ReplicaView
from headway.policies.headroom import Headroom


def freeness(replica: ReplicaView, headroom_share: float = 0.0) -> float:
    """`F = (M - sum of V) / B` (eq. 1, 2), -inf while the replica drains; from counters alone.

    Virtual usage V is what the first in line needs, nothing for the others that wait, and what those that run
    hold; besides, `headroom_share` of the M blocks. B is the number of running requests; where nobody runs
    the quotient is not defined and B counts as 1.
    """
    if replica.is_draining:
        return -inf
    total = replica.kv_blocks_total
    left = total - replica.kv_blocks_used - replica.head_demand_blocks - total * headroom_share
    return left / max(replica.num_running, 1)


def full_freeness(replica: ReplicaView, headroom: Headroom) -> float:
    """With headroom: for dispatch and migration (section 3.4)."""
    return freeness(replica, headroom.share(tier for tier, num in replica.num_by_tier.items() if num > 0))


def normal_freeness(replica: ReplicaView) -> float:
    """Without headroom: for scaling (section 3.4)."""
    return freeness(replica)


def free_share(replica: ReplicaView) -> float:
    """Normal freeness as a share of an empty replica's, `(M - sum of V) / M`: at most 1, whatever M and B are."""
    total = max(replica.kv_blocks_total, 1)
    return (total - replica.kv_blocks_used - replica.head_demand_blocks) / total
