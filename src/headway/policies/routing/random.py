"""Random routing."""

from __future__ import annotations

from headway.core.decision import Placement
from headway.core.view import FleetView, RequestView


class RandomRouter:
    """Any replica, each as likely as the others."""

    def route(self, request: RequestView, view: FleetView) -> Placement:
        replicas = view.replicas
        return Placement(replicas[int(view.random.random() * len(replicas))].id)
