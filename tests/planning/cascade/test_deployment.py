"""Deployment with few evaluations, against full evaluation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cascade_queues import ENGINE, GPU, LARGE, MIDDLE, SMALL, HonestBounds, Queue
from headway.planning.cascade.allocation import least_max
from headway.planning.cascade.deployment import EstimateCorrection, LatencyTable, deploy, with_spare_gpus
from headway.planning.cascade.latency_bounds import NoBounds
from headway.planning.cascade.problem import Lengths
from headway.planning.cascade.replica_sets import feasible_shapes, replica_sets
from headway.planning.cascade.search import Effort

ALL = Effort(stable_rounds=None, gap=0.0)


def tables_of(seed: int, num_gpus: int, stages: int, honest: bool) -> tuple[list[LatencyTable], Queue]:
    random = np.random.default_rng(seed)
    queue, found = Queue(), []
    for i, model in enumerate((SMALL, MIDDLE, LARGE)[:stages]):
        sets = replica_sets(feasible_shapes(model, GPU, ENGINE, num_gpus, 4, 2)[0], num_gpus, 2)
        lengths = Lengths(*(random.integers(10, 300, 20).astype("f8") for _ in range(3)))
        rate_rps = float(random.uniform(0.5, 4.0)) / (i + 1)
        bounds = HonestBounds(Queue(), seed) if honest else NoBounds()
        lower, estimate = bounds.estimate(model, sets, rate_rps, lengths)
        table = LatencyTable(
            sets,
            lower,
            estimate,
            num_gpus,
            lambda replicas, m=model, r=rate_rps, x=lengths: queue.p95_latency_s(m, replicas, r, x),
            [EstimateCorrection()],
            0.1 * i,
        )
        found.append(table)
    return found, queue


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(5, 9), st.integers(1, 3), st.booleans(), st.floats(0, 0.2))
def test_a_deployment_is_proved_without_asking_for_everything(
    seed: int, num_gpus: int, stages: int, use_all: bool, gap: float
) -> None:
    full, _ = tables_of(seed, num_gpus, stages, honest=False)
    for table in full:
        for f in range(num_gpus + 1):
            while table.can_improve(f):
                table.evaluate(f)
    truth = least_max([table.best for table in full], num_gpus, use_all)
    lazy, queue = tables_of(seed, num_gpus, stages, honest=True)
    found, bound_s = deploy(lazy, num_gpus, use_all, gap=gap)
    assert (found is None) == (truth is None)
    if found is None or truth is None:
        return
    assert bound_s <= truth.latency_s * (1 + 1e-9) and found.latency_s * (1 - gap) <= truth.latency_s * (1 + 1e-9)
    assert len(queue.asked) < sum(table.num_sets for table in full)
    for gpus, replicas in zip(found.gpus, found.sets, strict=True):
        assert replicas is not None and replicas.num_gpus <= gpus
    helped = with_spare_gpus(lazy, num_gpus, found, use_all)
    assert helped.latency_s == pytest.approx(found.latency_s) and sum(helped.gpus) <= num_gpus
    slowest_first = [sorted(np.round(each.latencies_s, 9).tolist(), reverse=True) for each in (helped, found)]
    assert slowest_first[0] <= slowest_first[1]
    again, _ = tables_of(seed, num_gpus, stages, honest=True)
    none, at_least = deploy(again, num_gpus, use_all, limit=truth.latency_s * 0.9)
    assert none is None and at_least >= truth.latency_s * 0.9


def test_spare_gpus_go_where_they_help() -> None:
    helped = []
    for seed in range(8):
        tables, _ = tables_of(seed, 12, 2, honest=False)
        found, _ = deploy(tables, 12)
        assert found is not None
        after = with_spare_gpus(tables, 12, found)
        assert sum(after.gpus) <= 12 and after.latency_s == found.latency_s
        if min(after.latencies_s) < min(found.latencies_s):
            assert sum(after.gpus) > sum(found.gpus)
            helped.append(seed)
    assert helped
