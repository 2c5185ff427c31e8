"""The cost of being sure of a demand that is not known."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.planning.combos.problem import ComboCandidate, ComboProblem, GpuCombo, Group
from headway.planning.combos.uncertainty import UncertainDemand
from headway_papers.reproduce.cauchy.certainty import frontier, robust


def candidate(gpu: str, goodput: float, usd: float, service: str = "chat") -> ComboCandidate:
    return ComboCandidate(service, GpuCombo("llama", usd, aggregated=Group(gpu)), goodput, goodput * 1e6 / usd)


SOME = (candidate("h800", 2.0, 2.69), candidate("a800", 0.8, 1.19), candidate("h20", 1.2, 1.5))
BOTH = (*SOME, *(candidate(each.combo.groups[0].gpu, 1.0, each.combo.usd_per_hour, "write") for each in SOME))
CHAT = UncertainDemand("chat", (0.05, 0.5, 0.9, 0.99), (1.0, 4.0, 8.0, 14.0))
WRITE = UncertainDemand("write", (0.05, 0.5, 0.9, 0.99), (0.5, 1.0, 1.5, 3.0))


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(("co", "mc")), st.integers(4, 9))
def test_to_be_surer_costs_more_under_minimum_cost(objective: str, most: int) -> None:
    limits = {"h800": most, "h20": most}
    problem = ComboProblem((), BOTH, limits, objective)  # type: ignore[arg-type]
    points = frontier(problem, (CHAT, WRITE), (0.05, 0.5, 0.8, 0.9, 0.99))
    for point in points:
        assert point.plan.status == "optimal"
        assert all(chance >= point.quantile - 1e-6 for chance in point.chances.values())
        assert point.least_chance_of_all <= point.independent_chance_of_all <= point.most_chance_of_all
    if objective == "mc":
        assert all(a.usd_per_hour <= b.usd_per_hour + 1e-9 for a, b in pairwise(points))


def test_chances_against_draws() -> None:
    """Independent demands drawn by their quantiles: the share of draws that the plan serves."""
    point = robust(ComboProblem((), BOTH, {}, "mc"), (CHAT, WRITE), 0.8)
    goodput = {got.service: got.goodput_rps for got in point.plan.services}
    draws = np.random.default_rng(3).uniform(0.05, 0.99, (2, 200_000))
    served = [
        np.interp(u, each.quantiles, each.rps) <= goodput[each.service]
        for u, each in zip(draws, (CHAT, WRITE), strict=True)
    ]
    # what lies beyond the outer quantiles: 5% below, which is served, and 1% above, which may not be
    shares = [0.05 + 0.94 * each.mean() for each in served]
    assert shares == pytest.approx(list(point.chances.values()), abs=0.005)
    assert point.independent_chance_of_all == pytest.approx(shares[0] * shares[1], abs=0.01)


def test_gpus_that_are_too_few_show_in_the_chances() -> None:
    point = robust(ComboProblem((), SOME, {"h800": 1, "a800": 0, "h20": 0}), (CHAT,), 0.9)
    assert point.plan.status == "short" and point.chances["chat"] == pytest.approx(0.05 + 0.45 / 3)
