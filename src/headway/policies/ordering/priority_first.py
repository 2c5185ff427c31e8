"""SageServe's Priority First, and its FCFS with batch work behind (sections 6.1 and 6.5)."""

from __future__ import annotations

from itertools import pairwise

from headway.core.errors import HeadwayError
from headway.core.view import RequestView
from headway.policies.arguments import require_at_least


class PriorityFirstOrdering:
    """By class of tiers, and by arrival within a class; running requests are not preempted.

    A new class begins at each tier of `classes`. The default, 1 and 2, is SageServe's PF with batch work behind:
    interactive-fast (tier 0), then interactive-normal (1), then the rest. `classes: [2]` is SageServe's FCFS: both
    interactive tiers alike, and batch requests only when no interactive request waits.
    """

    quantum: int | None = None
    preemptive = False

    def __init__(self, classes: tuple[int, ...] = (1, 2)) -> None:
        for tier in classes:
            require_at_least(1, classes=tier)
        if any(one >= next_one for one, next_one in pairwise(classes)):
            raise HeadwayError(f"classes: expected tiers from low to high, got {list(classes)}")
        self._classes = tuple(classes)

    def rank(self, request: RequestView, now: float) -> tuple[int, float]:
        tier = request.tier
        return sum(tier >= first for first in self._classes), request.arrival_s
