"""Orderings by tier of service."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from headway.core.errors import HeadwayError
from headway.core.view import RequestView
from headway.policies.arguments import require_above, require_at_least


class PriorityOrdering:
    """Orders requests by tier, 0 first, and by arrival within a tier.

    With `preemptive`, an urgent waiting request takes the place of a less urgent running one. Without it, tiers decide
    only which request is admitted next and which is preempted when memory runs out, as in vLLM.
    """

    quantum: int | None = None

    def __init__(self, preemptive: bool = True) -> None:
        self.preemptive = preemptive

    def rank(self, request: RequestView, now: float) -> tuple[int, float]:
        return request.tier, request.tier_since_s


class PriorityFirstOrdering:
    """Orders requests by class of tiers, and by arrival within a class; running requests are not preempted.

    A new class begins at each tier of `classes`. The default, 1 and 2, is SageServe's PF with batch work behind:
    interactive-fast (tier 0), then interactive-normal (1), then the rest. `classes: [2]` is SageServe's FCFS: both
    interactive tiers are equal, and batch requests run only when no interactive request waits.
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
        return sum(tier >= first for first in self._classes), request.tier_since_s


class TierPromotionOrdering:
    """Like `priority`, but a request rises by one tier for each `quota_s` since its arrival.

    This is the multi-level feedback queue that K-tier Llumnix proposes against starvation (section 6.5). `quota_s` is
    in seconds: one value for all tiers, or a list by tier whose last value holds for all further tiers. The value of
    tier 0 has no effect. A request keeps the tier it has reached. Within a tier the earlier arrival goes first.
    """

    quantum: int | None = None

    def __init__(self, quota_s: float | tuple[float, ...] = 10.0, preemptive: bool = False) -> None:
        self._quotas_s = tuple(quota_s) if isinstance(quota_s, tuple | list) else (quota_s,)
        if not self._quotas_s:
            raise HeadwayError("quota_s: expected a number of seconds, or one for each tier")
        for value in self._quotas_s:
            require_above(0, quota_s=value)
        self.preemptive = preemptive

    def rank(self, request: RequestView, now: float) -> tuple[int, float]:
        tier = request.tier
        for promoted_s in self._promotions(request):
            if promoted_s > now:
                break
            tier -= 1
        return tier, request.tier_since_s

    def next_change(self, request: RequestView, now: float) -> float | None:
        return next((promoted_s for promoted_s in self._promotions(request) if promoted_s > now), None)

    def _promotions(self, request: RequestView) -> Iterator[float]:
        at_s = request.tier_since_s
        last = len(self._quotas_s) - 1
        for tier in range(request.tier, 0, -1):
            at_s += self._quotas_s[min(tier, last)]
            yield at_s
