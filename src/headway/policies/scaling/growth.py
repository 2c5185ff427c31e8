"""A forecast from past growth of demand, within minutes and at the same time of day."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headway.core.policy import Floats

RECENT_S = 3 * 3600.0
DAY_S = 86_400.0
BEFORE_S, AFTER_S = 300.0, 900.0
"""Seconds before and after the fit's time of day: the interval in which growth on earlier days counts."""
LEAST_DAYS, MOST_DAYS = 2, 7
REFIT_S = 600.0
LEAST_S = 3600.0
DAMPED = 12
"""Steps after which a level no longer depends on its initial value."""
DAMPING = 0.5
"""Weight of the newest step in the level, because a single step with few requests is mostly noise."""
FLOOR = 0.1
"""Share of the mean demand that is added to both levels of a ratio, so that an idle hour is no base of growth."""


class RecentGrowth:
    """Forecasts the current level times a quantile of its past growth over as many steps.

    The level is a mean in which each step weighs half as much as the next. Growth is the growth of the last three hours
    or the growth at this time of day on past days, whichever is larger; a single past day does not count. In the first
    hour, the level is expected to stay constant. Implements `core.policy.Forecaster`.
    """

    cheats = False

    def __init__(self, step_s: float = 60.0) -> None:
        self._step_s = step_s
        self._fitted: tuple[int, int, tuple[float, ...]] | None = None
        self._growth: Floats = np.zeros((0, 0))

    def forecast(self, history: Floats, steps: int, quantiles: Sequence[float]) -> Floats:
        every = max(round(REFIT_S / self._step_s), 1)
        end = max(len(history) // every * every, min(len(history), every))
        fitted = end, steps, tuple(quantiles)
        if fitted != self._fitted:
            self._growth = self._fit(history[:end], steps, quantiles)
            self._fitted = fitted
        return _level(history[-DAMPED:])[-1:] * self._growth

    def _fit(self, history: Floats, steps: int, quantiles: Sequence[float]) -> Floats:
        """Growth factors with a row for each quantile and a column for each step ahead."""
        day, recent, before, after = (round(s / self._step_s) for s in (DAY_S, RECENT_S, BEFORE_S, AFTER_S))
        history = history[-(MOST_DAYS * day + before + DAMPED) :]
        level, mean, end = _level(history), float(history.mean()), len(history)
        growth = np.ones((len(quantiles), steps))
        if mean <= 0 or end * self._step_s < LEAST_S:
            return growth
        same_time = [
            np.arange(end - days * day - before, end - days * day + after)
            for days in range(1, MOST_DAYS + 1)
            if end - days * day - before >= DAMPED
        ]
        bases = [np.arange(max(end - recent, 0), end)]
        if len(same_time) >= LEAST_DAYS:
            bases.append(np.concatenate(same_time))
        for step in range(1, steps + 1):
            for at in bases:
                base = at[at + step < end]
                if len(base):
                    ratios = (history[base + step] + FLOOR * mean) / (level[base] + FLOOR * mean)
                    growth[:, step - 1] = np.maximum(growth[:, step - 1], np.quantile(ratios, quantiles))
        return np.maximum.accumulate(growth, axis=0)


def _level(history: Floats) -> Floats:
    level = np.empty(len(history))
    now = float(history[0])
    for i, value in enumerate(history.tolist()):
        now += DAMPING * (value - now)
        level[i] = now
    return level
