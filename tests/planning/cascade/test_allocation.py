"""Allocation of GPUs to stages, against brute force and the mixed-integer program."""

from __future__ import annotations

from itertools import product
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.allocation_program import least_max_milp

from headway.planning.cascade.allocation import least_max, least_sum
from headway.planning.cascade.search import Effort

ALL = Effort(stable_rounds=None, gap=0.0)


def brute_force(tables: list[np.ndarray], num_gpus: int, use_all: bool) -> float:
    return min(
        (
            max(table[f] for table, f in zip(tables, gpus, strict=True))
            for gpus in product(range(num_gpus + 1), repeat=len(tables))
            if (sum(gpus) == num_gpus if use_all else sum(gpus) <= num_gpus)
        ),
        default=inf,
    )


TABLES = st.integers(1, 7).flatmap(
    lambda n: st.lists(
        st.lists(st.one_of(st.just(inf), st.floats(0, 50)), min_size=n + 1, max_size=n + 1), min_size=1, max_size=3
    )
)


@settings(max_examples=60, deadline=None)
@given(TABLES, st.booleans())
def test_the_allocation_is_what_brute_force_finds(rows: list[list[float]], use_all: bool) -> None:
    tables = [np.array(row) for row in rows]
    num_gpus = len(rows[0]) - 1
    best = brute_force(tables, num_gpus, use_all)
    for solver in (least_max, least_max_milp):
        found = solver(tables, num_gpus, use_all)
        if best == inf:
            assert found is None
            continue
        assert found is not None and found.latency_s == pytest.approx(best, rel=1e-5, abs=1e-5)
        assert sum(found.gpus) <= num_gpus and (not use_all or sum(found.gpus) == num_gpus)
        assert found.latency_s == max(table[f] for table, f in zip(tables, found.gpus, strict=True))


def test_a_stage_without_requests_gets_no_gpus() -> None:
    """Table 2, (70, 3): the largest model has none."""
    busy = np.array([inf, 8.0, 6.0, 4.0, 2.0])
    idle = np.array([0.0, inf, inf, inf, inf])
    for solver in (least_max, least_max_milp):
        for use_all in (False, True):
            found = solver([busy, idle], 4, use_all)
            assert found is not None and found.gpus == (4, 0) and found.latency_s == pytest.approx(2.0)


@pytest.mark.parametrize("use_all", [True, False])
def test_the_least_sum_is_that_of_all_allocations(use_all: bool) -> None:
    random = np.random.default_rng(1)
    for _ in range(60):
        costs = [random.uniform(0, 9, 8) for _ in range(3)]
        for each in costs:
            each[random.random(8) < 0.4] = inf
        sums = {
            gpus: sum(each[f] for each, f in zip(costs, gpus, strict=True))
            for gpus in product(range(8), repeat=3)
            if (sum(gpus) == 7 if use_all else sum(gpus) <= 7)
        }
        best, found = min(sums.values()), least_sum(costs, 7, use_all)
        assert (found is None) == (best == inf)
        if found is not None:
            assert sums[found] == pytest.approx(best)
