"""Join the replica whose KV cache has the most room."""

from __future__ import annotations

from math import inf

from headway.core.decision import Placement
from headway.core.view import FleetView, RequestView
from headway.policies.arguments import require_at_least


class LeastKvRouter:
    """The replica with the smallest share of KV blocks used or needed by prompts yet to compute.

    Counting waiting prompts (`block_size_tokens` to a block) tells two full caches apart, and spreads a burst before
    the caches show it. Among equals, the fewest requests in flight win, then the first in the view.
    """

    def __init__(self, block_size_tokens: int = 16) -> None:
        require_at_least(1, block_size_tokens=block_size_tokens)
        self._blocks_per_token = 1.0 / block_size_tokens

    def route(self, request: RequestView, view: FleetView) -> Placement:
        replicas = view.replicas
        blocks_per_token = self._blocks_per_token
        chosen = replicas[0].id
        least = fewest = inf
        for replica in replicas:
            total = replica.kv_blocks_total or 1
            share = replica.prefill_tokens_left * blocks_per_token / total
            if share <= least:
                share += replica.kv_blocks_used / total
                if share < least or (share == least and replica.num_in_flight < fewest):
                    least = share
                    fewest = replica.num_in_flight
                    chosen = replica.id
        return Placement(chosen)
