"""Forecasters by name."""

from __future__ import annotations

from collections.abc import Callable

from headway.core.errors import HeadwayError, unknown
from headway.core.forecast import Floats, Forecaster
from headway.forecast.blend import Blend
from headway.forecast.models import Arima, AutoArima, Ets, InSample, Model, Order
from headway.forecast.naive import LastValue, SeasonalNaive

METHODS: dict[str, Callable[[int], Forecaster]] = {
    "last-value": lambda season: LastValue(),
    "seasonal-naive": SeasonalNaive,
    "ets": Ets,
    "arima": AutoArima,
    "blend": lambda season: Blend([LastValue(), SeasonalNaive(season), Ets(season), AutoArima(season)]),
}
LEAK = "-leak"
"""What a name ends in where the model is to be fitted on the whole series."""


def make(name: str, season: int, whole: Floats | None = None) -> Forecaster:
    """A forecaster for one series, by name.

    `last-value`, `seasonal-naive`, `ets`, `arima` (order by AIC), `blend` (the mean of these four), `arima:2-1-1` and
    `arima:1-0-1:0-1-1` (orders given, the second of the season). With `-leak` at the end the model is fitted on
    `whole`, and cheats.
    """
    if name.endswith(LEAK):
        model = make(name.removesuffix(LEAK), season)
        if not isinstance(model, Model):
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
