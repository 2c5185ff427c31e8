"""Small models first, and larger ones for answers that score too low."""

from __future__ import annotations

from headway.core.errors import HeadwayError
from headway.core.view import CascadeView, RequestView
from headway.policies.arguments import require_between


class ThresholdsCascade:
    """Start at the smallest model; accept an answer that scores at least the threshold of its stage.

    `thresholds` has one value, 0 to 100, for each stage but the last. A single number applies to all stages. Source:
    Cascadia, section 3.3.
    """

    def __init__(self, thresholds: float | list[float] = 80.0) -> None:
        values = thresholds if isinstance(thresholds, list) else [thresholds]
        if not values:
            raise HeadwayError("thresholds: expected one for each stage but the last")
        for threshold in values:
            require_between(0, 100, thresholds=threshold)
        self._thresholds = thresholds

    def enter(self, request: RequestView, view: CascadeView) -> int:
        self._at(0, view)
        return 0

    def accept(self, request: RequestView, score: float, view: CascadeView) -> bool:
        return score >= self._at(view.stage, view)

    def _at(self, stage: int, view: CascadeView) -> float:
        given = self._thresholds
        if not isinstance(given, list):
            return given
        if len(given) < len(view.stages) - 1:
            raise HeadwayError(
                f"thresholds: {len(given)}; expected {len(view.stages) - 1}, for all stages but the last"
            )
        return given[stage] if stage < len(given) else 0.0
