"""Earliest deadline first."""

from __future__ import annotations

from headway.core.view import RequestView
from headway.policies.arguments import require_above


class EdfOrdering:
    """By deadline, and by arrival among equals.

    The deadline is the request's own. Without one, it is the arrival plus the end-to-end SLO, the TTFT SLO or
    `default_deadline_s`: the first of them that is set.
    """

    quantum: int | None = None

    def __init__(self, default_deadline_s: float = 60.0, preemptive: bool = False) -> None:
        require_above(0, default_deadline_s=default_deadline_s)
        self._default_deadline_s = default_deadline_s
        self.preemptive = preemptive

    def rank(self, request: RequestView, now: float) -> tuple[float, float]:
        arrival_s = request.arrival_s
        deadline_s = request.deadline_s
        if deadline_s is None:
            allowed_s = request.slo_e2e_s
            if allowed_s is None:
                allowed_s = request.slo_ttft_s
            deadline_s = arrival_s + (self._default_deadline_s if allowed_s is None else allowed_s)
        return deadline_s, arrival_s
