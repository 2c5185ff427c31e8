"""Mixed-integer programs by HiGHS: values, bounds and every status."""

from __future__ import annotations

import os
import sys
from math import inf
from typing import Any

import numpy as np
import pytest

from headway.core.errors import HeadwayError
from headway.planning.solver import dot, integers, minimise, new_model, reals

pytest.importorskip("highspy")


def test_whole_numbers_cost_more_than_fractions() -> None:
    """Cover 7 with packs of 3 at 2 dollars and of 2 at 1.5 dollars."""
    costs = []
    for variables in (integers, reals):
        model = new_model()
        x = variables(model, np.full(2, inf))
        model.addConstr(dot([3, 2], x) >= 7)
        solution = minimise(model, dot([2.0, 1.5], x))
        assert solution.status == "optimal" and float(np.array([3, 2]) @ solution.of(x)) >= 7 - 1e-6
        costs.append(float(np.array([2.0, 1.5]) @ solution.of(x)))
        assert (solution.bound is None) == (variables is reals)
    assert costs == pytest.approx([5.0, 14 / 3])


def test_values_come_in_the_shape_of_the_variables() -> None:
    model = new_model()
    x = integers(model, np.full(4, 9.0)).reshape(2, 2)
    for i in range(4):
        model.addConstr(x.flat[i] == i)
    solution = minimise(model, dot(np.ones(4), x.flat))
    assert solution.of(x).tolist() == [[0, 1], [2, 3]] and float(solution.of(x[1, 0])) == 2


def test_an_infeasible_program() -> None:
    model = new_model()
    (x,) = reals(model, np.ones(1))
    model.addConstr(1.0 * x >= 2)
    assert minimise(model, 1.0 * x).status == "infeasible"


def test_an_unbounded_program_is_an_error() -> None:
    model = new_model()
    (x,) = reals(model, np.full(1, inf))
    with pytest.raises(HeadwayError, match="the solver found no answer"):
        minimise(model, -1.0 * x)


def test_tiny_coefficients_are_left_out() -> None:
    """HiGHS refuses a row with a coefficient this close to 0."""
    model = new_model()
    x = reals(model, np.ones(2))
    model.addConstr(dot([1.0, 1e-20], x) >= 1)
    assert minimise(model, dot([1.0, 1.0], x)).of(x).tolist() == [1.0, 0.0]


def test_small_costs_are_minimised_too() -> None:
    model = new_model()
    x = integers(model, np.full(2, 9.0))
    model.addConstr(dot([1.0, 1.0], x) >= 3)
    assert minimise(model, dot([2e-10, 1e-10], x)).of(x).tolist() == [0.0, 3.0]


def test_without_highspy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "highspy", None)
    with pytest.raises(HeadwayError, match=r"pip install 'headway\[plan\]'"):
        new_model()


def test_a_solver_that_greets_leaves_stdout_alone(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """HiGHS 1.16 writes its banner when a model is made; 1.15 does not."""
    import highspy

    class Greeting(highspy.Highs):  # type: ignore[misc]
        def __init__(self) -> None:
            os.write(1, b"Running HiGHS\n")
            super().__init__()

    monkeypatch.setattr(highspy, "Highs", Greeting)
    model: Any = new_model()
    minimise(model, dot([1.0], integers(model, np.full(1, inf))))
    os.write(1, b"and on")
    assert capfd.readouterr().out == "and on"
