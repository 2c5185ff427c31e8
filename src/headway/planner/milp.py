"""Mixed-integer linear programs, solved by HiGHS through SciPy, which is an optional dependency."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from headway.core.errors import HeadwayError

Floats = npt.NDArray[np.float64]
CENT = 0.01
Status = Literal["optimal", "feasible", "infeasible", "unknown"]


class Solution(Struct, frozen=True):
    """`feasible`: the time was over before the optimum was proved. `unknown`: before anything was found."""

    status: Status
    values: tuple[float, ...] = ()
    """Integer variables in whole numbers."""
    bound: float | None = None
    """No solution is better."""


def minimise(
    cost: Floats,
    rows: Any,
    low: Floats,
    high: Floats,
    upper: Floats,
    integer: Sequence[bool] | None = None,
    time_limit_s: float = 10.0,
    gap: float = 0.0,
) -> Solution:
    """`cost @ x` at its least, `low <= rows @ x <= high` and `0 <= x <= upper`; all integer unless said otherwise.

    To a relative gap of `gap`, as far as tolerances go: 1e-6 of a row, and of the smallest cost that is not 0. The
    same answer every time, except where the time limit ends the search. `rows` may be sparse, as `matrix` makes it.
    HeadwayError without SciPy.
    """
    optimize = _scipy()
    kinds = np.ones(len(cost)) if integer is None else np.asarray(integer, dtype=float)
    scale = _scale(cost)
    scaled = np.round(cost / scale) if scale == CENT else cost / scale
    constraints = optimize.LinearConstraint(rows, low, high) if rows.shape[0] else ()
    found = optimize.milp(
        scaled,
        integrality=kinds,
        bounds=optimize.Bounds(0.0, upper),
        constraints=constraints,
        options={"time_limit": time_limit_s, "mip_rel_gap": gap},
    )
    if found.status not in (0, 1):
        if found.status == 2:
            return Solution("infeasible")
        raise HeadwayError(f"the solver found no answer: {found.message}")
    if found.x is None:
        return Solution("unknown")
    values = np.where(kinds > 0, np.round(found.x), found.x)
    bound = found.mip_dual_bound
    bound = None if bound is None or not abs(bound) < inf else float(bound) * scale
    return Solution("optimal" if found.status == 0 else "feasible", tuple(map(float, values)), bound)


def matrix(entries: Sequence[tuple[int, int, float]], num_rows: int, num_columns: int) -> Any:
    """A sparse matrix of (row, column, value); values of one place add up."""
    _scipy()
    from scipy import sparse

    at, to, values = zip(*entries, strict=True) if entries else ((), (), ())
    return sparse.csr_array((values, (at, to)), shape=(num_rows, num_columns))


def _scale(cost: Floats) -> float:
    """Costs are divided by it: the solver stops at an absolute gap of 1e-6, which is to be small next to any cost.

    Prices in whole cents are counted in cents, for then the solver knows that no plan lies between two whole numbers.
    """
    sizes = np.abs(cost[cost != 0])
    if not len(sizes):
        return 1.0
    return CENT if (np.abs(sizes / CENT - np.round(sizes / CENT)) < 1e-9).all() else float(sizes.min())


def _scipy() -> Any:
    try:
        from scipy import optimize
    except ImportError:
        raise HeadwayError("planning deployments needs SciPy: pip install 'headway[plan]'") from None
    return optimize
