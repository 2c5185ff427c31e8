"""Join the freest replica (K-tier Llumnix, section 3.4)."""

from __future__ import annotations

from math import inf
from typing import Literal

from headway.core.decision import Placement
from headway.core.record import Ended
from headway.core.subclasses import mypyc_attr
from headway.core.view import FleetView, ReplicaView, RequestView
from headway.policies.freeness import full_freeness, headroom_of
from headway.policies.routing.least_loaded import least_loaded


@mypyc_attr(allow_interpreted_subclasses=True)
class FreestRouter:
    """The replica with the most free KV blocks per running request, after headroom for its tiers.

    Freeness is `(M - used - first waiting request - headroom) / running` in blocks (K-tier Llumnix, eq. 1-4). A replica
    without running requests is therefore freer by orders of magnitude than a half-full one. Only the first waiting
    request counts, so a burst shorter than a prefill goes to one replica. Among equals, the fewest requests in flight
    win, then the lower id. A draining replica is chosen only if all replicas drain; then the least loaded one is
    chosen.

    Headroom: a tier that is present takes `h_max * exp(-decay * tier)` of the cache. `decay: auto` gives the last of
    `num_tiers` a hundredth of the first. `headroom: binary` keeps `h_max` for tier 0 alone, as Llumnix does. With
    `adaptive`, headroom rises while a tier violates its SLOs.
    """

    def __init__(
        self,
        num_tiers: int = 4,
        h_max: float = 0.2,
        decay: float | Literal["auto"] = 1.0,
        headroom: Literal["exponential", "binary", "none"] = "exponential",
        adaptive: bool = False,
    ) -> None:
        self._headroom = headroom_of(num_tiers, h_max, decay, headroom, adaptive)
        self._adapts = adaptive

    def route(self, request: RequestView, view: FleetView) -> Placement:
        found = None if self._adapts else view.find_least(self._rank, grows=True)
        if found is not None and not found.is_draining:
            return Placement(found.id)
        chosen, most, fewest = -1, -inf, 0
        for replica in view.replicas:
            free = full_freeness(replica, self._headroom)
            if free < most or free == -inf:
                continue
            load = replica.num_in_flight
            if free > most or (load, replica.id) < (fewest, chosen):
                chosen, most, fewest = replica.id, free, load
        return Placement(least_loaded(view.replicas) if most == -inf else chosen)

    def _rank(self, replica: ReplicaView) -> tuple[float, int, int]:
        """The freest first. Ticks only take KV blocks."""
        return -full_freeness(replica, self._headroom), replica.num_in_flight, replica.id

    def learn(self, record: Ended) -> None:
        self._headroom.learn(record)
