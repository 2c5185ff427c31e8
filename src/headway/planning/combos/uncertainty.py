"""Deployments for uncertain demand: the cost of certainty."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, prod

import numpy as np
from msgspec import Struct, structs

from headway.core.errors import HeadwayError
from headway.planning.combos.problem import (
    ComboPlan,
    ComboProblem,
    ServiceDemand,
)
from headway.planning.combos.search import deploy

DEFAULT_QUANTILES = (0.5, 0.8, 0.9, 0.95, 0.99)


class UncertainDemand(Struct, frozen=True, forbid_unknown_fields=True):
    """A service's demand as forecast quantiles, with linear interpolation between them."""

    service: str
    quantiles: tuple[float, ...]
    """Increasing quantiles within 0 to 1."""
    rps: tuple[float, ...]
    """Rate at each quantile, nondecreasing."""
    tokens_per_request: float | None = None

    def __post_init__(self) -> None:
        if not self.quantiles or len(self.quantiles) != len(self.rps):
            raise ValueError(f"{self.service}: {len(self.quantiles)} quantiles, {len(self.rps)} rps; expected as many")
        rising = all(low < high for low, high in zip(self.quantiles, self.quantiles[1:], strict=False))
        if not rising or not 0 <= self.quantiles[0] <= self.quantiles[-1] <= 1:
            raise ValueError(f"{self.service}: quantiles: expected them rising, from 0 to 1")
        if not self.rps[0] >= 0 or list(self.rps) != sorted(self.rps) or self.rps[-1] == inf:
            raise ValueError(f"{self.service}: rps: expected 0 or more, never falling")

    def at(self, quantile: float) -> float:
        """The rate that demand exceeds with probability 1 - quantile. HeadwayError outside of the known quantiles."""
        first, last = self.quantiles[0], self.quantiles[-1]
        if not first <= quantile <= last:
            raise HeadwayError(f"{self.service}: quantile {quantile:g} is not known; expected {first:g} to {last:g}")
        return float(np.interp(quantile, self.quantiles, self.rps))

    def chance(self, rps: float) -> float:
        """Lower bound of the probability that demand does not exceed this rate: 0 below the first quantile, the last
        quantile above all."""
        if rps < self.rps[0]:
            return 0.0
        at = max(i for i, each in enumerate(self.rps) if each <= rps)
        if at == len(self.rps) - 1:
            return self.quantiles[-1]
        share = (rps - self.rps[at]) / (self.rps[at + 1] - self.rps[at])
        return self.quantiles[at] + share * (self.quantiles[at + 1] - self.quantiles[at])


class Robust(Struct, frozen=True, forbid_unknown_fields=True):
    """A plan for one quantile of every service's demand, and the probability that it suffices.

    Whole combos serve more than the demand they were bought for, so the probabilities refer to the plan's goodput.
    """

    quantile: float
    plan: ComboPlan
    usd_per_hour: float
    chances: dict[str, float]
    """Probability by service."""
    least_chance_of_all: float
    """Probability that every service is served, for any dependence of their demands."""
    independent_chance_of_all: float
    """The same probability for independent demands."""
    most_chance_of_all: float
    """The same probability for demands that rise and fall together."""


def frontier(
    problem: ComboProblem,
    demands: Sequence[UncertainDemand],
    quantiles: Sequence[float] = DEFAULT_QUANTILES,
    time_limit_s: float = 10.0,
) -> tuple[Robust, ...]:
    """Cost against the probability of sufficing. The problem's own demands are ignored."""
    return tuple(robust(problem, demands, quantile, time_limit_s) for quantile in quantiles)


def robust(
    problem: ComboProblem, demands: Sequence[UncertainDemand], quantile: float, time_limit_s: float = 10.0
) -> Robust:
    """The plan for this quantile of each service's demand."""
    at_quantile = tuple(ServiceDemand(each.service, each.at(quantile), each.tokens_per_request) for each in demands)
    robust_plan = deploy(structs.replace(problem, demands=at_quantile), time_limit_s, explain=False)
    goodput = {got.service: got.goodput_rps for got in robust_plan.services}
    chances = {each.service: each.chance(goodput[each.service] * (1 + 1e-9)) for each in demands}
    values = list(chances.values())
    least = max(0.0, sum(values) - (len(values) - 1))
    return Robust(quantile, robust_plan, robust_plan.usd_per_hour, chances, least, prod(values), min(values))
