"""Freeness and headroom of K-tier Llumnix (sections 3.2 and 3.3)."""

from __future__ import annotations

from collections.abc import Iterable
from math import exp, fsum, inf, log
from typing import Literal

from headway.core.record import Ended, Outcome
from headway.core.view import ReplicaView
from headway.policies.arguments import require_above, require_at_least, require_between

Kind = Literal["exponential", "binary", "none"]
Decay = float | Literal["auto"]


class Headroom:
    """A budget per tier, as a share of the KV cache, charged once for each tier that is present (eq. 4).

    `exponential`: tier p gets `h_max * exp(-decay * p)` (eq. 3), tiers from `num_tiers` on share the last one's.
    With `decay="auto"` the last tier gets a hundredth of the first, as the paper asks for next to nothing there.
    With a single tier there is nobody to keep away, and no headroom. `binary`: Llumnix's own, `h_max` for tier 0
    and none for the others. `none`: none.
    """

    def __init__(self, num_tiers: int = 4, h_max: float = 0.2, decay: Decay = 1.0, kind: Kind = "exponential") -> None:
        require_at_least("num_tiers", num_tiers, 1)
        require_between("h_max", h_max, 0, 1)
        if decay != "auto":
            require_at_least("decay", decay, 0)
        self.shares = _shares(num_tiers, h_max, decay, kind)
        """By tier; later tiers are as the last."""

    def share(self, tiers: Iterable[int]) -> float:
        """Share of the KV cache that is charged where requests of these tiers are."""
        shares = self.shares
        last = len(shares) - 1
        return fsum([shares[tier] for tier in {min(tier, last) for tier in tiers}])

    def learn(self, record: Ended) -> None:
        """Budgets that are fixed learn nothing."""


def _shares(num_tiers: int, h_max: float, decay: Decay, kind: Kind) -> tuple[float, ...]:
    if kind == "none" or num_tiers == 1:
        return (0.0,)
    if kind == "binary":
        return h_max, 0.0
    rate = log(100.0) / (num_tiers - 1) if decay == "auto" else decay
    return tuple(h_max * exp(-rate * tier) for tier in range(num_tiers))


class AdaptiveHeadroom(Headroom):
    """Budgets that follow each tier's SLO violations (the paper's section 6.5 asks for it, and has no rule).

    They start as `Headroom`'s. When a request of tier p ends, H_p is multiplied by `exp(step * (violated - target))`,
    so it rises while more than `target` of the tier's requests miss an SLO, falls slowly while fewer do, and is in
    balance at `target`. It stays between `lowest` and `highest` times where it started, and no tier gets more than
    the tier above it, or else a starved background would push the urgent away. A request without SLOs says nothing.
    """

    def __init__(
        self,
        num_tiers: int = 4,
        h_max: float = 0.2,
        decay: Decay = 1.0,
        kind: Kind = "exponential",
        *,
        target: float = 0.05,
        step: float = 0.05,
        lowest: float = 0.25,
        highest: float = 2.0,
    ) -> None:
        super().__init__(num_tiers, h_max, decay, kind)
        require_above("target", target, 0)
        require_above("step", step, 0)
        self._start = self.shares
        self._factors = [1.0] * len(self.shares)
        self._target, self._step, self._lowest, self._highest = target, step, lowest, highest

    def learn(self, record: Ended) -> None:
        violated = violated_slo(record)
        if violated is None:
            return
        tier = min(record.tier, len(self._factors) - 1)
        factor = self._factors[tier] * exp(self._step * (violated - self._target))
        self._factors[tier] = min(max(factor, self._lowest), self._highest)
        above_it = inf
        shares = []
        for start, factor in zip(self._start, self._factors, strict=True):
            above_it = min(start * factor, above_it)
            shares.append(above_it)
        self.shares = tuple(shares)


def headroom_of(num_tiers: int, h_max: float, decay: Decay, kind: Kind, adaptive: bool) -> Headroom:
    """The headroom that a policy's arguments ask for."""
    made_by = AdaptiveHeadroom if adaptive else Headroom
    return made_by(num_tiers, h_max, decay, kind)


def violated_slo(record: Ended) -> bool | None:
    """Whether the request missed one of its SLOs; None: it has none, or was still under way when the run stopped.

    One that was refused or given up missed them. One with a single output token has no TPOT to miss.
    """
    limits = record.slo_ttft_s, record.slo_tpot_s, record.slo_e2e_s
    if record.outcome is Outcome.UNFINISHED or limits == (None, None, None):
        return None
    first_s = record.first_token_s
    if record.outcome is not Outcome.FINISHED or first_s is None:
        return True
    gaps = record.generated_tokens - 1
    actual = (
        first_s - record.arrival_s,
        (record.end_s - first_s) / gaps if gaps > 0 else 0.0,
        record.end_s - record.arrival_s,
    )
    return any(limit is not None and took > limit for limit, took in zip(limits, actual, strict=True))


def freeness(replica: ReplicaView, headroom_share: float = 0.0) -> float:
    """`F = (M - sum of V) / B` (eq. 1, 2), -inf while the replica drains; from counters alone.

    Virtual usage V is what the first in line needs, nothing for the others that wait, and what those that run
    hold; besides, `headroom_share` of the M blocks. B is the number of running requests; where nobody runs
    the quotient is not defined and B counts as 1.
    """
    if replica.is_draining:
        return -inf
    total = replica.kv_blocks_total
    left = total - replica.kv_blocks_used - replica.head_demand_blocks - total * headroom_share
    return left / max(replica.num_running, 1)


def full_freeness(replica: ReplicaView, headroom: Headroom) -> float:
    """With headroom: for dispatch and migration (section 3.4)."""
    return freeness(replica, headroom.share(tier for tier, num in replica.num_by_tier.items() if num > 0))


def normal_freeness(replica: ReplicaView) -> float:
    """Without headroom: for scaling (section 3.4)."""
    return freeness(replica)


def free_share(replica: ReplicaView) -> float:
    """Normal freeness as a share of an empty replica's, `(M - sum of V) / M`: at most 1, whatever M and B are."""
    total = max(replica.kv_blocks_total, 1)
    return (total - replica.kv_blocks_used - replica.head_demand_blocks) / total
