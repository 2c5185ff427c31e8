"""By tier."""

from __future__ import annotations

from headway.core.view import RequestView


class PriorityOrdering:
    """By tier, 0 first, and by arrival within a tier.

    With `preemptive`, an urgent waiting request takes the place of a less urgent running one. Without it, tiers decide
    only which request is admitted next and which is preempted when memory runs out, as in vLLM.
    """

    quantum: int | None = None

    def __init__(self, preemptive: bool = True) -> None:
        self.preemptive = preemptive

    def rank(self, request: RequestView, now: float) -> tuple[int, float]:
        return request.tier, request.arrival_s
