"""Join the replica whose requests hold the least KV cache."""

from __future__ import annotations

from headway.core.decision import Placement
from headway.core.view import FleetView, RequestView


class LeastFootprintRouter:
    """The replica with the smallest KV footprint: blocks on the GPU, and blocks of preempted requests in host memory.

    Among equals, the lowest id wins. This is the placement of the PASCAL paper's baselines (section V-A). Unlike
    `least-kv`, it counts held blocks, not shares of the capacity, and no waiting prompts.
    """

    def route(self, request: RequestView, view: FleetView) -> Placement:
        selected = min(view.replicas, key=lambda i: (i.kv_blocks_used + i.kv_blocks_host, i.id))
        return Placement(selected.id)
