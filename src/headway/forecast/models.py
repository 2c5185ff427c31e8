"""ETS and ARIMA from statsforecast, an optional dependency.

Fitting takes tenths of a second, updating a fitted model milliseconds. Order and coefficients are therefore fitted on
the history up to the last multiple of `refit_every` steps. The model then runs over the whole history, so that
forecasts start from the latest value. The length of the history alone determines the data of a fit, so a forecast
depends only on its arguments, and the cached fit only saves time.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import numpy as np

from headway.core.errors import HeadwayError
from headway.core.policy import Floats
from headway.forecast.naive import LastValue

LEAST = 8
"""Minimum number of values for a fit; with fewer, the last value is the forecast."""
LEVEL = 80
"""Percent of the prediction interval from which the standard error is computed."""
Order = tuple[int, int, int]


class StatsModel:
    """A model of statsforecast. Its errors are assumed to be normal, as in the library's own intervals."""

    cheats = False

    def __init__(self, season: int = 1, refit_every: int = 24) -> None:
        """`season`: the period of the series in steps; 1 means no season. The season is used once the history has two
        periods."""
        if season < 1 or refit_every < 1:
            raise HeadwayError(f"season {season}, refit_every {refit_every}: expected 1 step or more")
        self.season, self.refit_every = season, refit_every
        self._models = _statsforecast()
        self._key: bytes | None = None
        self._fitted: Any = None

    def forecast(self, history: Floats, steps: int, quantiles: Sequence[float]) -> Floats:
        num = self._fit_on(len(history))
        if num < LEAST or np.ptp(history[:num]) == 0:  # nothing to fit
            return LastValue().forecast(history, steps, quantiles)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # convergence warnings: the coefficients are still the best found
            model = self._fit(history[:num])
            predicted = model.forward(history, steps, level=[LEVEL])
        return normal_quantiles(predicted["mean"], predicted[f"hi-{LEVEL}"], quantiles, history)

    def _fit_on(self, length: int) -> int:
        """The number of values to fit on: a multiple of `refit_every`, or a power of two before the first multiple."""
        whole = length // self.refit_every * self.refit_every
        return whole if whole >= LEAST else 1 << (length.bit_length() - 1)

    def _fit(self, known: Floats) -> Any:
        key = known.tobytes()
        if key != self._key:
            season = self.season if len(known) >= 2 * self.season else 1
            self._fitted = self._model(season).fit(known)
            self._key = key
        return self._fitted

    def _model(self, season: int) -> Any:
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_models"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _models=_statsforecast())


class Ets(StatsModel):
    """Exponential smoothing: error, trend and season additive, multiplicative or absent, by AICc."""

    def _model(self, season: int) -> Any:
        return self._models.AutoETS(season_length=season)


class AutoArima(StatsModel):
    """ARIMA with the order of least AIC, as in SageServe (7.1): orders up to 3, seasonal up to 1, stepwise search.

    At most 12 orders are tried. Wider searches and 30 tries found no better order on the demand published with the
    paper, and take half as long again or twice as long.
    """

    def _model(self, season: int) -> Any:
        return self._models.AutoARIMA(
            season_length=season, ic="aic", approximation=True, max_p=3, max_q=3, max_P=1, max_Q=1, nmodels=12
        )


class Arima(StatsModel):
    """ARIMA of a given order (p, d, q) and seasonal order (P, D, Q)."""

    def __init__(self, order: Order, seasonal_order: Order = (0, 0, 0), season: int = 1, refit_every: int = 24) -> None:
        super().__init__(season, refit_every)
        if min(*order, *seasonal_order) < 0:
            raise HeadwayError(f"order {order}, seasonal {seasonal_order}: expected whole numbers from 0")
        self.order, self.seasonal_order = order, seasonal_order

    def _model(self, season: int) -> Any:
        seasonal = self.seasonal_order if season > 1 else (0, 0, 0)
        return self._models.ARIMA(order=self.order, seasonal_order=seasonal, season_length=season)


class InSample:
    """Not a forecast: one-step predictions of a model that was fitted on the whole series, including its future.

    SageServe's artifact scales by such predictions, made from the trace on which it is evaluated. This class shows the
    effect: each prediction uses the true value one step before.
    """

    cheats = True

    def __init__(self, model: StatsModel, whole: Floats) -> None:
        """`whole`: the series; every history is a prefix of it."""
        self.whole = np.asarray(whole, "f8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            predicted = model._fit(self.whole).predict_in_sample(level=[LEVEL])
        self.mean, self.high = predicted["fitted"], predicted[f"fitted-hi-{LEVEL}"]

    def forecast(self, history: Floats, steps: int, quantiles: Sequence[float]) -> Floats:
        """See `Forecaster`; uses values after the history."""
        at = slice(len(history), len(history) + steps)
        if len(history) + steps > len(self.whole):
            raise HeadwayError(f"{len(history) + steps} steps; the series has {len(self.whole)}")
        return normal_quantiles(self.mean[at], self.high[at], quantiles, history)


def normal_quantiles(mean: Floats, high: Floats, quantiles: Sequence[float], history: Floats) -> Floats:
    """Quantiles of normal errors, from the mean and the upper end of its interval; never below 0.

    A diverging model is limited to twice the highest past value, and replaced by the last value if it predicts none.
    """
    normal = NormalDist()
    mean = np.nan_to_num(np.asarray(mean, "f8"), nan=float(history[-1]))
    error = np.nan_to_num((np.asarray(high, "f8") - mean) / normal.inv_cdf(0.5 + LEVEL / 200), nan=0.0, posinf=0.0)
    scores = np.array([normal.inv_cdf(q) for q in quantiles])
    predicted = mean + scores[:, None] * np.maximum(error, 0.0)
    return np.asarray(np.clip(predicted, 0.0, 2 * float(history.max())), "f8")


def _statsforecast() -> Any:
    try:
        from statsforecast import models
    except ImportError:
        raise HeadwayError("ETS and ARIMA need statsforecast: pip install 'headway[forecast]'") from None
    return models
