"""The counts of an engine's scheduler, by the names that they have on `/metrics`: what freeness is computed from.

`TIER` is followed by a slash and the tier where the scheduler hands the counts on.
"""

from __future__ import annotations

from collections import Counter

FAILURES = "headway:ordering_failures"
BLOCKS_USED = "headway:kv_blocks_used"
BLOCKS_TOTAL = "headway:kv_blocks_total"
BLOCKS_DEMANDED = "headway:kv_blocks_demanded"
TIER = "headway:requests"


class TierCounts:
    """Requests in the engine, by tier."""

    def __init__(self) -> None:
        self._tiers: Counter[int] = Counter()

    def add(self, tier: int) -> None:
        self._tiers[tier] += 1

    def remove(self, tier: int) -> None:
        self._tiers[tier] -= 1

    def named(self) -> dict[str, int]:
        """Tiers that were seen, those without requests too."""
        return {f"{TIER}/{tier}": number for tier, number in self._tiers.items()}
