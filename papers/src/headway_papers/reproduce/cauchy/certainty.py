"""Deployments for uncertain demand: the cost of certainty."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from msgspec import Struct, structs

from headway.planning.combos.problem import ComboPlan, ComboProblem, ServiceDemand
from headway.planning.combos.search import deploy
from headway.planning.combos.uncertainty import UncertainDemand


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
    """Probability that every service is served, for independent demands."""
    most_chance_of_all: float
    """Probability that every service is served, for demands that rise and fall together."""


def frontier(
    problem: ComboProblem,
    demands: Sequence[UncertainDemand],
    quantiles: Sequence[float],
) -> tuple[Robust, ...]:
    """Cost against the probability of sufficing. The problem's own demands are ignored."""
    return tuple(robust(problem, demands, quantile) for quantile in quantiles)


def robust(problem: ComboProblem, demands: Sequence[UncertainDemand], quantile: float) -> Robust:
    """The plan for this quantile of each service's demand."""
    at_quantile = tuple(ServiceDemand(each.service, each.at(quantile), each.tokens_per_request) for each in demands)
    robust_plan = deploy(structs.replace(problem, demands=at_quantile), explain=False)
    goodput = {got.service: got.goodput_rps for got in robust_plan.services}
    chances = {each.service: each.chance(goodput[each.service] * (1 + 1e-9)) for each in demands}
    values = list(chances.values())
    least = max(0.0, sum(values) - (len(values) - 1))
    return Robust(quantile, robust_plan, robust_plan.usd_per_hour, chances, least, prod(values), min(values))
