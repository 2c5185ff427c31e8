"""The power of two choices (Mitzenmacher, 2001)."""

from __future__ import annotations

from headway.core.decision import Placement
from headway.core.view import FleetView, RequestView


class PowerOfTwoRouter:
    """The less loaded of two different replicas drawn at random.

    Load is that of `least-loaded`; among equals, the first drawn wins. Two draws are enough to avoid the longest
    queues, and random enough that routers with stale views do not all choose the same replica.
    """

    def route(self, request: RequestView, view: FleetView) -> Placement:
        replicas = view.replicas
        num_replicas = len(replicas)
        if num_replicas == 1:
            return Placement(replicas[0].id)
        random = view.random.random
        i = int(random() * num_replicas)
        j = int(random() * (num_replicas - 1))
        first, second = replicas[i], replicas[j if j < i else j + 1]
        first_load = max(first.num_in_flight, first.num_waiting + first.num_running)
        second_load = max(second.num_in_flight, second.num_waiting + second.num_running)
        return Placement(first.id if first_load <= second_load else second.id)
