"""Random routing, independent of the replicas' state."""

from __future__ import annotations

from headway.core.decision import Placement
from headway.core.view import FleetView, RequestView


class RandomRouter:
    """A replica drawn uniformly at random."""

    def route(self, request: RequestView, view: FleetView) -> Placement:
        replicas = view.replicas
        return Placement(replicas[int(view.random.random() * len(replicas))].id)
