"""What it costs to be sure of a demand that is not known, and plans over limits and prices."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from headway.core.errors import HeadwayError
from headway.planning.combos.problem import (
    ComboCandidate,
    ComboProblem,
    GpuCombo,
    Group,
    ServiceDemand,
)
from headway.planning.combos.search import deploy
from headway.planning.combos.uncertainty import UncertainDemand, frontier, robust


def candidate(gpu: str, goodput: float, usd: float, service: str = "chat") -> ComboCandidate:
    return ComboCandidate(service, GpuCombo("llama", usd, aggregated=Group(gpu)), goodput, goodput * 1e6 / usd)


SOME = (candidate("h800", 2.0, 2.69), candidate("a800", 0.8, 1.19), candidate("h20", 1.2, 1.5))
BOTH = (*SOME, *(candidate(each.combo.groups[0].gpu, 1.0, each.combo.usd_per_hour, "write") for each in SOME))
CHAT = UncertainDemand("chat", (0.05, 0.5, 0.9, 0.99), (1.0, 4.0, 8.0, 14.0))
WRITE = UncertainDemand("write", (0.05, 0.5, 0.9, 0.99), (0.5, 1.0, 1.5, 3.0))


def test_quantiles_and_chances_by_hand() -> None:
    assert CHAT.at(0.5) == 4.0 and CHAT.at(0.7) == pytest.approx(6.0)
    assert CHAT.chance(6.0) == pytest.approx(0.7) and CHAT.chance(14.0) == CHAT.chance(99.0) == 0.99
    assert CHAT.chance(0.9) == 0.0
    for quantile in (0.01, 0.999):
        with pytest.raises(HeadwayError, match=r"chat: quantile .* is not known; expected 0.05 to 0.99"):
            CHAT.at(quantile)


@given(st.floats(0.05, 0.99))
def test_the_chance_of_a_quantile_is_the_quantile(quantile: float) -> None:
    assert CHAT.chance(CHAT.at(quantile)) == pytest.approx(quantile)


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


def test_more_gpus_never_cost_more() -> None:
    problem = ComboProblem((ServiceDemand("chat", 7.0),), SOME, {"h800": 8, "a800": 8, "h20": 0}, "mc")
    plans = [deploy(structs.replace(problem, limits={**problem.limits, "h20": num}), explain=False) for num in range(9)]
    prices = [plan.usd_per_hour for plan in plans]
    assert prices == sorted(prices, reverse=True) and prices[0] > prices[-1]


@pytest.mark.parametrize(
    ("quantiles", "rps"),
    [
        ((), ()),
        ((0.5,), (1.0, 2.0)),
        ((0.9, 0.5), (1.0, 2.0)),
        ((0.5, 1.1), (1.0, 2.0)),
        ((0.5, 0.9), (2.0, 1.0)),
        ((0.5,), (-1.0,)),
        ((0.5,), (float("inf"),)),
    ],
)
def test_demands_that_make_no_sense_are_refused(quantiles: tuple[float, ...], rps: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="chat"):
        UncertainDemand("chat", quantiles, rps)
