"""Cascades on GPUs of several types: allocation, plans and costs against brute force."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from tests.support.allocation_program import least_max_milp

from cascade_queues import GPU, HonestBounds, Queue, problem, searched
from headway.core.errors import HeadwayError
from headway.planning.cascade.allocation import GpuBudget, least_cost, least_max, least_sum
from headway.planning.cascade.candidates import candidates, plan
from headway.planning.cascade.deployment import StageLatencies
from headway.planning.cascade.latency_bounds import NoBounds
from headway.planning.cascade.planners import cascade_serve, equal_shares, uniform_allocation, uniform_parallelism
from headway.planning.cascade.problem import CascadePlan, CascadeProblem, Cheapest, LatencyBudget, QualityFloor, Target
from headway.planning.cascade.replica_sets import all_sets
from headway.planning.cascade.search import Effort, Search
from headway.planning.combos.problem import Offer
from headway_papers.reproduce.cascadia.exhaustive import exhaustive

ALL = Effort(stable_rounds=None, gap=0.0)
CHEAP = structs.replace(GPU, name="cheap", memory_bytes=40e9, usd_per_hour=0.7)
SPEED = {"cheap": 0.45}


def queue() -> Queue:
    return Queue(speed=SPEED)


def unlike(num: int, others: int, target: Target, seed: int = 0, stages: int = 2, **given: object) -> CascadeProblem:
    asked = problem(stages, num, 3.0, target, seed, num_requests=8, max_pp=1, max_kinds=1, **given)
    return replace(asked, other_offers=(Offer(CHEAP, others, gpus_per_server=2),))


def taken(found: CascadePlan) -> dict[str, int]:
    by_type: dict[str, int] = {}
    for stage in found.stages:
        assert stage.num_gpus == sum(part.num_gpus for part in stage.replicas)
        for part in stage.replicas:
            by_type[part.gpu] = by_type.get(part.gpu, 0) + part.num_gpus
    return by_type


# Allocation.

LIMITS = st.lists(st.integers(0, 3), min_size=1, max_size=3).filter(any)


@pytest.mark.ci
@settings(max_examples=60, deadline=None)
@given(LIMITS, st.integers(1, 4), st.integers(0, 10_000))
def test_the_split_is_what_brute_force_finds(limits: list[int], stages: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    room = GpuBudget(tuple(limits), tuple(random.uniform(0.5, 4.0, len(limits))))
    tables = [random.uniform(0, 9, room.num_cells).round(1) for _ in range(stages)]
    for table in tables:
        table[random.random(room.num_cells) < 0.5] = inf
    left = room.without(int(random.integers(room.num_cells)))
    every = [
        cells
        for cells in product(*(np.flatnonzero(np.isfinite(table)).tolist() for table in tables))
        if (np.sum([room.vector(cell) for cell in cells], axis=0) <= left.left).all()
    ]
    largest = {cells: max(table[cell] for table, cell in zip(tables, cells, strict=True)) for cells in every}
    usd = {cells: sum(float(room.usd[cell]) for cell in cells) for cells in every}
    best = min(largest.values(), default=inf)
    found, by_program = least_max(tables, left), least_max_milp(tables, left)
    assert (found is None) == (by_program is None) == (not every)
    least = least_sum(tables, left, False)
    assert (least is None) == (not every)
    if found is None or by_program is None or least is None:
        return
    assert found.latency_s == best == largest[found.gpus] and by_program.latency_s == pytest.approx(best, abs=1e-5)
    assert found.usd_per_hour == pytest.approx(min(usd[cells] for cells in every if largest[cells] <= best))
    sums = {cells: sum(table[cell] for table, cell in zip(tables, cells, strict=True)) for cells in every}
    assert sums[least] == pytest.approx(min(sums.values()))
    within_s = float(np.median(list(largest.values())))
    cheapest = least_cost(tables, left, within_s)
    assert cheapest is not None and largest[cheapest.gpus] <= within_s
    assert usd[cheapest.gpus] == pytest.approx(min(usd[cells] for cells in every if largest[cells] <= within_s))


def test_sets_are_all_there_are() -> None:
    asked = unlike(2, 3, QualityFloor(60.0))
    sets = all_sets(replace(asked, max_types=2))(0, (True, True))
    counts = [
        (one, two, three, four)
        for one, two, three, four in product(range(3), range(2), range(4), range(2))
        if one + 2 * two <= 2 and three + 2 * four <= 3 and not (one and two) and not (three and four)
    ]
    assert sorted(map(tuple, sets.counts.tolist())) == sorted(each for each in counts if any(each))
    assert {sets[i].label for i in range(len(sets))} >= {"2 x gpu tp 1, 1 x cheap tp 2", "3 x cheap tp 1"}
    alone = all_sets(replace(asked, max_types=1))(0, (True, True))
    assert not (alone.vectors > 0).all(axis=1).any() and len(alone) < len(sets)


# Plans.

TARGETS = st.one_of(
    st.builds(QualityFloor, st.floats(20.0, 100.0)),
    st.builds(LatencyBudget, st.floats(0.3, 8.0)),
    st.builds(Cheapest, st.floats(20.0, 95.0), st.floats(0.5, 8.0)),
)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 4), st.integers(1, 4), st.integers(1, 3), TARGETS, st.booleans())
def test_a_full_look_finds_what_exhaustive_search_finds(
    seed: int, num: int, others: int, stages: int, target: Target, one_type: bool
) -> None:
    asked = unlike(num, others, target, seed, stages)
    if one_type:
        asked = replace(asked, other_offers=())
    try:
        oracle = exhaustive(asked, StageLatencies(queue()))
    except HeadwayError:
        with pytest.raises(HeadwayError, match="no set of replicas serves"):
            plan(asked, StageLatencies(queue()), HonestBounds(queue(), seed), ALL)
        return
    found = plan(asked, StageLatencies(queue()), HonestBounds(queue(), seed), ALL)
    assert found.objective == pytest.approx(oracle.objective)
    if not isinstance(target, Cheapest):
        assert found.latency_s == pytest.approx(oracle.latency_s)
    else:
        assert found.latency_s <= target.latency_s
    limits = {"": num} if one_type else {"gpu": num, "cheap": others}
    assert all(num_gpus <= limits[name] for name, num_gpus in taken(found).items())


def test_a_type_that_no_model_fits_on_changes_nothing() -> None:
    for seed in range(4):
        asked = unlike(5, 4, QualityFloor(60.0), seed)
        tiny = structs.replace(CHEAP, memory_bytes=1e9)
        with_ = plan(
            replace(asked, other_offers=(Offer(tiny, 4),)), StageLatencies(queue()), HonestBounds(queue(), seed), ALL
        )
        without = plan(replace(asked, other_offers=()), StageLatencies(queue()), HonestBounds(queue(), seed), ALL)
        assert (with_.latency_s, with_.thresholds, with_.quality) == (
            without.latency_s,
            without.thresholds,
            without.quality,
        )
        assert "cheap" not in taken(with_)


def test_further_gpus_are_never_worse_and_at_times_better() -> None:
    gains = []
    for seed in range(6):
        asked = unlike(4, 4, QualityFloor(60.0), seed)
        with_ = plan(asked, StageLatencies(queue()), HonestBounds(queue(), seed), ALL)
        without = plan(replace(asked, other_offers=()), StageLatencies(queue()), HonestBounds(queue(), seed), ALL)
        assert with_.objective <= without.objective + 1e-9
        gains.append(with_.latency_s < without.latency_s - 1e-9)
    assert any(gains)


def test_the_more_time_there_is_the_less_a_plan_costs() -> None:
    asked = unlike(4, 4, QualityFloor(60.0), 2)
    usd = []
    for within_s in (2.0, 3.0, 5.0, 9.0):
        found = plan(
            asked.with_target(Cheapest(60.0, within_s)), StageLatencies(queue()), HonestBounds(queue(), 0), ALL
        )
        assert found.latency_s <= within_s and "/h" in found.why
        usd.append(found.objective)
    assert usd == sorted(usd, reverse=True) and usd[0] > usd[-1]


def test_candidates_and_baselines_keep_to_each_type() -> None:
    target = QualityFloor(60.0)
    asked = unlike(6, 4, target, 1, 3)
    search = Search(asked, StageLatencies(queue()), NoBounds(), Effort(stable_rounds=4))
    found = [*candidates(search, search.run(target), "test", 6)]
    best = plan(asked, StageLatencies(queue()), NoBounds(), ALL)
    for planner in (searched(uniform_parallelism), searched(uniform_allocation), cascade_serve):
        other = planner(asked, StageLatencies(queue()), NoBounds(), ALL)
        assert other.objective >= best.objective - 1e-9
        found.append(other)
        if other.planner == "uniform_allocation":
            used = tuple(stage.num_gpus > 0 for stage in other.stages)
            for i, stage in enumerate(other.stages):
                for part in stage.replicas:
                    assert part.num_gpus <= equal_shares({"gpu": 6, "cheap": 4}[part.gpu], used)[i]
    assert len(found) > 4
    for each in found:
        assert all(num <= {"gpu": 6, "cheap": 4}[name] for name, num in taken(each).items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"other_offers": (Offer(GPU, 2),)}, "gpu, gpu; expected each type once"),
        ({"other_offers": (Offer(CHEAP),)}, "cheap: expected how many"),
        ({"use_all": True}, "use_all: with one type"),
    ],
)
def test_fleets_that_make_no_sense(change: dict[str, object], message: str) -> None:
    with pytest.raises(HeadwayError, match=message):
        replace(unlike(2, 2, QualityFloor(60.0)), **change)  # type: ignore[arg-type]


def test_too_many_types_are_told() -> None:
    with pytest.raises(HeadwayError, match="64 x 64 x 64 GPUs of 3 types: too many"):
        GpuBudget((64, 64, 64), (1.0, 1.0, 1.0))
