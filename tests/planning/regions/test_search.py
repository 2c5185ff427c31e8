"""SageServe's program against brute force and a checker of its own, its bounds, and what it says when it cannot."""

from __future__ import annotations

from itertools import product
from math import ceil, inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from headway.core.errors import HeadwayError
from headway.planning.regions.problem import (
    InstanceBounds,
    InstanceKind,
    PresentInstances,
    RegionPlan,
    RegionProblem,
    requirements,
    worthwhile_quantile,
)
from headway.planning.regions.search import plan

pytest.importorskip("scipy")
MOST = 3
REGIONS = ("east", "west")
SMALL = InstanceKind("m", "a100", 100.0, 4.0, 600.0)
LARGE = InstanceKind("m", "h100", 180.0, 7.0, 900.0)
OTHER = InstanceKind("n", "a100", 50.0, 4.0, 600.0)


def faults(problem: RegionProblem, found: RegionPlan) -> list[str]:
    """Requirements checked by sums over the instances alone."""
    kinds = {(k.model, k.gpu): k for k in problem.kinds}
    before = {(h.model, h.region, h.gpu): h.count for h in problem.have}
    have, wrong, gamma, mu = dict(before), [], 0.0, 0.0
    for t, demand in enumerate(problem.demand):
        after = found.after(t)
        for key in before.keys() | after.keys() | have.keys():
            kind, now = kinds[key[0], key[2]], after.get(key, 0)
            gamma += (now - have.get(key, 0)) * kind.usd_per_hour * problem.period_s / 3600
            mu += max(0, now - before.get(key, 0)) * kind.usd_per_hour * kind.startup_s / 3600
            wrong += [f"{key} {now}"] if now < 0 else []
        for model in problem.models:
            by_region = demand.get(model, {})
            tps = {
                r: sum(n * kinds[m, g].tps for (m, at, g), n in after.items() if (m, at) == (model, r))
                for r in problem.regions
            }
            for r in problem.regions:
                if tps[r] < problem.epsilon * max(by_region.get(r, (0.0,))) - 1e-3:
                    wrong.append(f"{model} in {r}: {tps[r]}")
                if sum(n for (m, at, _), n in after.items() if (m, at) == (model, r)) < problem.least:
                    wrong.append(f"{model} in {r}: too few")
            windows = range(max((len(w) for w in by_region.values()), default=0))
            if windows and sum(tps.values()) < max(sum(by_region[r][w] for r in by_region) for w in windows) - 1e-3:
                wrong.append(f"{model}: {sum(tps.values())}")
        for each in problem.bounds:
            now = after.get((each.model, each.region, each.gpu), 0)
            wrong += [f"{each}: {now}"] if not each.least <= now <= (inf if each.most is None else each.most) else []
        for r, by_gpu in problem.limits.items():
            for gpu, limit in by_gpu.items():
                used = sum(n * kinds[m, g].gpus for (m, at, g), n in after.items() if (at, g) == (r, gpu))
                wrong += [f"{gpu} in {r}: {used}"] if used > limit else []
        before = after
    wrong += [f"gamma {gamma}"] if abs(gamma - found.vm_usd) > 1e-6 else []
    wrong += [f"mu {mu}"] if abs(mu - found.deployment_usd) > 1e-6 else []
    return wrong


def brute_force(problem: RegionProblem) -> float:
    """gamma + mu at its least over every number of instances up to `MOST` of each, written as in section 5."""
    places = list(product(problem.kinds, problem.regions))
    n = {(h.model, h.region, h.gpu): h.count for h in problem.have}
    (demand,), best = problem.demand, inf
    bounds = {(each.model, each.region, each.gpu): (each.least, each.most) for each in problem.bounds}
    choices = []
    for k, r in places:
        fewest, most = bounds.get((k.model, r, k.gpu), (0, None))
        tried = MOST + 2 if problem.bounds else MOST  # what one place may not have, another one must
        choices.append(range(fewest, (tried if most is None else min(most, tried)) + 1))
    for x in product(*choices):

        def served(model: str, regions: tuple[str, ...], x: tuple[int, ...] = x) -> float:
            return sum(c * k.tps for c, (k, r) in zip(x, places, strict=True) if k.model == model and r in regions)

        fits = (
            all(
                served(m, (r,)) >= max(problem.epsilon * rho for rho in by_region[r]) - 1e-9
                for m, by_region in demand.items()
                for r in by_region
            )
            and all(
                served(m, problem.regions) >= max(sum(w) for w in zip(*by_region.values(), strict=True)) - 1e-9
                for m, by_region in demand.items()
            )
            and all(
                sum(c * k.gpus for c, (k, at) in zip(x, places, strict=True) if (at, k.gpu) == (r, g)) <= limit
                for r, by_gpu in problem.limits.items()
                for g, limit in by_gpu.items()
            )
        )
        if fits:
            delta = [c - n.get((k.model, r, k.gpu), 0) for c, (k, r) in zip(x, places, strict=True)]
            gamma = sum(k.usd_per_hour * d for d, (k, _) in zip(delta, places, strict=True))
            sigma = [k.usd_per_hour * k.startup_s / 3600 for k, _ in places]
            best = min(best, gamma + sum(s * max(0, d) for s, d in zip(sigma, delta, strict=True)))
    return best


@st.composite
def problems(draw: st.DrawFn) -> RegionProblem:
    kinds = draw(st.sampled_from([(SMALL,), (SMALL, LARGE), (SMALL, OTHER)]))
    kinds = tuple(
        replace(k, gpus=draw(st.integers(1, 2)), startup_s=draw(st.sampled_from([0.0, 600.0]))) for k in kinds
    )
    rho = st.integers(0, 12).map(lambda tens: 10.0 * tens)
    demand = {k.model: {r: (draw(rho), draw(rho)) for r in REGIONS} for k in kinds}
    have = tuple(PresentInstances(k.model, r, k.gpu, draw(st.integers(0, MOST))) for k in kinds for r in REGIONS)
    limits = {"east": {"a100": draw(st.integers(2, 6))}} if draw(st.booleans()) else {}
    bounds = tuple(
        InstanceBounds(k.model, r, k.gpu, fewest := draw(st.integers(0, 1)), draw(st.integers(fewest, 3) | st.none()))
        for k in kinds
        for r in REGIONS
        if draw(st.booleans()) and not (limits and r == "east")
    )
    epsilon = draw(st.sampled_from([0.3, 0.7, 1.0]))
    return RegionProblem(kinds, REGIONS, (demand,), have, limits, epsilon, bounds=bounds)


@given(problems())
@settings(max_examples=40, deadline=None)
def test_as_cheap_as_brute_force(problem: RegionProblem) -> None:
    found, best = plan(problem, gap=0.0), brute_force(problem)
    assert not faults(problem, found) or found.status == "short"
    assert not faults(replace(problem, demand=({},)), found), "short plans, too, keep to limits and bounds"
    if best == inf:
        assert found.status == "short" and found.why
    else:
        assert found.status == "optimal"
        assert found.objective_usd == pytest.approx(best, abs=1e-6)
        assert found.bound_usd == pytest.approx(best, abs=1e-4)


def fleet(
    num_models: int, regions: tuple[str, ...], num_gpus: int, periods: int = 1, **changes: object
) -> RegionProblem:
    """Random, at the scale of the paper's experiments."""
    kinds = tuple(
        InstanceKind(f"m{i}", f"g{k}", 100.0 * (1 + i) * (1 + 0.7 * k), 30.0 * (1 + 0.6 * k), 600.0, 8)
        for i in range(num_models)
        for k in range(num_gpus)
    )
    demand = tuple(
        {
            f"m{i}": {
                r: tuple(500.0 + (137 * i + 311 * j + 53 * w + 211 * t) % 3000 for w in range(4))
                for j, r in enumerate(regions)
            }
            for i in range(num_models)
        }
        for t in range(periods)
    )
    have = tuple(
        PresentInstances(k.model, r, k.gpu, (3 * i + j) % 9) for i, k in enumerate(kinds) for j, r in enumerate(regions)
    )
    return RegionProblem(kinds, regions, demand, have, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("periods", [1, 3])
def test_plans_of_larger_problems_hold_within_the_gap(periods: int) -> None:
    problem = fleet(5, ("e", "c", "w"), 2, periods, epsilon=0.6, least=2, limits={"e": {"g0": 400}})
    found = plan(problem, time_limit_s=5.0, gap=0.02)
    assert not faults(problem, found)
    assert found.status in ("optimal", "feasible") and found.bound_usd is not None and found.gap is not None
    assert found.bound_usd <= found.objective_usd and found.gap < 0.04
    assert found.objective_usd == found.vm_usd + found.deployment_usd


def one(demand: float, have: int = 0, **changes: object) -> RegionProblem:
    return RegionProblem(
        (SMALL,), ("east",), ({"m": {"east": (demand,)}},), (PresentInstances("m", "east", "a100", have),), **changes
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(("demand", "have"), [(250, 0), (250, 7), (300, 3), (0, 4)])
def test_one_model_by_hand(demand: float, have: int) -> None:
    found, needed = plan(one(demand, have)), ceil(demand / 100)
    assert found.after().get(("m", "east", "a100"), 0) == needed
    assert found.vm_usd == 4.0 * (needed - have)
    assert found.deployment_usd == pytest.approx(4.0 * 600 / 3600 * max(0, needed - have))


def test_a_smaller_epsilon_lets_other_regions_serve() -> None:
    have = (PresentInstances("m", "west", "a100", 8),)
    demand = ({"m": {"east": (400.0, 0.0), "west": (0.0, 300.0)}},)
    alone = RegionProblem((SMALL,), REGIONS, demand, have)
    shared = replace(alone, epsilon=0.5)
    assert plan(alone).after() == {("m", "east", "a100"): 4, ("m", "west", "a100"): 3}
    found = plan(shared).after()
    assert found[("m", "east", "a100")] == 2 and sum(found.values()) == 4  # the most at any one time


def test_an_instance_stays_for_a_quiet_hour_if_starting_it_again_costs_more() -> None:
    calm = ({"m": {"east": (100.0,)}}, {"m": {"east": (300.0,)}})

    def after(startup_s: float) -> int:
        kinds = (replace(SMALL, startup_s=startup_s),)
        problem = RegionProblem(kinds, ("east",), calm, (PresentInstances("m", "east", "a100", 3),))
        found = plan(problem)
        assert not faults(problem, found)
        return found.after(0)[("m", "east", "a100")]

    assert after(1800) == 1  # half an hour's price to start, a whole one to keep
    assert after(7200) == 3


def test_binding_constraints_and_their_cost() -> None:
    limited = {"east": {"h100": 1}}
    problem = RegionProblem((SMALL, LARGE), ("east",), ({"m": {"east": (360.0,)}},), limits=limited)
    found = plan(problem, gap=0.0, explain=True)
    assert found.status == "optimal" and not faults(problem, found)
    binding = {each.kind: each for each in found.binding}
    assert binding["region demand"].limit == 360
    assert binding["gpus"].name == "h100 in east"
    assert binding["gpus"].objective_without == pytest.approx(2 * 7 * 1.25)  # two large ones
    assert binding["gpus"].objective_without < found.objective_usd
    assert plan(one(50.0, limits={"east": {"a100": 9}})).binding[0].kind != "gpus"


def test_a_short_plan_names_the_shortfalls() -> None:
    found = plan(one(1000.0, have=1, limits={"east": {"a100": 4}}))
    assert found.status == "short"
    assert found.after() == {("m", "east", "a100"): 4}
    assert "m in east lacks 600 of 1,000 tokens/s in period 0" in found.why
    assert "no room is left in a100 in east (4 GPUs)" in found.why
    few = plan(one(100.0, least=3, limits={"east": {"a100": 2}}))
    assert "m in east lacks 1 of 3 instances" in few.why


def test_instances_beyond_the_limit_of_a_region_are_stopped() -> None:
    found = plan(one(100.0, have=9, limits={"east": {"a100": 4}}))
    assert found.status == "optimal" and found.after() == {("m", "east", "a100"): 1}


def test_requirements_follow_peaks() -> None:
    demand = ({"m": {"east": (10.0, 40.0), "west": (30.0, 5.0)}},)
    found = {
        (each.kind, each.name): each.at_least
        for each in requirements(RegionProblem((SMALL,), REGIONS, demand, epsilon=0.5))
    }
    assert found == {("region demand", "m in east"): 20, ("region demand", "m in west"): 15, ("global demand", "m"): 45}


@pytest.mark.parametrize("tps", [1e-12, 1e-15, 1e-40])
def test_a_rounding_error_is_no_demand(tps: float) -> None:
    problem = RegionProblem((SMALL,), REGIONS, ({"m": {"east": (tps,)}},), (PresentInstances("m", "east", "a100", 2),))
    found = plan(problem)
    assert found.status == "optimal" and not any(found.after().values())


def test_the_worthwhile_quantile() -> None:
    assert worthwhile_quantile(9.0, 1.0) == 0.9
    with pytest.raises(HeadwayError, match="not both 0"):
        worthwhile_quantile(0.0, 0.0)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"have": (PresentInstances("m", "north", "a100", 1),)}, "1 of m on a100 in north"),
        ({"limits": {"north": {"a100": 1}}}, "limits: unknown region 'north'"),
        ({"demand": ({"k": {"east": (1.0,)}},)}, "unknown model 'k'"),
        ({"demand": ({"m": {"wst": (1.0,)}},)}, "unknown region 'wst'"),
        ({"demand": ({"m": {"east": (-1.0,)}},)}, "expected numbers from 0"),
        ({"demand": ({"m": {"east": (1.0,), "west": (1.0, 2.0)}},)}, "windows"),
        ({"kinds": (SMALL, SMALL)}, "is listed twice"),
    ],
)
def test_contradictory_problems_are_refused(change: dict[str, object], expected: str) -> None:
    problem = RegionProblem((SMALL,), REGIONS, ({"m": {"east": (1.0,)}},))
    with pytest.raises(HeadwayError, match=expected):
        plan(replace(problem, **change))


@pytest.mark.parametrize("changes", [{"epsilon": 0.0}, {"epsilon": 1.5}, {"least": -1}, {"period_s": 0.0}])
def test_invalid_values_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected"):
        one(1.0, **changes)


def test_a_bound_moves_instances_to_the_region_that_may_have_them() -> None:
    """By hand: east may have 2 of the 4 that its 400 tokens/s need, just its epsilon of a half; all need 5: west 3."""
    demand = ({"m": {"east": (400.0,), "west": (100.0,)}},)
    bounds = (InstanceBounds("m", "east", "a100", 0, 2), InstanceBounds("m", "west", "a100", 0, 8))
    problem = RegionProblem((SMALL,), REGIONS, demand, epsilon=0.5, bounds=bounds)
    found = plan(problem)
    assert found.after() == {("m", "east", "a100"): 2, ("m", "west", "a100"): 3}
    assert plan(replace(problem, epsilon=1.0)).status == "short"
    above = replace(problem, have=(PresentInstances("m", "east", "a100", 6),))
    assert plan(above).after() == found.after(), "instances beyond the bound are stopped"


def test_each_place_has_its_own_bounds() -> None:
    """Brute force: the cheapest numbers that cover demand within the bounds, written out."""
    demand = {"m": {"e": (150.0,), "w": (50.0,)}}
    own = (InstanceBounds("m", "e", "a100", 0, 2), InstanceBounds("m", "w", "a100", 4))
    problem = RegionProblem((SMALL,), ("e", "c", "w"), (demand,), bounds=own)
    found = plan(problem)
    cheapest = min((e + c + w, (e, c, w)) for e, c, w in product(range(3), range(7), range(4, 7)) if e >= 2)
    assert tuple(found.after().get(("m", r, "a100"), 0) for r in ("e", "c", "w")) == cheapest[1]
    assert not faults(problem, found)


def test_bounds_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="m on a100 in e: 3 to 2 instances"):
        InstanceBounds("m", "e", "a100", 3, 2)
    with pytest.raises(HeadwayError, match="bounds: m on a100 in x: unknown"):
        plan(one(1.0, bounds=(InstanceBounds("m", "x", "a100", 1),)))
    with pytest.raises(HeadwayError, match="a100 in east: the fewest instances have 3 GPUs; the limit is 2"):
        plan(one(1.0, bounds=(InstanceBounds("m", "east", "a100", 3),), limits={"east": {"a100": 2}}))


def test_a_short_plan_names_the_bound() -> None:
    found = plan(one(1000.0, bounds=(InstanceBounds("m", "east", "a100", 0, 4),)))
    assert found.status == "short" and found.after() == {("m", "east", "a100"): 4}
    assert found.why.endswith("no room is left in m on a100 in east (4 instances)")
    bound = plan(one(400.0, bounds=(InstanceBounds("m", "east", "a100", 0, 4),)), explain=True).binding
    assert [each.name for each in bound if each.kind == "most"] == ["m on a100 in east"]
