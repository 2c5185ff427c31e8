"""What it costs to be sure of a demand that is not known, and plans over limits and prices."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway import catalog
from headway.core.errors import HeadwayError
from headway.planning.combos.estimate import FluidEstimate
from headway.planning.combos.problem import (
    ComboCandidate,
    ComboProblem,
    ComboService,
    Counts,
    GpuCombo,
    Group,
    Offer,
    ServiceDemand,
    ServiceSlo,
    WorkloadPattern,
)
from headway.reproduce.cauchy.uncertainty import Remembered, UncertainDemand, frontier, limit_sweep, price_sweep, robust


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
    points = limit_sweep(problem, "h20", range(9))
    assert [point.value for point in points] == list(range(9))
    prices = [point.plan.usd_per_hour for point in points]
    assert prices == sorted(prices, reverse=True) and prices[0] > prices[-1]


class Counting:
    """The estimate, and how often it was asked."""

    def __init__(self, estimate: FluidEstimate) -> None:
        self.estimate, self.asked = estimate, 0

    def goodput_rps(self, combo: GpuCombo, workload: WorkloadPattern, slo: ServiceSlo) -> float:
        self.asked += 1
        return self.estimate.goodput_rps(combo, workload, slo)


def test_a_type_that_gets_dearer_is_used_less_and_profiled_once() -> None:
    model, engine = catalog.model("llama-3.1-8b"), catalog.engine("vllm-v0")
    offers = [Offer(catalog.gpu(name), 8, gpus_per_server=2) for name in ("h800", "a800-pcie", "h20")]
    estimate = Counting(FluidEstimate({model.name: model}, {each.gpu.name: each.gpu for each in offers}, engine))
    service = ComboService("chat", model, engine, WorkloadPattern("sharegpt", 290, 207), ServiceSlo(5.0, 0.03))
    counts = Counts(prefill=(1,), decode=(1, 2), aggregated=(1,), same_type=False)
    demands = (ServiceDemand("chat", 100.0, 497.0),)
    points = price_sweep(
        [service], offers, estimate, demands, "h20-96gb", (0.1, 0.8, 1.5, 4.0), counts, {"objective": "mc"}
    )
    used = [point.plan.gpus.get("h20-96gb", 0) for point in points]
    assert used == sorted(used, reverse=True) and used[0] > used[-1] == 0
    costs = [point.plan.usd_per_hour for point in points]
    assert costs == sorted(costs)
    # three aggregated, and both sizes of each direction at most
    assert estimate.asked <= 3 + 2 * 6
    with pytest.raises(HeadwayError, match="a10 is not on offer"):
        price_sweep([service], offers, estimate, demands, "a10", (1.0,))


def test_a_remembered_profile_is_the_profile() -> None:
    class Odd:
        def goodput_rps(self, combo: GpuCombo, workload: WorkloadPattern, slo: ServiceSlo) -> float:
            return combo.groups[0].instances * workload.prompt_tokens + (slo.ttft_s or 0.0)

    known = Remembered(Odd())
    combos = [GpuCombo("llama", usd, aggregated=Group("h20", 1, n)) for usd in (1.0, 2.0) for n in (1, 2)]
    for pattern, slo in (
        (WorkloadPattern(None, 3, 4), ServiceSlo(1.0)),
        (WorkloadPattern(None, 5, 4), ServiceSlo(2.0)),
    ):
        for combo in combos * 2:
            assert known.goodput_rps(combo, pattern, slo) == Odd().goodput_rps(combo, pattern, slo)


@pytest.mark.parametrize(("quantiles", "rps"), [
    ((), ()), ((0.5,), (1.0, 2.0)), ((0.9, 0.5), (1.0, 2.0)), ((0.5, 1.1), (1.0, 2.0)), ((0.5, 0.9), (2.0, 1.0)),
    ((0.5,), (-1.0,)), ((0.5,), (float("inf"),)),
])  # fmt: skip
def test_demands_that_make_no_sense_are_refused(quantiles: tuple[float, ...], rps: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="chat"):
        UncertainDemand("chat", quantiles, rps)
