"""Mixed-integer linear programs, solved by HiGHS through SciPy, which is an optional dependency."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
    with silent():
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


@contextmanager
def silent() -> Iterator[None]:
    """What native code prints meanwhile goes to stderr: now and then HiGHS says a word, which is no part of an answer.

    The C library's own buffer is emptied first and last, so that nothing comes late. Python's prints are not looked at.
    """
    library = None if sys.platform == "win32" else ctypes.CDLL(None)
    kept = -1 if library is None else library.dup(1)
    if library is None or kept < 0:  # closed: whatever is printed goes nowhere
        yield
        return
    sys.stdout.flush()
    library.fflush(None)
    library.dup2(2, 1)
    try:
        yield
    finally:
        library.fflush(None)
        library.dup2(kept, 1)
        library.close(kept)


def relaxed(cost: Floats, rows: Any, low: Floats, high: Floats) -> tuple[float | None, Floats, Floats]:
    """The linear program of 0 or more of each: value, what a unit more of each row is worth, and x.

    Each row has either a lower or an upper limit. Where there is no solution: (None, nothing, nothing).
    """
    above = np.isfinite(low)
    signs = np.where(above, -1.0, 1.0)
    limits = np.where(above, -low, high)
    kept = np.isfinite(limits)
    optimize = _scipy()
    with silent():
        found = optimize.linprog(cost, (signs[:, None] * rows)[kept], limits[kept], bounds=(0, None), method="highs")
    if found.status != 0:
        return None, np.zeros(0), np.zeros(0)
    duals = np.zeros(len(low))
    duals[kept] = signs[kept] * found.ineqlin.marginals
    return float(found.fun), duals, np.asarray(found.x)


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
