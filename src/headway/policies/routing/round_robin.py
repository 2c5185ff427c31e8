"""Round robin: replicas with room take turns."""

from __future__ import annotations

from headway.core.decision import Placement
from headway.core.subclasses import mypyc_attr
from headway.core.view import FleetView, RequestView


@mypyc_attr(allow_interpreted_subclasses=True)
class RoundRobinRouter:
    """Each replica in turn, independent of load.

    The cursor is the id of the last replica, so that added or removed replicas do not change the turns of others. The
    next replica is the one after it in the view or, if the last one is gone, the first with a higher id.
    """

    def __init__(self) -> None:
        self._last = -1
        self._next = 0

    def route(self, request: RequestView, view: FleetView) -> Placement:
        replicas = view.replicas
        num_replicas = len(replicas)
        i = self._next
        if i and (i > num_replicas or replicas[i - 1].id != self._last):
            i = self._after_last(view)
        if i == num_replicas:
            i = 0
        self._next = i + 1
        self._last = replica = replicas[i].id
        return Placement(replica)

    def _after_last(self, view: FleetView) -> int:
        """The position after the cursor, in a view whose replicas have changed."""
        higher = -1
        for i, replica in enumerate(view.replicas):
            if replica.id == self._last:
                return i + 1
            if higher < 0 and replica.id > self._last:
                higher = i
        return max(higher, 0)
