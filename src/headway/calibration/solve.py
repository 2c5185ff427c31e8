"""Bounded robust least squares on relative errors, with shapes held out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from msgspec import Struct

from headway.calibration.operators import Floats, Mask
from headway.core.errors import HeadwayError

HOLD_OUT = 5
"""Every fifth shape is not fitted on, but tells the residual."""
FEW = 30
"""Of fewer shapes, each fifth is held out in turn, and the coefficients are those of all."""
ROBUST = 0.05
"""Relative errors beyond this count by their size, not by its square."""
PINNED = 1e-3
WORST = 0.5
"""A median error on held-out shapes above this describes nothing."""


class Coefficient(Struct, frozen=True):
    """One number to fit, and what physics allows it to be."""

    name: str
    start: float
    low: float
    high: float
    unit: float = 1.0
    """What one in these numbers is: 1e-6 for microseconds."""


class Fitted(Struct, frozen=True):
    """Coefficients of one operator or overhead."""

    key: str
    values: dict[str, float]
    num_fitted: int
    num_held_out: int
    residual: float
    """Median absolute relative error on shapes while they were held out."""
    bias: float
    """Median relative error there: above 0, predicted too slow."""
    at_bounds: tuple[str, ...] = ()


def held_out(num: int, turn: int = HOLD_OUT - 1) -> Mask:
    """Which of so many shapes, in order, are not fitted on."""
    return np.asarray(np.arange(num) % HOLD_OUT == turn)


def solve(
    key: str,
    coefficients: tuple[Coefficient, ...],
    model: Callable[[Floats], Floats],
    seconds: Floats,
    fixed: dict[str, float] | None = None,
) -> Fitted:
    """Fit `model(values) -> seconds by row` to `seconds`, values in SI units in the order of `coefficients`.

    Raises HeadwayError where the fit does not converge, is pressed against a physical bound by measurements that
    want it beyond, or misses the held-out shapes by more than half in the median.
    """
    num = len(seconds)
    units = np.array([c.unit for c in coefficients])

    def errors(unseen: Mask) -> tuple[Floats, Floats]:
        """Values fitted without these rows, and the relative errors on them."""
        p = _fitted(key, coefficients, lambda p: np.log(model(p * units)[~unseen] / seconds[~unseen]))
        return p, np.asarray(model(p * units)[unseen] / seconds[unseen] - 1)

    if num >= FEW:
        p, left = errors(held_out(num))
        return _checked(key, coefficients, p, left, fixed or {}, num - len(left))
    left = np.concatenate([errors(held_out(num, i))[1] for i in range(min(HOLD_OUT, num))])
    p, _ = errors(np.zeros(num, dtype=bool))
    return _checked(key, coefficients, p, left, fixed or {}, num)


def _fitted(key: str, coefficients: tuple[Coefficient, ...], errors: Callable[[Floats], Floats]) -> Floats:
    low, high = (np.array([getattr(c, side) for c in coefficients]) for side in ("low", "high"))
    start = np.array([c.start for c in coefficients])
    found = least_squares()(
        errors, start, bounds=(low, high), loss="soft_l1", f_scale=ROBUST, x_scale=np.maximum(np.abs(start), 1e-9)
    )
    if found.status <= 0 or not np.isfinite(found.x).all():
        raise HeadwayError(f"{key}: the fit did not converge: {found.message}")
    return np.asarray(found.x)


def _checked(
    key: str, coefficients: tuple[Coefficient, ...], p: Floats, errors: Floats, fixed: dict[str, float], num: int
) -> Fitted:
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
    return Fitted(key, {**fixed, **values}, num, len(errors), residual, bias, tuple(pinned))


def least_squares() -> Callable[..., Any]:
    """SciPy's, which is an optional dependency."""
    try:
        from scipy import optimize
    except ImportError:
        raise HeadwayError("fitting needs SciPy: pip install 'headway[calibrate]'") from None
    found: Callable[..., Any] = optimize.least_squares
    return found
