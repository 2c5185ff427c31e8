"""The urgent before the less urgent."""

from __future__ import annotations

from headway.core.view import RequestView


class PriorityOrdering:
    """By tier, 0 first, and by arrival within a tier.

    With `preemptive`, an urgent request that waits takes the place of less urgent ones that run. Without,
    tiers only decide who is admitted next and who gives way when memory runs out, as in vLLM.
    """

    quantum: int | None = None

    def __init__(self, preemptive: bool = True) -> None:
        self.preemptive = preemptive

    def rank(self, request: RequestView, now: float) -> tuple[int, float]:
        return request.tier, request.arrival_s
