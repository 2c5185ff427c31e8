"""How likely a request is to miss its SLO, and how many later ones a longer wait makes late."""

from __future__ import annotations

from math import exp
from typing import Final

_LATE_FROM: Final = 0.8
_LATE_TO: Final = 1.1
_SLOW_FROM: Final = 0.9
_SLOW_TO: Final = 1.4
"""Ratio of expected time to SLO from which a miss is expected. It applies to first and last tokens, which are more
often late than early, and to the time per token."""
RATE_WINDOW_S: Final = 10.0
"""Time constant of the average request rate at a replica, and the time for which that rate is assumed to last."""


def late_probability(share: float) -> float:
    """Probability that a first or last token misses its SLO, if it is expected after this share of the SLO."""
    return max(0.0, min(1.0, (share - _LATE_FROM) / (_LATE_TO - _LATE_FROM)))


def _late_integral(share: float) -> float:
    """The integral of `late_probability` from 0."""
    if share <= _LATE_FROM:
        return 0.0
    if share < _LATE_TO:
        return (share - _LATE_FROM) * (share - _LATE_FROM) / (2.0 * (_LATE_TO - _LATE_FROM))
    return share - 0.5 * (_LATE_FROM + _LATE_TO)


def _late_time_s(slo_s: float, wait_s: float, drain: float) -> float:
    """Seconds of the next `RATE_WINDOW_S` in which an arriving request will be late, if the wait shrinks by `drain`
    per second."""
    fall_s = drain * RATE_WINDOW_S
    if fall_s < 0.01 * slo_s:
        return RATE_WINDOW_S * late_probability((wait_s - 0.5 * fall_s) / slo_s)
    return slo_s / drain * (_late_integral(wait_s / slo_s) - _late_integral((wait_s - fall_s) / slo_s))


def num_delayed(slo_s: float, rate_rps: float, wait_s: float, more_s: float, busy: float) -> float:
    """Requests made late by `more_s` of extra work, if `rate_rps` arrive per second and would wait `wait_s` without it.

    `busy`: seconds of work that arrive per second, so that the queue shrinks by the rest.
    """
    if wait_s + more_s <= _LATE_FROM * slo_s or not slo_s:
        return 0.0
    drain = min(max(1.0 - busy, 0.0), 1.0)
    return rate_rps * (_late_time_s(slo_s, wait_s + more_s, drain) - _late_time_s(slo_s, wait_s, drain))


def long_probability(left_s: float, mean_s: float) -> float:
    """Probability that an output takes longer than the time left, when only its mean is known."""
    return exp(-left_s / mean_s) if left_s > 0.0 else 1.0


def slow_probability(share: float) -> float:
    """Probability that a time per token misses its SLO."""
    return max(0.0, min(1.0, (share - _SLOW_FROM) / (_SLOW_TO - _SLOW_FROM)))
