"""The baselines of the paper, and known latencies that serve all planners."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from cascade_queues import ENGINE, GPU, MIDDLE, HonestBounds, Queue, problem, searched
from headway.core.errors import HeadwayError
from headway.planning.cascade.candidates import plan
from headway.planning.cascade.deployment import StageLatencies
from headway.planning.cascade.latency_bounds import NoBounds
from headway.planning.cascade.planners import (
    cascade_serve,
    equal_shares,
    route_llm,
    stand_alone,
    uniform_allocation,
    uniform_parallelism,
)
from headway.planning.cascade.problem import LatencyBudget, QualityFloor
from headway.planning.cascade.replica_sets import feasible_shapes, replica_sets
from headway.planning.cascade.search import Effort

ALL = Effort(stable_rounds=None, gap=0.0)


def latencies() -> StageLatencies:
    return StageLatencies(Queue())


def test_a_model_alone_is_a_cascade_of_one() -> None:
    asked = problem(3, 8, 2.0, QualityFloor(0.0), 1)
    found = stand_alone(asked, "middle", latencies(), NoBounds(), ALL)
    assert [stage.model for stage in found.stages] == ["middle"] and found.stages[0].processing_ratio == 1.0
    assert found.quality == pytest.approx(np.nanmean(asked.scores.scores[:, 1]))
    every = np.ones(len(asked.scores), np.bool_)
    sets = replica_sets(feasible_shapes(MIDDLE, GPU, ENGINE, 8, 4, 4)[0], 8, 2)
    latencies_s = [Queue().p95_latency_s(MIDDLE, sets[i], 2.0, asked.lengths(1, every)) for i in range(len(sets))]
    assert found.latency_s == pytest.approx(min(latencies_s)), "no judge, and the best of all sets"
    with pytest.raises(HeadwayError, match="did you mean 'middle'"):
        stand_alone(asked, "midle", latencies())


def test_ablations_are_never_better() -> None:
    worse = []
    for seed in range(4):
        asked = problem(3, 12, 4.0, QualityFloor(70.0), seed, num_requests=20)
        best = plan(asked, latencies(), HonestBounds(Queue(), seed), ALL)
        for new_search in (uniform_parallelism, uniform_allocation):
            found = searched(new_search)(asked, latencies(), HonestBounds(Queue(), seed), ALL)
            assert found.objective >= best.objective - 1e-9
            assert sum(stage.num_gpus for stage in found.stages) <= 12
            worse.append(found.objective / best.objective)
            if new_search is uniform_allocation:
                shares = equal_shares(12, tuple(stage.num_gpus > 0 for stage in found.stages))
                assert all(stage.num_gpus <= share for stage, share in zip(found.stages, shares, strict=True))
    assert max(worse) > 1.05


def test_equal_shares() -> None:
    assert equal_shares(32, (True, True, True)) == (10, 10, 12), "as in 4.3"
    assert equal_shares(32, (True, True, False)) == (16, 16, 0)
    assert equal_shares(7, (True, False, True)) == (2, 0, 5)
    for num, used in product(range(1, 20), ((True,), (True, True), (True, True, True, True))):
        assert sum(equal_shares(num, used)) == num


@pytest.mark.ci
def test_planning_by_load_alone_misjudges_lengths() -> None:
    gaps = []
    for seed in range(5):
        asked = problem(3, 12, 4.0, QualityFloor(70.0), seed, num_requests=20)
        best = plan(asked, latencies(), HonestBounds(Queue(), seed), ALL)
        found = cascade_serve(asked, latencies(), HonestBounds(Queue(), seed), ALL)
        if best.status != "infeasible":
            gaps.append(found.latency_s / best.latency_s)
            assert found.quality >= 70 - 1e-9
        assert found.objective >= best.objective - 1e-9 and found.bound_s is None
        assert all(len(stage.replicas) <= 1 for stage in found.stages)
    assert len(gaps) > 1 and max(gaps) > 1.05
    with pytest.raises(HeadwayError, match="cascade-serve: plans without latencies"):
        cascade_serve(asked.with_target(LatencyBudget(1.0)), latencies())


def test_planning_by_load_with_one_parallelism_and_equal_shares() -> None:
    """Each stage has replicas of the largest shape that fits into its share and a server; with free shapes, others."""
    for seed in range(3):
        asked = problem(3, 12, 4.0, QualityFloor(70.0), seed, num_requests=20)
        free, uniform = (
            cascade_serve(asked, latencies(), HonestBounds(Queue(), seed), ALL, equal=True, uniform=each).stages
            for each in (False, True)
        )
        shares = equal_shares(12, tuple(stage.num_gpus > 0 for stage in uniform))
        for stage, share in zip(uniform, shares, strict=True):
            assert stage.num_gpus <= share and len(stage.replicas) == (stage.num_gpus > 0)
            assert all((part.tp, part.pp) == (min(share, 4), 1) for part in stage.replicas)
        assert [stage.replicas for stage in free] != [stage.replicas for stage in uniform]


def test_a_router_in_front_sends_each_request_to_one_model() -> None:
    asked = problem(3, 12, 4.0, QualityFloor(65.0), 2, num_requests=30)
    found = route_llm(asked, asked.scores, latencies(), HonestBounds(Queue(), 0), ALL)
    assert found.pre_routed and found.planner == "route-llm"
    assert sum(stage.processing_ratio for stage in found.stages) == pytest.approx(1.0)
    thresholds = {stage.threshold for stage in found.stages[:-1]}
    assert len(thresholds) == 1
    level = thresholds.pop()
    assert level is not None
    final = asked.scores.final_stage([level, level])
    assert found.quality == pytest.approx(asked.scores.quality_of(final)) and found.quality >= 65
    assert [stage.processing_ratio for stage in found.stages] == pytest.approx([(final == i).mean() for i in range(3)])
    shuffled = asked.scores.take(np.random.default_rng(0).permutation(30))
    misled = route_llm(asked, shuffled, latencies(), HonestBounds(Queue(), 0), ALL)
    assert misled.stages[0].processing_ratio <= found.stages[0].processing_ratio
    with pytest.raises(HeadwayError, match="29 predictions for 30 requests"):
        route_llm(asked, asked.scores.take(np.arange(29)), latencies())


def test_one_known_table_serves_all_planners() -> None:
    asked, known = problem(3, 10, 4.0, QualityFloor(70.0), 3, num_requests=20), latencies()
    first = plan(asked, known, HonestBounds(Queue(), 0))
    num = len(known.known)
    searched(uniform_parallelism)(asked, known, HonestBounds(Queue(), 0))
    again = plan(replace(asked), StageLatencies(Queue(), known.known), HonestBounds(Queue(), 0))
    assert again.num_evaluations == 0 and again.stages == first.stages and len(known.known) >= num
