"""Bounded robust least squares on relative errors, validated on held-out shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from msgspec import Struct

from headway.calibration.operators import Floats, Mask
from headway.core.errors import HeadwayError

HOLD_OUT = 5
"""Every fifth shape is held out and gives the residual."""
FEW = 30
"""Number of shapes below which each fifth is held out in turn, and the final fit uses all shapes."""
ROBUST = 0.05
"""Relative error above which errors count linearly instead of quadratically."""
PINNED = 1e-3
WORST = 0.5
"""Largest acceptable median error on held-out shapes."""


class Coefficient(Struct, frozen=True):
    """One number to fit, with its physical bounds."""

    name: str
    start: float
    low: float
    high: float
    unit: float = 1.0
    """SI value of 1 in the bounds: 1e-6 for microseconds."""


class FitResult(Struct, frozen=True):
    """Fitted coefficients of one operator or overhead, with errors on held-out shapes."""

    key: str
    values: dict[str, float]
    num_fitted: int
    num_held_out: int
    residual: float
    """Median absolute relative error on held-out shapes."""
    bias: float
    """Median relative error on held-out shapes; positive if predictions are too slow."""
    at_bounds: tuple[str, ...] = ()
    prior: dict[str, float] = {}
    """The prior's values, before any run; only in fits to served runs."""
    width: dict[str, float] = {}
    """Remaining standard deviation over the prior's, only in fits to served runs; 1 means that the runs determine
    nothing."""
    held_out: dict[str, float] = {}
    """Mean absolute errors on unseen runs, in percent; only in fits to served runs."""


def held_out(num: int, turn: int = HOLD_OUT - 1) -> Mask:
    """Mask of the held-out shapes among `num` shapes, in order."""
    return np.asarray(np.arange(num) % HOLD_OUT == turn)


def solve(
    key: str,
    coefficients: tuple[Coefficient, ...],
    model: Callable[[Floats], Floats],
    seconds: Floats,
    fixed: dict[str, float] | None = None,
) -> FitResult:
    """Fit `model(values) -> seconds by row` to `seconds`, with values in SI units in the order of `coefficients`.

    Raises HeadwayError if the fit does not converge, if an efficiency lies at a physical bound because the measurements
    exceed it, or if the median error on held-out shapes is above `WORST`.
    """
    num = len(seconds)
    units = np.array([c.unit for c in coefficients])

    def errors(unseen: Mask) -> tuple[Floats, Floats]:
        """Values fitted without the `unseen` rows, and the relative errors on these rows."""
        p = _fitted(key, coefficients, lambda p: np.log(model(p * units)[~unseen] / seconds[~unseen]))
        return p, np.asarray(model(p * units)[unseen] / seconds[unseen] - 1)

    if num >= FEW:
        p, unseen_errors = errors(held_out(num))
        return _checked(key, coefficients, p, unseen_errors, fixed or {}, num - len(unseen_errors))
    unseen_errors = np.concatenate([errors(held_out(num, i))[1] for i in range(min(HOLD_OUT, num))])
    p, _ = errors(np.zeros(num, dtype=bool))
    return _checked(key, coefficients, p, unseen_errors, fixed or {}, num)


def _fitted(key: str, coefficients: tuple[Coefficient, ...], errors: Callable[[Floats], Floats]) -> Floats:
    low, high = (np.array([getattr(c, side) for c in coefficients]) for side in ("low", "high"))
    start = np.array([c.start for c in coefficients])
    result = least_squares()(
        errors, start, bounds=(low, high), loss="soft_l1", f_scale=ROBUST, x_scale=np.maximum(np.abs(start), 1e-9)
    )
    if result.status <= 0 or not np.isfinite(result.x).all():
        raise HeadwayError(f"{key}: the fit did not converge: {result.message}")
    return np.asarray(result.x)


def _checked(
    key: str, coefficients: tuple[Coefficient, ...], p: Floats, errors: Floats, fixed: dict[str, float], num: int
) -> FitResult:
    residual, bias = float(np.median(np.abs(errors))), float(np.median(errors))
    pinned = []
    for c, value in zip(coefficients, p, strict=True):
        span = PINNED * (c.high - c.low)
        if not value > c.high - span and not value < c.low + span:
            continue
        pinned.append(c.name)
        beyond = c.name.endswith("efficiency") and (bias > WORST / 5 if value > c.high - span else True)
        if beyond:
            raise HeadwayError(
                f"{key}: {c.name} leaves its physical bounds, {c.low:g} to {c.high:g}: the measurements are "
                f"{'faster' if value > c.high - span else 'slower'} than any such hardware; are GPU and units right?"
            )
    if not residual <= WORST:
        raise HeadwayError(f"{key}: the fit misses held-out shapes by {residual:.0%} in the median; nothing fits")
    values = {c.name: float(value * c.unit) for c, value in zip(coefficients, p, strict=True)}
    return FitResult(key, {**fixed, **values}, num, len(errors), residual, bias, tuple(pinned))


def least_squares() -> Callable[..., Any]:
    """SciPy's least_squares. Raises HeadwayError if SciPy, an optional dependency, is missing."""
    return _solver("least_squares")


def lsq_linear() -> Callable[..., Any]:
    """SciPy's lsq_linear. Raises HeadwayError if SciPy is missing."""
    return _solver("lsq_linear")


def _solver(name: str) -> Callable[..., Any]:
    try:
        from scipy import optimize
    except ImportError:
        raise HeadwayError("fitting needs SciPy: pip install 'headway[calibrate]'") from None
    solver: Callable[..., Any] = getattr(optimize, name)
    return solver
