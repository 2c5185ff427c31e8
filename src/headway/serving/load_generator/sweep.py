"""Loads from one request at a time to beyond saturation. Finds where throughput stops growing, and the highest rate
within the SLOs.

The rates are shares of the throughput of a closed loop with many clients. The knee is the rate of an open loop with the
greatest power, throughput over mean latency (L. Kleinrock, "Power and deterministic rules of thumb for probabilistic
problems in computer communications", ICC 1979).
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
from msgspec import Struct

from headway.core.errors import HeadwayError
from headway.planning.stability import stability
from headway.serving.load_generator.run import Load

SHARES = (0.2, 0.4, 0.6, 0.75, 0.9, 1.05, 1.25)
"""Rates of the open loops relative to the throughput of the closed loop."""
FURTHER, MOST_FURTHER = 1.4, 4
"""(factor to the next rate while waits do not grow, maximum number of times that a higher rate is tried)."""
PRECISION = 1.1
"""Precision of the search: it ends when the lowest rate that misses the SLOs is at most this factor above the highest
rate that meets them."""
MOST_TRIALS = 6
BELOW = 0.5
"""If all rates miss the SLOs: share of the lowest rate at which the next load is run."""


class Point(Struct, frozen=True):
    """One load of a sweep."""

    rate_rps: float | None
    """Rate of an open loop; None for a closed loop."""
    concurrency: int | None
    load: Load

    @property
    def throughput_rps(self) -> float:
        return self.load.measured.throughput_rps

    @property
    def e2e_s(self) -> float:
        """Mean end-to-end latency; NaN without a complete answer."""
        found = self.load.measured.e2e_s
        return math.nan if found is None else found.mean

    @property
    def is_growing(self) -> bool:
        """Whether the waits for first tokens grow from request to request: the engine does not keep up."""
        if self.rate_rps is None:
            return False
        whole = [each for each in self.load.sent if each.answer.is_whole]
        arrivals_s = np.array([each.request.arrival_s for each in whole])
        waits_s = np.array([each.answer.first_s for each in whole]) - arrivals_s
        return stability(arrivals_s, waits_s, np.ones(len(whole), np.bool_)).is_growing

    @property
    def name(self) -> str:
        clients = "1 client" if self.concurrency == 1 else f"{self.concurrency} clients"
        return clients if self.rate_rps is None else f"{self.rate_rps:.3g}/s"


class HighestRate(Struct, frozen=True):
    """The highest rate at which enough requests met their SLOs."""

    rate_rps: float
    """The highest rate that met the SLOs; 0 if no rate did."""
    missed_rps: float | None
    """The lowest rate that missed the SLOs; None if no rate did."""


class Sweep(Struct, frozen=True):
    points: tuple[Point, ...]
    """Points in order of the rate, closed loops first."""
    highest: HighestRate | None
    """The highest rate that meets the SLOs; None without SLOs."""
    is_stopped: bool

    @property
    def open_points(self) -> list[Point]:
        return [each for each in self.points if each.rate_rps is not None]

    @property
    def knee(self) -> Point | None:
        """The rate with the greatest power."""
        known = [each for each in self.open_points if each.e2e_s > 0]
        return max(known, key=lambda each: each.throughput_rps / each.e2e_s, default=None)

    @property
    def most_rps(self) -> float:
        """The highest throughput of any load."""
        return max(each.throughput_rps for each in self.points)


Measure = Callable[[float | None, int | None], Awaitable[Load]]
"""Runs a load at a rate, or with a number of clients."""


async def sweep(measure: Measure, many: int, attainment: float | None = None) -> Sweep:
    """Run one client, then `many`, then rates up to beyond saturation. With an `attainment`, also search the highest
    rate with at least that SLO attainment.

    A stopped load ends the sweep. Raises HeadwayError if no request of the closed loop is answered.
    """
    points: list[Point] = []

    async def add(rate_rps: float | None, concurrency: int | None) -> Load:
        points.append(Point(rate_rps, concurrency, await measure(rate_rps, concurrency)))
        return points[-1].load

    def result(is_stopped: bool, highest: HighestRate | None = None) -> Sweep:
        ordered = sorted(points, key=lambda each: (each.rate_rps or 0.0, each.concurrency or 0))
        return Sweep(tuple(ordered), highest, is_stopped)

    for concurrency in dict.fromkeys((1, many)):
        if (await add(None, concurrency)).is_stopped:
            return result(True)
    most_rps = points[-1].throughput_rps
    if not most_rps:
        raise HeadwayError("the engine answers no request whole; without --sweep the errors are told")
    for share in SHARES:
        if (await add(share * most_rps, None)).is_stopped:
            return result(True)
    for _ in range(MOST_FURTHER):
        if points[-1].is_growing:
            break
        if (await add((points[-1].rate_rps or 0.0) * FURTHER, None)).is_stopped:
            return result(True)
    if attainment is None:
        return result(False)
    for _ in range(MOST_TRIALS):
        found = highest_of(points, attainment)
        rate_rps = next_trial(found, min(each.rate_rps for each in points if each.rate_rps is not None))
        if rate_rps is None:
            break
        if (await add(rate_rps, None)).is_stopped:
            return result(True)
    return result(False, highest_of(points, attainment))


def highest_of(points: Sequence[Point], attainment: float) -> HighestRate:
    """The highest rate below all rates that miss, because by noise a higher rate may pass where a lower one missed.

    A load with growing waits misses: its requests were in time only because it was short.
    """
    judged = [each for each in points if each.rate_rps is not None]
    missed = [each.rate_rps for each in judged if each.rate_rps is not None and not _meets(each, attainment)]
    met = [
        each.rate_rps for each in judged if each.rate_rps is not None and each.rate_rps < min(missed, default=math.inf)
    ]
    return HighestRate(max(met, default=0.0), min(missed, default=None))


def _meets(point: Point, attainment: float) -> bool:
    share = point.load.measured.slo_attainment
    return share is not None and share >= attainment and not point.is_growing


def next_trial(found: HighestRate, lowest_rps: float) -> float | None:
    """The rate to try next. None if the highest rate is known precisely enough, or no rate of the sweep misses the
    SLOs."""
    if found.missed_rps is None:
        return None
    if not found.rate_rps:
        return BELOW * lowest_rps
    if found.missed_rps <= PRECISION * found.rate_rps:
        return None
    return math.sqrt(found.rate_rps * found.missed_rps)
