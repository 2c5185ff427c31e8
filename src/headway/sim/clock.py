"""The clock of a stretch: which iteration is running, and when the k-th one ends."""

from __future__ import annotations

from math import sqrt

from headway.core.record import boundary_s


def first_boundary_at(start_s: float, a_s: float, b_s: float, now: float, low: int, high: int) -> int:
    """The smallest k in [low, high] whose boundary is at or after `now`; `high` if none is."""
    k = _estimate(start_s, a_s, b_s, now)
    k = low if k < low else high if k > high else k
    while k > low and boundary_s(start_s, a_s, b_s, k - 1) >= now:
        k -= 1
    while k < high and boundary_s(start_s, a_s, b_s, k) < now:
        k += 1
    return k


def completed(start_s: float, a_s: float, b_s: float, now: float, low: int, high: int) -> int:
    """The largest k in [low, high] whose boundary is at or before `now`; `low` if none is."""
    k = _estimate(start_s, a_s, b_s, now)
    k = low if k < low else high if k > high else k
    # `boundary_s` written out: routers ask for every replica, and a call takes as long as the sum.
    while k > low and start_s + k * a_s + b_s * (k * (k - 1) // 2) > now:
        k -= 1
    while k < high and start_s + (k + 1) * a_s + b_s * ((k + 1) * k // 2) <= now:
        k += 1
    return k


def _estimate(start_s: float, a_s: float, b_s: float, now: float) -> int:
    elapsed = now - start_s
    if elapsed <= 0.0:
        return 0
    if b_s <= 0.0:
        return int(elapsed / a_s) if a_s > 0.0 else 0
    linear = a_s - 0.5 * b_s
    return int(2.0 * elapsed / (linear + sqrt(linear * linear + 2.0 * b_s * elapsed)))
