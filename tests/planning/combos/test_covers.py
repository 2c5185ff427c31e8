"""Deployments service by service, against the solver on the program as it stands; and a solver that talks."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.planning.combos.covers import Covers
from headway.planning.solver import minimise

TALKS = """
import ctypes, json, os
from scipy import optimize
import numpy as np
from headway.planning import solver

def talking(*given, real=optimize.milp, **more):
    ctypes.CDLL(None).printf(b"a word from C\\n")
    os.write(1, b"and one without a buffer\\n")
    return real(*given, **more)

optimize.milp = talking
found = solver.minimise(np.array([1.0]), np.array([[1.0]]), np.array([2.0]), np.array([9.0]), np.array([5.0]))
print(json.dumps(found.values))
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


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.booleans(), st.sampled_from([0.5, 0.8, 1.0, 3.0, np.inf]))
def test_both_ways_agree(seed: int, cents: bool, tight: float) -> None:
    cost, shares, use, most = program(seed, cents, tight)
    found = Covers(cost, shares, use, most).solve(5.0)
    low = np.concatenate([np.ones(3), np.full(4, -np.inf)])
    high = np.concatenate([np.full(3, np.inf), most])
    other = minimise(cost, np.vstack([shares, use]), low, high, np.full(24, np.inf))
    if found is None:
        return
    assert other.status == "optimal"
    assert (shares @ found >= 1 - 1e-6).all() and (use @ found <= most).all()
    assert (found == np.round(found)).all() and (found >= 0).all()
    assert cost @ found == pytest.approx(cost @ np.array(other.values), rel=1e-6)


def test_it_mostly_gets_there() -> None:
    solved = sum(Covers(*program(seed, seed % 2 == 0, 1.0)).solve(5.0) is not None for seed in range(12))
    assert solved >= 9, "feasible ones with few ways to meet a demand"


def test_what_is_not_possible_is_left_to_the_solver() -> None:
    cost, shares, use, most = program(1, True, 1.0)
    assert Covers(cost, shares, use, np.zeros(4)).solve(5.0) is None
    assert Covers(cost, np.zeros((1, 24)), use, most).solve(5.0) is None
    nothing = Covers(cost, np.zeros((0, 24)), use, most).solve(5.0)
    assert nothing is not None and not nothing.any()


@pytest.mark.skipif(sys.platform == "win32", reason="has no printf to be found")
def test_what_a_solver_prints_is_no_part_of_the_answer() -> None:
    done = subprocess.run([sys.executable, "-c", TALKS], capture_output=True, text=True, check=True)
    assert done.stdout == "[2.0]\n"
    assert "a word from C" in done.stderr and "and one without a buffer" in done.stderr
