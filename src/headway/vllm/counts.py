"""The counts of an engine's scheduler, by their names on `/metrics`. Freeness is computed from these counts.

When the scheduler passes the counts on, `TIER` is followed by a slash and the tier.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

FAILURES = "headway:ordering_failures"
BLOCKS_USED = "headway:kv_blocks_used"
BLOCKS_TOTAL = "headway:kv_blocks_total"
BLOCKS_DEMANDED = "headway:kv_blocks_demanded"
TIER = "headway:requests"


def passed_on(stats: Any) -> dict[str, int]:
    """The counts in vLLM's `SchedulerStats` to which the scheduler adds its own. Before vLLM 0.32 these are the waiting
    requests by LoRA adapter, which only engines with adapters publish."""
    known: dict[str, int] | None = getattr(stats, "num_kv_fetch_reqs_by_stage", None)
    return stats.waiting_lora_adapters if known is None else known


class TierCounts:
    """Requests in the engine, by tier."""

    def __init__(self) -> None:
        self._tiers: Counter[int] = Counter()

    def add(self, tier: int) -> None:
        self._tiers[tier] += 1

    def remove(self, tier: int) -> None:
        self._tiers[tier] -= 1

    def named(self) -> dict[str, int]:
        """Maps names to counts, for all tiers seen so far. Tiers without requests are included."""
        return {f"{TIER}/{tier}": number for tier, number in self._tiers.items()}
