"""What it costs to be sure of a demand that is not known, and plans over limits and prices."""

from __future__ import annotations

import pytest
from hypothesis import given
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
from headway.planning.combos.uncertainty import UncertainDemand


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
