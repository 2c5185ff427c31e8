"""How much of the traffic each tier gets: the mixes of K tiers that K-tier Llumnix is measured with (section 4.2)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from headway.core.errors import HeadwayError

MixName = Literal["uniform", "gaussian", "enterprise"]
MAX_TIERS = 10
"""The paper goes no further (section 1)."""


def uniform(num_tiers: int) -> tuple[float, ...]:
    """1 / K each."""
    return (1 / num_tiers,) * num_tiers


def gaussian(num_tiers: int) -> tuple[float, ...]:
    """The density of a normal distribution at each tier, centre floor(K / 2), standard deviation K / 4, scaled to 1."""
    centre, deviation = num_tiers // 2, num_tiers / 4
    weights = [math.exp(-(((tier - centre) / deviation) ** 2) / 2) for tier in range(num_tiers)]
    return tuple(weight / sum(weights) for weight in weights)


def enterprise(num_tiers: int) -> tuple[float, ...]:
    """10% critical, 70% spread evenly over the tiers between, 20% background.

    The paper says about 10%, about 70% and 5 to 20%, which sum to 1 with the most background; how the 70% lie
    over the tiers between is our choice. Of two tiers, which have none between, the lower gets the other 90%.
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


def shares(mix: MixName, num_tiers: int) -> tuple[float, ...]:
    """The share of each tier of `num_tiers`, tier 0 (the most urgent) first; they sum to 1."""
    if not 1 <= num_tiers <= MAX_TIERS:
        raise HeadwayError(f"num_tiers: {num_tiers}; expected 1 to {MAX_TIERS}")
    return MIXES[mix](num_tiers)
