"""Where requests reason: PASCAL's Algorithm 1."""

from __future__ import annotations

from headway.core.decision import Placement
from headway.core.view import FleetView, RequestView


class PascalRouter:
    """The replica with the smallest KV footprint, GPU and host, of those whose answers keep their pace.

    If no replica's answers keep their pace, all replicas are eligible. Among equals, the lowest id wins. The policy
    places new requests, which begin to reason; the migration policy of the same name decides where they answer. Source:
    PASCAL, Algorithm 1.
    """

    def route(self, request: RequestView, view: FleetView) -> Placement:
        eligible = [i for i in view.replicas if i.answers_on_pace] or view.replicas
        selected = min(eligible, key=lambda i: (i.kv_blocks_used + i.kv_blocks_host, i.id))
        return Placement(selected.id)
