"""Confidence intervals of the mean of a few seeds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import cos, pi, sin, sqrt, tan
from statistics import fmean, stdev

LEVEL = 0.95


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Student's t interval of the mean, two-sided, at `LEVEL`; None for fewer than two values."""
    if len(values) < 2:
        return None
    mean = fmean(values)
    half = quantile(len(values) - 1) * stdev(values) / sqrt(len(values))
    return mean - half, mean + half


@cache  # thousands of metrics have a handful of numbers of seeds
def quantile(freedom: int) -> float:
    """The t with P(|T| < t) = `LEVEL`, by bisection."""
    low, high = 0.0, pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        if _within(middle, freedom) < LEVEL:
            low = middle
        else:
            high = middle
    return tan(high) * sqrt(freedom)


def _within(angle: float, freedom: int) -> float:
    """P(|T| < t) at angle = atan(t / sqrt(freedom)): Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    odd = freedom % 2
    term = total = cos(angle) if odd else 1.0
    for k in range(2 + odd, freedom - 1, 2):
        term *= (k - 1) / k * cos(angle) ** 2
        total += term
    if not odd:
        return sin(angle) * total
    return 2 / pi * (angle + (sin(angle) * total if freedom > 1 else 0.0))
