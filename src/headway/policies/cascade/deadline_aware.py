"""Thresholds, overridden where the next model's answer would miss the deadline."""

from __future__ import annotations

from headway.core.record import Ended
from headway.core.view import CascadeView, RequestView
from headway.policies.arguments import require_above
from headway.policies.cascade.thresholds import ThresholdsCascade


class DeadlineAwareCascade(ThresholdsCascade):
    """Like `thresholds`, but accepts any answer if the next model would miss the request's deadline.

    The deadline is the request's own, or its arrival plus its end-to-end SLO. The thresholds alone decide on a request
    without both. The expected time of the next model is an exponentially weighted mean of its past times, with `weight`
    for each new one. A model without past times is assumed to be in time.
    """

    def __init__(self, thresholds: float | list[float] = 80.0, weight: float = 0.05) -> None:
        super().__init__(thresholds)
        require_above(0, weight=weight)
        self._weight = min(weight, 1.0)
        self._mean_s: dict[str, float] = {}
        self._started: dict[int, tuple[str, float]] = {}

    def enter(self, request: RequestView, view: CascadeView) -> int:
        self._started[request.id] = view.stages[0].model, view.now
        return super().enter(request, view)

    def accept(self, request: RequestView, score: float, view: CascadeView) -> bool:
        if super().accept(request, score, view):
            return True
        model, due_s = view.stages[view.stage + 1].model, _due_s(request)
        if due_s is not None and view.now + self._mean_s.get(model, 0.0) > due_s:
            return True
        self._started[request.id] = model, view.now
        return False

    def learn(self, record: Ended) -> None:
        model, started_s = self._started.pop(record.id, ("", 0.0))
        if model != record.model or not record.generated_tokens:
            return
        took_s = record.end_s - started_s
        mean_s = self._mean_s.setdefault(model, took_s)
        self._mean_s[model] = mean_s + self._weight * (took_s - mean_s)


def _due_s(request: RequestView) -> float | None:
    if request.deadline_s is not None:
        return request.deadline_s
    return None if request.slo_e2e_s is None else request.arrival_s + request.slo_e2e_s
