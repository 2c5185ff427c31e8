"""Forecasters by name, and the mean of several forecasters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from headway.core.errors import HeadwayError, unknown
from headway.core.policy import Floats, Forecaster
from headway.forecast.models import Arima, AutoArima, Ets, InSample, Order, StatsModel
from headway.forecast.naive import LastValue, SeasonalMean, SeasonalNaive


class Blend:
    """The mean of several forecasters' quantiles.

    If one forecaster has a large error, the others limit it. Scaling by the blend takes fewer GPUs than scaling by most
    of its parts, and about as few as the best part, which differs between series.
    """

    def __init__(self, parts: Sequence[Forecaster]) -> None:
        self.parts = tuple(parts)
        self.cheats = any(part.cheats for part in self.parts)

    def forecast(self, history: Floats, steps: int, quantiles: Sequence[float]) -> Floats:
        forecasts = [part.forecast(history, steps, quantiles) for part in self.parts]
        return np.asarray(np.mean(forecasts, axis=0), "f8")


METHODS: dict[str, Callable[[int], Forecaster]] = {
    "last-value": lambda season: LastValue(),
    "seasonal-naive": SeasonalNaive,
    "seasonal-mean": SeasonalMean,
    "ets": Ets,
    "arima": AutoArima,
    "blend": lambda season: Blend([LastValue(), SeasonalNaive(season), Ets(season), AutoArima(season)]),
}
LEAK = "-leak"
"""Suffix of the names of methods that are fitted on the whole series."""


def make(name: str, season: int, whole: Floats | None = None) -> Forecaster:
    """A forecaster for one series, by name.

    `last-value`, `seasonal-naive`, `ets`, `arima` (order by AIC), `blend` (the mean of these four), `seasonal-mean`,
    `arima:2-1-1` and `arima:1-0-1:0-1-1` (given orders, the second seasonal). With the suffix `-leak`, the model is
    fitted on `whole`, and cheats.
    """
    if name.endswith(LEAK):
        model = make(name.removesuffix(LEAK), season)
        if not isinstance(model, StatsModel):
            raise HeadwayError(f"{name}: only a model that is fitted can leak: ets or arima")
        if whole is None:
            raise HeadwayError(f"{name}: expected the whole series, to be fitted on")
        return InSample(model, whole)
    if name.startswith("arima:"):
        orders = [_order(part, name) for part in name.removeprefix("arima:").split(":")]
        if len(orders) > 2:
            raise HeadwayError(f"{name}: expected one order or two, as in arima:1-0-1:0-1-1")
        return Arima(orders[0], orders[1] if len(orders) > 1 else (0, 0, 0), season)
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    return METHODS[name](season)


def _order(text: str, name: str) -> Order:
    parts = text.split("-")
    if len(parts) != 3 or not all(part.isdecimal() for part in parts):
        raise HeadwayError(f"{name}: {text!r}; expected three whole numbers, as in arima:2-1-1")
    p, d, q = map(int, parts)
    return p, d, q
