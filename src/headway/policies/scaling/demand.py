"""Rates of arrivals from cumulative counts."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from math import sqrt

import numpy as np

from headway.core.past_demand import PastDemand
from headway.core.view import PoolsView

CHANCE = 3.0
"""Number of standard deviations; of a thousand counts, one deviates by more."""
Cell = tuple[str, str]
"""(model, region)."""


def arrived_by_cell(view: PoolsView) -> Iterator[tuple[Cell, int, int, int]]:
    """(cell, tier, requests, prompt tokens) since the start."""
    cell_of = _cells(view)
    for (model, region, tier), (requests, tokens) in view.arrived.items():
        yield cell_of(model, region), tier, requests, tokens


def _cells(view: PoolsView) -> Callable[[str, str], Cell]:
    """Returns the cell of a request's model and region.

    If there is only one model, or one region, requests may give another name or none; they count for the only one.
    """
    models = {pool.model for pool in view.pools}
    regions = {pool.region for pool in view.pools}
    model_of_all = next(iter(models)) if len(models) == 1 else None
    region_of_all = next(iter(regions)) if len(regions) == 1 else None
    return lambda model, region: (
        model if model_of_all is None else model_of_all,
        region if region_of_all is None else region_of_all,
    )


def past_by_cell(
    past: PastDemand, view: PoolsView, step_s: float, is_counted: Callable[[int], bool], whole_s: float | None = None
) -> dict[Cell, list[float]]:
    """Rates in steps of `step_s` up to the start of the run, over the counted tiers.

    The number of steps fills a multiple of `whole_s` (None: of `step_s`); older demand is left out.
    """
    cell_of, whole_s = _cells(view), step_s if whole_s is None else whole_s
    num = int(past.length_s / whole_s + 1e-9) * round(whole_s / step_s)
    found: dict[Cell, np.ndarray] = {}
    edges_s = past.length_s - step_s * np.arange(num, -1, -1)
    ends_s = past.step_s * np.arange(past.num_steps + 1)
    for (model, region, tier), tps in past.tps.items():
        if is_counted(tier):
            tokens = np.concatenate([[0.0], np.cumsum(tps) * past.step_s])
            rates = np.diff(np.interp(edges_s, ends_s, tokens)) / step_s
            cell = cell_of(model, region)
            found[cell] = found[cell] + rates if cell in found else rates
    return {cell: rates.tolist() for cell, rates in found.items()}


class ArrivalCounts:
    """Cumulative counts of arrivals, kept for `longest_s`."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._times_s: list[float] = []
        self._counts: list[int] = []

    def push(self, now: float, count: int) -> None:
        """Record the number of arrivals since the start."""
        self._times_s.append(now)
        self._counts.append(count)
        # The last count before the window is the window's beginning.
        old = bisect_right(self._times_s, now - self._longest_s) - 1
        if old > 0:
            del self._times_s[:old], self._counts[:old]

    def rate_rps(self, window_s: float) -> float:
        """The mean rate over the last `window_s`, or since the oldest count."""
        first = max(bisect_right(self._times_s, self._times_s[-1] - window_s) - 1, 0)
        elapsed_s = self._times_s[-1] - self._times_s[first]
        return (self._counts[-1] - self._counts[first]) / elapsed_s if elapsed_s > 0 else 0.0

    def present_rps(self, window_s: float) -> float:
        """The mean rate over the last `window_s`. If the rate has risen within the window, the mean since the rise.

        A rise is detected where two parts of the window differ by more than `CHANCE` standard deviations of a Poisson
        process; of several such times, the most likely one counts.
        """
        first = max(bisect_right(self._times_s, self._times_s[-1] - window_s) - 1, 0)
        now, count, best, rate = self._times_s[-1], self._counts[-1], CHANCE, self.rate_rps(window_s)
        for i in range(first + 1, len(self._times_s) - 1):
            after_s, before_s = now - self._times_s[i], self._times_s[i] - self._times_s[first]
            after, before = count - self._counts[i], self._counts[i] - self._counts[first]
            if after_s > 0 and before_s > 0 and after + before > 0:
                rise = after / after_s - before / before_s
                if rise > best * sqrt(after / after_s**2 + before / before_s**2):
                    best = rise / sqrt(after / after_s**2 + before / before_s**2)
                    rate = after / after_s
        return rate


class StepRates:
    """Mean rates over equal time steps, from cumulative counts since the start.

    Growth between two counts is assumed to be linear. `most`: number of last steps to keep; None: all of them.
    """

    def __init__(
        self, step_s: float, nothing_until_s: float = 0.0, most: int | None = None, past: Sequence[float] = ()
    ) -> None:
        """`past`: rates of the steps before the start."""
        self.step_s = step_s
        self.rates: list[float] = list(past)
        """Rate per second of each completed step."""
        self.num_steps = 0
        """Completed steps since the start, including steps that are no longer kept."""
        self._most = most
        self._seen_s, self._count = 0.0, 0.0
        self._count_at_step = 0.0
        self.push(nothing_until_s, 0)

    def push(self, now: float, count: float) -> None:
        """Record the count since the start."""
        while (end_s := (self.num_steps + 1) * self.step_s) <= now:
            share = (end_s - self._seen_s) / (now - self._seen_s) if now > self._seen_s else 1.0
            at_end = self._count + share * (count - self._count)
            self.rates.append((at_end - self._count_at_step) / self.step_s)
            self._count_at_step = at_end
            self.num_steps += 1
        if self._most is not None and len(self.rates) > self._most + self._most // 8:
            del self.rates[: -self._most]
        self._seen_s, self._count = now, count
