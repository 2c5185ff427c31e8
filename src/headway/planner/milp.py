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
    rows: Floats,
    low: Floats,
    high: Floats,
    upper: Floats,
    integer: Sequence[bool] | None = None,
    time_limit_s: float = 10.0,
) -> Solution:
    """`cost @ x` at its least, `low <= rows @ x <= high` and `0 <= x <= upper`; all integer unless said otherwise.

    To a gap of 0, as far as tolerances go: 1e-6 of a row, and of the smallest cost that is not 0. The same answer
    every time, except where the time limit ends the search. HeadwayError without SciPy.
    """
    optimize = _scipy()
    kinds = np.ones(len(cost)) if integer is None else np.asarray(integer, dtype=float)
    scale = _scale(cost)
    constraints = optimize.LinearConstraint(rows, low, high) if len(rows) else ()
    found = optimize.milp(
        cost / scale,
        integrality=kinds,
        bounds=optimize.Bounds(0.0, upper),
        constraints=constraints,
        options={"time_limit": time_limit_s, "mip_rel_gap": 0.0},
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


def _scale(cost: Floats) -> float:
    """Costs are divided by it: the solver stops at an absolute gap of 1e-6, which is to be small next to any cost."""
    sizes = np.abs(cost[cost != 0])
    return float(sizes.min()) if len(sizes) else 1.0


def _scipy() -> Any:
    try:
        from scipy import optimize
    except ImportError:
        raise HeadwayError("planning deployments needs SciPy: pip install 'headway[plan]'") from None
    return optimize
