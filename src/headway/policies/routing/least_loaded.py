"""Routing by the number of requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from headway.core.decision import Placement
from headway.core.subclasses import mypyc_attr
from headway.core.view import FleetView, ReplicaView, RequestView

_MANY: Final = 128
"""Number of replicas below which reading one count of each is faster than caching values."""


@mypyc_attr(allow_interpreted_subclasses=True)
class LeastLoadedRouter:
    """The replica with the fewest requests: waiting, running, and placed but not yet in its metrics.

    Load is `max(num_in_flight, num_waiting + num_running)`: a router's own count is never stale, and the engine's count
    includes requests that others placed. Among equals, the first in the view wins.
    """

    def route(self, request: RequestView, view: FleetView) -> Placement:
        replicas = view.replicas
        if len(replicas) >= _MANY:
            found = view.find_least(_load)
            if found is not None:
                return Placement(found.id)
        return Placement(least_loaded(replicas))


def _load(replica: ReplicaView) -> int:
    return max(replica.num_in_flight, replica.num_waiting + replica.num_running)


def least_loaded(replicas: Sequence[ReplicaView]) -> int:
    chosen = replicas[0].id
    least = -1
    for replica in replicas:
        load = replica.num_in_flight
        if load < least or least < 0:  # the other counts can only raise the load, and are slower to read
            seen = replica.num_waiting + replica.num_running
            if seen > load:
                load = seen
            if load < least or least < 0:
                chosen = replica.id
                if not load:
                    break
                least = load
    return chosen


@mypyc_attr(allow_interpreted_subclasses=True)
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
