"""Forecasts without a model: a past value, with quantiles from its past errors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headway.core.errors import HeadwayError
from headway.core.policy import Floats


class LastValue:
    """The last value, with the quantiles of past changes over as many steps."""

    cheats = False

    def forecast(self, history: Floats, steps: int, quantiles: Sequence[float]) -> Floats:
        """See `Forecaster`; the median is the last value."""
        return _forecast(history, [(len(history) - 1, step + 1) for step in range(steps)], quantiles)


class _Seasonal:
    cheats = False

    def __init__(self, season: int) -> None:
        """`season`: the period of the series in steps, such as 24 hours."""
        if season < 1:
            raise HeadwayError(f"season: {season}; expected 1 step or more")
        self.season = season


class SeasonalNaive(_Seasonal):
    """The value one season before; the last value until there is a season.

    The quantiles are those of past differences between seasons.
    """

    def forecast(self, history: Floats, steps: int, quantiles: Sequence[float]) -> Floats:
        """See `Forecaster`; the median is the value a season before."""
        if len(history) < self.season:
            return LastValue().forecast(history, steps, quantiles)
        first = len(history) - self.season
        sources = [(first + step % self.season, self.season * (step // self.season + 1)) for step in range(steps)]
        return _forecast(history, sources, quantiles)


class SeasonalMean(_Seasonal):
    """The mean of the step in all past seasons; the last value until there is a season.

    The quantiles are those of past differences from these means.
    """

    def forecast(self, history: Floats, steps: int, quantiles: Sequence[float]) -> Floats:
        """See `Forecaster`; the median is the mean of the seasons."""
        if len(history) < self.season:
            return LastValue().forecast(history, steps, quantiles)
        position = np.arange(len(history)) % self.season
        means = np.bincount(position, history, self.season) / np.bincount(position, minlength=self.season)
        spread = np.quantile(history - means[position], (*quantiles, 0.5))
        ahead = means[(len(history) + np.arange(steps)) % self.season]
        return np.asarray(np.maximum(ahead + (spread[:-1] - spread[-1])[:, None], 0.0), "f8")


def _forecast(history: Floats, sources: Sequence[tuple[int, int]], quantiles: Sequence[float]) -> Floats:
    """Quantiles of each step, given the position of its past value and the number of steps since that value."""
    rows = [history[position] + _spread(history, lag, quantiles) for position, lag in sources]
    return np.asarray(np.maximum(np.array(rows).T.reshape(len(quantiles), len(sources)), 0.0), "f8")


def _spread(history: Floats, lag: int, quantiles: Sequence[float]) -> Floats:
    """Quantiles of the differences over `lag` steps, relative to their median; 0 without differences."""
    if len(history) <= lag:
        return np.zeros(len(quantiles))
    found = np.quantile(history[lag:] - history[:-lag], (*quantiles, 0.5))
    return np.asarray(found[:-1] - found[-1], "f8")
