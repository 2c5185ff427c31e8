"""Tiers of requests: their objectives, and the tier mixes in the evaluation of K-tier Llumnix (section 4.2)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from msgspec import Struct

from headway.core.errors import HeadwayError
from headway.workload.arrivals import check_positive

MixName = Literal["uniform", "gaussian", "enterprise"]
MAX_TIERS = 10
"""The largest number of tiers in the paper (section 1)."""


def uniform(num_tiers: int) -> tuple[float, ...]:
    return (1 / num_tiers,) * num_tiers


def gaussian(num_tiers: int) -> tuple[float, ...]:
    """Normal density at each tier with centre floor(K / 2) and standard deviation K / 4, normalised to sum 1."""
    centre, deviation = num_tiers // 2, num_tiers / 4
    weights = [math.exp(-(((tier - centre) / deviation) ** 2) / 2) for tier in range(num_tiers)]
    return tuple(weight / sum(weights) for weight in weights)


def enterprise(num_tiers: int) -> tuple[float, ...]:
    """10% critical, 70% spread evenly over the middle tiers, 20% background.

    The paper gives about 10%, about 70% and 5 to 20%, which sum to 1 with the largest background share. It does not
    say how the 70% are spread; an even spread is our choice. With two tiers the lower one gets 90%.
    """
    if num_tiers <= 2:
        return (1.0,) if num_tiers == 1 else (0.1, 0.9)
    between = num_tiers - 2
    return (0.1, *[0.7 / between] * between, 0.2)


MIXES: dict[MixName, Callable[[int], tuple[float, ...]]] = {
    "uniform": uniform,
    "gaussian": gaussian,
    "enterprise": enterprise,
}


def tier_shares(mix: MixName, num_tiers: int) -> tuple[float, ...]:
    """The share of each of `num_tiers` tiers, tier 0 (the most urgent) first. Shares sum to 1."""
    if not 1 <= num_tiers <= MAX_TIERS:
        raise HeadwayError(f"num_tiers: {num_tiers}; expected 1 to {MAX_TIERS}")
    return MIXES[mix](num_tiers)


class SloSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """Service level objectives of a request. Default: no objective."""

    ttft_s: float | None = None
    """Longest time to the first token."""
    tpot_s: float | None = None
    """Longest mean time per output token after the first."""
    e2e_s: float | None = None
    """Longest time from arrival to the last token."""
    deadline_after_s: float | None = None
    """Deadline, counted from arrival, for deadline orderings (EDF)."""

    def __post_init__(self) -> None:
        check_positive(self, "ttft_s", "tpot_s", "e2e_s", "deadline_after_s")


class TierSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """One tier of requests and its objectives."""

    tier: int
    """0 is the most urgent."""
    share: float = 1.0
    """The tier's share of all requests, relative to the other tiers."""
    ttft_s: float | None = None
    """As in `slo`, for this tier; default: the value of `slo`."""
    tpot_s: float | None = None
    """As in `slo`."""
    e2e_s: float | None = None
    """As in `slo`."""
    deadline_after_s: float | None = None
    """As in `slo`."""
    timeout_s: float | None = None
    """As `timeout_s` of the workload, for this tier."""

    def __post_init__(self) -> None:
        if not 0 <= self.tier < 32768:
            raise ValueError(f"tier: {self.tier}; expected 0 or more")
        if not 0 <= self.share < float("inf"):
            raise ValueError(f"share: {self.share}; expected 0 or more")
        check_positive(self, "ttft_s", "tpot_s", "e2e_s", "deadline_after_s", "timeout_s")


class TierMix(Struct, frozen=True, forbid_unknown_fields=True):
    """Tiers by the name of a mix, as in the experiments of K-tier Llumnix. All tiers have the objectives of `slo`."""

    mix: MixName
    """uniform: equal shares. gaussian: most in the middle. enterprise: 10% in tier 0, 20% in the last one."""
    num_tiers: int
    """K: tiers 0 to K - 1; 1 to 10."""

    def __post_init__(self) -> None:
        try:
            tier_shares(self.mix, self.num_tiers)
        except HeadwayError as error:
            raise ValueError(str(error)) from None
