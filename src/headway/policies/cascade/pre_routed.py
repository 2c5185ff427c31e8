"""Chooses one model for each request before generation."""

from __future__ import annotations

from typing import cast

from headway.core.view import CascadeView, OracleRequestView, RequestView
from headway.policies.arguments import require_at_least, require_between


class PreRoutedCascade:
    """The smallest model whose answer is predicted to score at least `threshold`, or else the largest model.

    After RouteLLM. The prediction is the true score plus a normal error with standard deviation `noise`, which models a
    router that predicts the score from the prompt. The policy therefore runs only where the true scores are known.
    """

    oracle = True

    def __init__(self, threshold: float = 80.0, noise: float = 15.0) -> None:
        require_between(0, 100, threshold=threshold)
        require_at_least(0, noise=noise)
        self._threshold, self._noise = threshold, noise

    def enter(self, request: RequestView, view: CascadeView) -> int:
        scores = dict(cast(OracleRequestView, request).quality)
        for i, stage in enumerate(view.stages):
            if scores.get(stage.model, 0.0) + view.random.gauss(0.0, self._noise) >= self._threshold:
                return i
        return len(view.stages) - 1

    def accept(self, request: RequestView, score: float, view: CascadeView) -> bool:
        return True
