"""Small models answer first; answers with low scores go to larger models."""

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
        require_thresholds(thresholds=thresholds)
        self._thresholds = thresholds

    def enter(self, request: RequestView, view: CascadeView) -> int:
        threshold_at(self._thresholds, 0, view)
        return 0

    def accept(self, request: RequestView, score: float, view: CascadeView) -> bool:
        return score >= threshold_at(self._thresholds, view.stage, view)


def require_thresholds(**arguments: float | list[float]) -> None:
    """Raises HeadwayError unless the named argument is a score, or a list of one or more scores."""
    for name, argument in arguments.items():
        values = argument if isinstance(argument, list) else [argument]
        if not values:
            raise HeadwayError(f"{name}: expected one for each stage but the last")
        for value in values:
            require_between(0, 100, **{name: value})


def threshold_at(thresholds: float | list[float], stage: int, view: CascadeView) -> float:
    """A stage's threshold, given as one number for all stages or as a list. Raises HeadwayError if the list is too
    short."""
    if not isinstance(thresholds, list):
        return thresholds
    if len(thresholds) < len(view.stages) - 1:
        raise HeadwayError(
            f"thresholds: {len(thresholds)}; expected {len(view.stages) - 1}, for all stages but the last"
        )
    return thresholds[stage] if stage < len(thresholds) else 0.0
