"""Covers of demands against the solver on the whole program."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headway.planning.combos.covers import Covers
from headway.planning.solver import dot, integers, minimise, new_model

SOLVES = """
import json
import numpy as np
from headway.planning import solver

model = solver.new_model()
(x,) = solver.integers(model, np.array([5.0]))
model.addConstr(1.0 * x >= 2.0)
print(json.dumps(solver.minimise(model, 1.0 * x).values))
"""


def program(seed: int, cents: bool, tight: float) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Three services with eight combos each of four types of GPU; limits that are `tight` times what is used freely."""
    random = np.random.default_rng(seed)
    use = random.integers(0, 4, (4, 24)).astype(float)
    use[random.integers(0, 4, 24), np.arange(24)] += 1
    prices = random.uniform(0.5, 3.0, 4).round(2)
    cost = prices @ use if cents else prices @ use * random.uniform(0.5, 2.0, 24)
    shares = np.zeros((3, 24))
    for service in range(3):
        own = slice(8 * service, 8 * service + 8)
        shares[service, own] = np.minimum(use[:, own].sum(axis=0) * random.uniform(0.04, 0.15, 8), 1.0)
    return cost, shares, use, np.floor(tight * random.uniform(8, 30, 4))


@pytest.mark.ci
@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.booleans(), st.sampled_from([0.5, 0.8, 1.0, 3.0, np.inf]))
def test_covers_agree_with_the_solver(seed: int, cents: bool, tight: float) -> None:
    cost, shares, use, most = program(seed, cents, tight)
    found = Covers(cost, shares, use, most).solve(5.0)
    assume(found is not None)
    assert found is not None
    model = new_model()
    x = integers(model, np.full(24, np.inf))
    for share in shares:
        model.addConstr(dot(share, x) >= 1.0)
    for row, limit in zip(use, most, strict=True):
        if limit < np.inf:
            model.addConstr(dot(row, x) <= limit)
    other = minimise(model, dot(cost, x))
    assert other.status == "optimal"
    assert (shares @ found >= 1 - 1e-6).all() and (use @ found <= most).all()
    assert (found == np.round(found)).all() and (found >= 0).all()
    assert cost @ found == pytest.approx(cost @ np.array(other.values), rel=1e-6)


def test_covers_solve_most_programs() -> None:
    solved = sum(Covers(*program(seed, seed % 2 == 0, 1.0)).solve(5.0) is not None for seed in range(12))
    assert solved >= 9, "feasible ones with few ways to meet a demand"


def test_infeasible_programs_are_left_to_the_solver() -> None:
    cost, shares, use, most = program(1, True, 1.0)
    assert Covers(cost, shares, use, np.zeros(4)).solve(5.0) is None
    assert Covers(cost, np.zeros((1, 24)), use, most).solve(5.0) is None
    nothing = Covers(cost, np.zeros((0, 24)), use, most).solve(5.0)
    assert nothing is not None and not nothing.any()


def test_the_solver_prints_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", SOLVES], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("[2.0]\n", "")
