"""First come, first served. Arrival means the time since which a request has its tier."""

from __future__ import annotations

from headway.core.subclasses import mypyc_attr
from headway.core.view import RequestView


@mypyc_attr(allow_interpreted_subclasses=True)
class FcfsOrdering:
    """Orders requests by arrival; a preempted request keeps its place."""

    quantum: int | None = None
    preemptive: bool = False

    def rank(self, request: RequestView, now: float) -> tuple[float]:
        return (request.tier_since_s,)
