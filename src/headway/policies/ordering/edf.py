"""Earliest deadline first."""

from __future__ import annotations

from headway.core.view import RequestView
from headway.policies.arguments import require_above


class EdfOrdering:
    """By deadline, and by arrival among equals.

    The deadline is the request's own or, where it has none, its arrival plus the first of these that is
    given: its end-to-end SLO, its TTFT SLO, `default_deadline_s`.
    """

    quantum: int | None = None

    def __init__(self, default_deadline_s: float = 60.0, preemptive: bool = False) -> None:
        require_above("default_deadline_s", default_deadline_s, 0)
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
