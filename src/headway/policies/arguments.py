"""Checks of the arguments of policies' constructors. All raise HeadwayError."""

from __future__ import annotations

from math import isfinite

from headway.core.errors import HeadwayError

MOST_TIERS = 1024
LEAST_INTERVAL_S = 0.001
"""Smallest interval between two calls of a policy. With smaller ones, a run would not end."""


def require_at_least(lowest: float, /, **values: float) -> None:
    """Reject numbers that are below `lowest`, infinite or NaN."""
    for name, value in values.items():
        if not isfinite(value) or value < lowest:
            raise HeadwayError(f"{name}: expected a number of at least {lowest:g}, got {value!r}")


def require_between(lowest: float, highest: float, /, **values: float) -> None:
    """Reject numbers outside of `lowest` to `highest`, and NaN."""
    for name, value in values.items():
        if not lowest <= value <= highest:
            raise HeadwayError(f"{name}: expected a number from {lowest:g} to {highest:g}, got {value!r}")


def require_above(bound: float, /, **values: float) -> None:
    """Reject numbers that are not above `bound`, infinite or NaN."""
    for name, value in values.items():
        if not isfinite(value) or value <= bound:
            raise HeadwayError(f"{name}: expected a number above {bound:g}, got {value!r}")


def require_callable(name: str, value: object, verb: str | None = None) -> None:
    """Reject a value that is neither None nor callable, or that lacks the method `verb`."""
    if value is None or callable(value if verb is None else getattr(value, verb, None)):
        return
    expected = "a callable" if verb is None else f"an object with a method `{verb}`"
    raise HeadwayError(f"{name}: expected {expected}, got {value!r}")
