"""The program over regions as a scaler's planner: as good as the greedy one, and within GPU limits."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import FakePool, FakeReplica
from headway.core.errors import HeadwayError
from headway.planner.instances import RegionProgram
from headway.policies.cover import Cover

REGIONS = ("east", "west", "central")


def pool(model: str, region: str, num: int = 2, **given: Any) -> FakePool:
    replicas = [FakeReplica(i) for i in range(num)]
    config = {"min_replicas": 1, "max_replicas": 50, "gpu": "h100", "gpus": {"h100": 8}, **given}
    return FakePool(f"{model}-{region}", replicas, model=model, region=region, **config)


def cost(counts: Any, pools: list[FakePool], startup_s: float) -> float:
    deltas = [counts[one.name] - one.num_serving for one in pools]
    return sum(delta + startup_s / 3600 * max(delta, 0) for delta in deltas)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 6), min_size=6, max_size=6),
    st.lists(
        st.lists(st.sampled_from([0.0, 1e-40, *map(float, range(100))]), min_size=2, max_size=2), min_size=6, max_size=6
    ),
    st.sampled_from([1.0, 0.6]),
    st.sampled_from([60.0, 600.0]),
)
def test_with_one_kind_of_gpu_it_costs_what_the_greedy_plan_costs(
    nums: list[int], windows: list[list[float]], epsilon: float, startup_s: float
) -> None:
    cells = [(model, region) for model in ("m", "n") for region in REGIONS]
    pools = [pool(*cell, num) for cell, num in zip(cells, nums, strict=True)]
    demand = dict(zip(cells, windows, strict=True))
    tps = {"m": 10.0, "n": 25.0}
    exact = RegionProgram(tps, epsilon, startup_s, gap=0.0).instances(demand, pools)
    greedy = Cover(tps, epsilon, startup_s).instances(demand, pools)
    assert cost(exact, pools, startup_s) == pytest.approx(cost(greedy, pools, startup_s), abs=1e-6)


def test_limits_are_kept_and_others_gpus_are_taken() -> None:
    pools = [pool("m", "east"), pool("m", "west"), pool("x", "east", 3)]
    demand = {("m", "east"): [80.0], ("m", "west"): [10.0]}
    planner = RegionProgram({"m": 10.0}, epsilon=0.5)
    assert sum(planner.instances(demand, pools).values()) == 9
    limited = RegionProgram({"m": 10.0}, epsilon=0.5, gpu_limits=[("east", "h100", 64)])
    within = limited.instances(demand, pools)
    assert sum(within.values()) == 9
    assert 4 <= within["m-east"] <= 5  # three of eight are another model's
    full = RegionProgram({"m": 10.0}, epsilon=1.0, gpu_limits=[("east", "h100", 64), ("west", "h100", 16)])
    assert full.instances(demand, pools) == {"m-east": 5, "m-west": 2}  # as much as there is room for


def test_demand_from_elsewhere_is_spread() -> None:
    pools = [pool("m", "east"), pool("m", "west")]
    found = RegionProgram({"m": 10.0, "not-there": 5.0}).instances(
        {("m", "moon"): [80.0], ("m", "east"): [20.0], ("y", "east"): [9.0]}, pools
    )
    assert found == {"m-east": 6, "m-west": 4}
    assert RegionProgram({}).instances({}, pools) == {}


def test_pools_that_are_alike_are_refused() -> None:
    twins = [pool("m", "east"), pool("m", "east")]
    twins[1].name = "twin"
    with pytest.raises(HeadwayError, match="pools m-east and twin are of one model, region and GPU"):
        RegionProgram({"m": 1.0}).instances({}, twins)
