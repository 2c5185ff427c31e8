"""Join the replica with the fewest requests."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from headway.core.decision import Placement
from headway.core.view import FleetView, ReplicaView, RequestView


class LeastLoadedRouter:
    """The replica with the fewest requests: waiting, running, and placed but not yet in its metrics.

    Load is `max(num_in_flight, num_waiting + num_running)`: a router's own count is never stale, and the engine's count
    includes requests that others placed. Among equals, the first in the view wins.
    """

    def route(self, request: RequestView, view: FleetView) -> Placement:
        return Placement(least_loaded(view.replicas))


def least_loaded(replicas: Sequence[ReplicaView]) -> int:
    """The id of the least loaded replica."""
    chosen = replicas[0].id
    least = inf
    for replica in replicas:
        load = replica.num_in_flight
        if load < least:  # the other counts can only add to it, and cost more to read
            seen = replica.num_waiting + replica.num_running
            if seen > load:
                load = seen
            if load < least:
                chosen = replica.id
                if not load:
                    break
                least = load
    return chosen
