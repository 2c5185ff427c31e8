"""Freeness and headroom of K-tier Llumnix (sections 3.2 and 3.3)."""

from __future__ import annotations

from collections.abc import Iterable
from math import exp, fsum, inf, log
from typing import Literal

from headway.core.record import Ended, Outcome
from headway.core.view import ReplicaView
from headway.policies.arguments import MOST_TIERS, require_above, require_at_least, require_between

Kind = Literal["exponential", "binary", "none"]
Decay = float | Literal["auto"]


class Headroom:
    """KV cache to keep free, as a share of the cache, charged once for each tier present on a replica (eq. 4).

    `exponential`: tier p gets `h_max * exp(-decay * p)` (eq. 3), and tiers from `num_tiers` on share the last tier's.
    With `decay="auto"` the last tier gets a hundredth of the first, as the paper asks for next to nothing there. A
    single tier needs no headroom. `binary`: as in Llumnix, `h_max` for tier 0 and none for the others. `none`: no
    headroom.
    """

    def __init__(self, num_tiers: int = 4, h_max: float = 0.2, decay: Decay = 1.0, kind: Kind = "exponential") -> None:
        require_between(1, MOST_TIERS, num_tiers=num_tiers)
        require_between(0, 1, h_max=h_max)
        if decay != "auto":
            require_at_least(0, decay=decay)
        self.shares = _shares(num_tiers, h_max, decay, kind)
        """Shares by tier; later tiers have the last value."""

    def share(self, tiers: Iterable[int]) -> float:
        """The share of the KV cache to keep free on a replica with requests of these tiers."""
        shares = self.shares
        last = len(shares) - 1
        return fsum([shares[tier] for tier in {min(tier, last) for tier in tiers}])

    def learn(self, record: Ended) -> None:
        """Do nothing, because fixed budgets do not adapt."""


def _shares(num_tiers: int, h_max: float, decay: Decay, kind: Kind) -> tuple[float, ...]:
    if kind == "none" or num_tiers == 1:
        return (0.0,)
    if kind == "binary":
        return h_max, 0.0
    rate = log(100.0) / (num_tiers - 1) if decay == "auto" else decay
    return tuple(h_max * exp(-rate * tier) for tier in range(num_tiers))


class AdaptiveHeadroom(Headroom):
    """Headroom that follows each tier's SLO violations. The paper's section 6.5 asks for such headroom without giving a
    rule.

    Shares start as `Headroom`'s. When a request of tier p ends, the share of tier p is multiplied by `exp(step *
    (violated - target))`. The share rises while more than `target` of the tier's requests violate an SLO, falls slowly
    below `target`, and is stable at `target`. It stays between `lowest` and `highest` times its start value, and no
    tier gets more than the tier above, so that a starved background tier does not displace an urgent one. Requests
    without SLOs have no effect.
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
        require_above(0, target=target, step=step)
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
    cls = AdaptiveHeadroom if adaptive else Headroom
    return cls(num_tiers, h_max, decay, kind)


def violated_slo(record: Ended) -> bool | None:
    """Whether the request violated one of its SLOs; None if it has no SLO or was unfinished when the run ended.

    A rejected or cancelled request violated its SLOs. A request with a single output token has no TPOT. Of an answer
    that was not streamed, only the duration is known.
    """
    limits = record.slo_ttft_s, record.slo_tpot_s, record.slo_e2e_s
    if record.outcome is Outcome.UNFINISHED or limits == (None, None, None):
        return None
    if record.outcome is not Outcome.FINISHED:
        return True
    first_s = record.first_token_s
    if first_s is None:
        return None if record.slo_e2e_s is None else record.end_s - record.arrival_s > record.slo_e2e_s
    gaps = record.generated_tokens / record.num_sequences - 1
    actual = (
        first_s - record.arrival_s,
        (record.end_s - first_s) / gaps if gaps > 0 else 0.0,
        record.end_s - record.arrival_s,
    )
    return any(limit is not None and took > limit for limit, took in zip(limits, actual, strict=True))


def freeness(replica: ReplicaView, headroom_share: float = 0.0) -> float:
    """`F = (M - sum of V) / B` (eq. 1, 2), in KV blocks per running request; -inf while the replica drains.

    Virtual usage V sums the blocks that the first waiting request needs, the blocks in use, and `headroom_share` of the
    M blocks. Other waiting requests do not count. B is the number of running requests, at least 1. Computed from
    counters alone.
    """
    if replica.is_draining:
        return -inf
    total = replica.kv_blocks_total
    left = total - replica.kv_blocks_used - replica.head_demand_blocks - total * headroom_share
    return left / max(replica.num_running, 1)


def full_freeness(replica: ReplicaView, headroom: Headroom) -> float:
    """Freeness with headroom, for dispatch and migration (section 3.4)."""
    return freeness(replica, headroom.share(tier for tier, num in replica.num_by_tier.items() if num > 0))


def free_share(replica: ReplicaView) -> float:
    """Normal freeness as a share of an empty replica's freeness, `(M - sum of V) / M`: at most 1 for every M and B."""
    total = max(replica.kv_blocks_total, 1)
    return (total - replica.kv_blocks_used - replica.head_demand_blocks) / total
