"""Tiers without starvation."""

from __future__ import annotations

from collections.abc import Iterator

from headway.core.errors import HeadwayError
from headway.core.view import RequestView
from headway.policies.arguments import require_above


class TierPromotionOrdering:
    """As `priority`, but a request rises by one tier for each `quota_s` since its arrival.

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
        return tier, request.arrival_s

    def next_change(self, request: RequestView, now: float) -> float | None:
        return next((promoted_s for promoted_s in self._promotions(request) if promoted_s > now), None)

    def _promotions(self, request: RequestView) -> Iterator[float]:
        """The times at which the request rises, tier by tier."""
        at_s = request.arrival_s
        last = len(self._quotas_s) - 1
        for tier in range(request.tier, 0, -1):
            at_s += self._quotas_s[min(tier, last)]
            yield at_s
