"""Decides whether a rehearsed fleet keeps up with its requests, by batch means of waits and of SLO attainment.

A fleet close to saturation serves its first thousand requests in time and falls behind later. In a run of finite length
the difference between a queue that grows and one that only varies is statistical. So a run is divided into batches of
consecutive arrivals, whose means are nearly independent: they give an interval of the attainment and one of the growth
of waits. A run that is not settled is repeated with more requests.
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from headway.metrics.interval import interval, quantile

Floats = npt.NDArray[np.float64]
NUM_BATCHES = 10
"""Few, long batches, so that one batch's mean is nearly independent of the next one's."""
NEGLIGIBLE_S = 0.05
"""Growth of waits over a whole run that is ignored."""
PRECISE = 0.02
"""Largest half interval of the attainment in a settled run."""
LENGTHEN = 4
"""Factor on the number of requests from one rehearsal to the next."""


class Stability(Struct, frozen=True, forbid_unknown_fields=True):
    """What a run shows about longer runs."""

    num_requests: int
    attainment: float
    """Share of requests that met all of their SLOs."""
    attainment_low: float
    """Lower end of the 95% interval of the attainment, by batch means."""
    attainment_high: float
    wait_growth: float
    """Growth of the TTFT in seconds per second: about the share by which load exceeds capacity."""
    is_growing: bool
    """Whether the 95% interval of the growth excludes 0, and waits grew by more than `NEGLIGIBLE_S`."""

    @property
    def is_settled(self) -> bool:
        """Whether a longer run would give about the same result."""
        return not self.is_growing and (self.attainment_high - self.attainment_low) / 2 <= PRECISE


def stability(arrival_s: Floats, wait_s: Floats, is_in_time: npt.NDArray[np.bool_]) -> Stability:
    """Judge a run. Arrays have one element for each request, in any order. A wait of NaN means that no token came.

    Runs with fewer than `NUM_BATCHES` first tokens show no growth.
    """
    order = np.argsort(arrival_s, kind="stable")
    batches = [rows for rows in np.array_split(order, NUM_BATCHES) if len(rows)]
    shares = [float(is_in_time[rows].mean()) for rows in batches]
    mean = float(is_in_time.mean()) if len(is_in_time) else 0.0
    half = 0.0
    if bounds := interval(shares):
        half = (bounds[1] - bounds[0]) / 2
    began = [rows[~np.isnan(wait_s[rows])] for rows in batches]
    known = [rows for rows in began if len(rows)]
    middle_s = np.array([arrival_s[rows].mean() for rows in known])
    growth, is_growing = _trend(middle_s, np.array([wait_s[rows].mean() for rows in known]))
    return Stability(len(arrival_s), mean, max(0.0, mean - half), min(1.0, mean + half), growth, is_growing)


def _trend(at_s: Floats, values_s: Floats) -> tuple[float, bool]:
    """The slope of a regression line, and whether its 95% interval lies above 0 and the rise is not negligible."""
    if len(at_s) < NUM_BATCHES or at_s[-1] <= at_s[0]:
        return 0.0, False
    centred = at_s - at_s.mean()
    spread = float(centred @ centred)
    slope = float(centred @ values_s) / spread
    rest = values_s - values_s.mean() - slope * centred
    freedom = len(at_s) - 2
    error = sqrt(float(rest @ rest) / freedom / spread)
    rise_s = slope * float(at_s[-1] - at_s[0])
    return slope, slope - quantile(freedom) * error > 0 and rise_s > NEGLIGIBLE_S


def lasting(
    rehearse: Callable[[int], Stability], attainment: float, num_requests: int, most_requests: int
) -> tuple[Stability, ...]:
    """Rehearse with more and more requests, from `num_requests`, until it is clear whether the attainment lasts.

    The last run misses; or it is settled and `LENGTHEN` times as long as another run that also met the attainment; or
    it has the largest allowed length.
    """
    runs: list[Stability] = []
    num = min(num_requests, most_requests)
    while True:
        runs.append(rehearse(num))
        is_enough = len(runs) > 1 and runs[-1].is_settled
        if runs[-1].attainment < attainment or is_enough or num >= most_requests:
            return tuple(runs)
        num = min(num * LENGTHEN, most_requests)


def lasts(run: Stability, attainment: float) -> bool:
    """Whether `run`, the last of some runs, shows a fleet that keeps up."""
    return run.attainment >= attainment and not run.is_growing
