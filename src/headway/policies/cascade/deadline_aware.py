"""Thresholds that give way when the next model's answer would come too late."""

from __future__ import annotations

from headway.core.record import Ended
from headway.core.view import CascadeView, RequestView
from headway.policies.arguments import require_above
from headway.policies.cascade.thresholds import ThresholdsCascade


class DeadlineAwareCascade(ThresholdsCascade):
    """As `thresholds`, but an answer will do where the next model cannot make the request's deadline.

    The deadline is the request's own, else its arrival and its promise for the whole answer; without either,
    thresholds alone decide. What the next model takes is the mean of what it took, weighted towards the latest
    (`weight` for each); until it has answered anybody, it is taken to be in time.
    """

    def __init__(self, thresholds: float | list[float] = 80.0, weight: float = 0.05) -> None:
        super().__init__(thresholds)
        require_above("weight", weight, 0)
        self._weight = min(weight, 1.0)
        self._takes_s: dict[str, float] = {}
        self._began: dict[int, tuple[str, float]] = {}

    def enter(self, request: RequestView, view: CascadeView) -> int:
        self._began[request.id] = view.stages[0].model, view.now
        return super().enter(request, view)

    def accept(self, request: RequestView, score: float, view: CascadeView) -> bool:
        if super().accept(request, score, view):
            return True
        model, due_s = view.stages[view.stage + 1].model, _due_s(request)
        if due_s is not None and view.now + self._takes_s.get(model, 0.0) > due_s:
            return True
        self._began[request.id] = model, view.now
        return False

    def learn(self, record: Ended) -> None:
        model, began_s = self._began.pop(record.id, ("", 0.0))
        if model != record.model or not record.generated_tokens:
            return
        took_s = record.end_s - began_s
        known_s = self._takes_s.setdefault(model, took_s)
        self._takes_s[model] = known_s + self._weight * (took_s - known_s)


def _due_s(request: RequestView) -> float | None:
    if request.deadline_s is not None:
        return request.deadline_s
    return None if request.slo_e2e_s is None else request.arrival_s + request.slo_e2e_s
