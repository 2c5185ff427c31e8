"""Mixed-integer linear programs in the modelling interface of HiGHS (highspy), which is an optional dependency."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import inf
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from headway.core.errors import HeadwayError

if TYPE_CHECKING:
    from highspy import Highs
    from highspy.highs import highs_linear_expression

    Model = Highs
    Expression = highs_linear_expression
else:
    Model = Expression = Any

Floats = npt.NDArray[np.float64]
CENT = 0.01
NEGLIGIBLE = 1e-9
"""HiGHS treats coefficients up to this size as 0."""
Status = Literal["optimal", "feasible", "infeasible", "unknown"]


class Solution(Struct, frozen=True):
    """`feasible`: the time limit ended the search before the optimum was proved. `unknown`: it ended before any
    solution."""

    status: Status
    values: tuple[float, ...] = ()
    """Values by variable; empty without a solution. Integer variables have whole values."""
    bound: float | None = None
    """A lower bound on the objective of a mixed-integer program."""

    def of(self, variables: Any) -> Floats:
        """Values of some variables, in the shape of the variables."""
        array = np.asarray(variables)
        return np.array([self.values[each.index] for each in array.flat]).reshape(array.shape)


def new_model() -> Model:
    """An empty model that prints nothing. Raises HeadwayError without highspy."""
    try:
        import highspy
    except ImportError:
        raise HeadwayError("planning deployments needs highspy: pip install 'headway[plan]'") from None
    with _stdout_to_nowhere():
        model = highspy.Highs()
    model.silent()
    return model


@contextmanager
def _stdout_to_nowhere() -> Iterator[None]:
    """Discard output to file descriptor 1, because HiGHS 1.16 prints a greeting before a model can be silenced."""
    try:
        before, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    except OSError:  # there is no stdout
        yield
        return
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(before, 1)
        os.close(before)
        os.close(nowhere)


def integers(model: Model, upper: Floats, lower: Floats | None = None) -> Any:
    """New variables: whole numbers from `lower` (None: 0) to `upper`."""
    import highspy

    least = [0.0] * len(upper) if lower is None else lower.tolist()
    return model.addVariables(len(upper), lb=least, ub=upper.tolist(), type=highspy.HighsVarType.kInteger)


def reals(model: Model, upper: Floats) -> Any:
    """New variables: numbers from 0 to `upper`."""
    return model.addVariables(len(upper), ub=upper.tolist())


def dot(coefficients: Iterable[float], variables: Iterable[Any]) -> Expression:
    """The sum of coefficient times variable.

    Coefficients of at most `NEGLIGIBLE`, absolutely or relative to the largest, are dropped, because HiGHS rejects them
    in a row.
    """
    from highspy.highs import highs_linear_expression

    total, values = highs_linear_expression(), [float(value) for value in coefficients]
    least = NEGLIGIBLE * min(max(map(abs, values), default=0.0), 1.0)
    terms = [(int(each), value) for value, each in zip(values, variables, strict=True) if abs(value) > least]
    total.idxs, total.vals = [index for index, _ in terms], [value for _, value in terms]
    return total


def minimise(model: Model, cost: Expression, time_limit_s: float = 10.0, gap: float = 0.0) -> Solution:
    """Minimise `cost` to the relative gap `gap`.

    Tolerances are 1e-6 for a row, and 1e-6 of the smallest nonzero cost. The same model gives the same solution, unless
    the time limit ends the search. Raises HeadwayError if the objective is unbounded.
    """
    from highspy import HighsModelStatus, SolutionStatus

    columns, costs = cost.unique_elements()
    scale = _scale(costs)
    scaled = np.round(costs / scale) if scale == CENT else costs / scale
    model.setOptionValue("time_limit", time_limit_s)
    model.setOptionValue("mip_rel_gap", gap)
    model.minimize(dot(scaled, columns))
    status = model.getModelStatus()
    if status == HighsModelStatus.kInfeasible:
        return Solution("infeasible")
    if status not in (HighsModelStatus.kOptimal, HighsModelStatus.kTimeLimit):
        raise HeadwayError(f"the solver found no answer: {model.modelStatusToString(status)}")
    info = model.getInfo()
    if info.primal_solution_status != int(SolutionStatus.kSolutionStatusFeasible):
        return Solution("unknown")
    values = np.array(model.allVariableValues())
    is_integer = np.array([kind != 0 for kind in map(int, model.getLp().integrality_)], dtype=bool)
    if len(is_integer):
        values = np.where(is_integer, np.round(values), values)
    bound = info.mip_dual_bound * scale if is_integer.any() and abs(info.mip_dual_bound) < inf else None
    return Solution("optimal" if status == HighsModelStatus.kOptimal else "feasible", tuple(values.tolist()), bound)


def _scale(cost: Floats) -> float:
    """A divisor of costs that makes HiGHS's absolute gap of 1e-6 small relative to any cost.

    Prices in whole cents are counted in cents, so that HiGHS knows that objectives are whole numbers.
    """
    sizes = np.abs(cost[cost != 0])
    if not len(sizes):
        return 1.0
    return CENT if (np.abs(sizes / CENT - np.round(sizes / CENT)) < 1e-9).all() else float(sizes.min())
