"""ETS and ARIMA by statsforecast, an optional dependency.

Fitting takes tenths of a second, taking in what is new milliseconds. So a model is fitted on the history up to the
last multiple of `refit_every` steps, order and coefficients, and is then run over the whole history with these: where
a forecast is made from stays current. What it was fitted on follows from the length of the history alone, so a
forecast depends on nothing but its arguments, and the fit that is kept from call to call only saves time.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import numpy as np

from headway.core.errors import HeadwayError
from headway.core.forecast import Floats
from headway.forecast.naive import LastValue

LEAST = 8
"""Values below which no model is fitted; the last value stands in."""
LEVEL = 80
"""Per cent of the interval asked of statsforecast, from which its standard error is read."""
Order = tuple[int, int, int]


class Model:
    """A model of statsforecast. Its errors are taken as normal, as its own intervals do."""

    cheats = False

    def __init__(self, season: int = 1, refit_every: int = 24) -> None:
        """`season`: steps after which the series looks alike; 1 = never. Used once there are two of them."""
        if season < 1 or refit_every < 1:
            raise HeadwayError(f"season {season}, refit_every {refit_every}: expected 1 step or more")
        self.season, self.refit_every = season, refit_every
        self._models = _statsforecast()
        self._key: bytes | None = None
        self._fitted: Any = None

    def forecast(self, history: Floats, steps: int, quantiles: Sequence[float]) -> Floats:
        """As the Protocol says."""
        num = self._fit_on(len(history))
        if num < LEAST or np.ptp(history[:num]) == 0:  # nothing to fit
            return LastValue().forecast(history, steps, quantiles)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of convergence: the coefficients are as good as they get
            model = self._fit(history[:num])
            said = model.forward(history, steps, level=[LEVEL])
        return normal_quantiles(said["mean"], said[f"hi-{LEVEL}"], quantiles, history)

    def _fit_on(self, length: int) -> int:
        """How much of a history the model is fitted on: whole periods; before the first of them, powers of two."""
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


class Ets(Model):
    """Exponential smoothing: error, trend and season additive, multiplicative or absent, by AICc."""

    def _model(self, season: int) -> Any:
        return self._models.AutoETS(season_length=season)


class AutoArima(Model):
    """ARIMA with the order of least AIC, as SageServe has it (7.1), searched stepwise: up to 3, of the season up to 1.

    At most 12 of them are tried. Wider searches, and 30 tries, found nothing better on the demand published with the
    paper, and take half as long again or twice as long.
    """

    def _model(self, season: int) -> Any:
        return self._models.AutoARIMA(
            season_length=season, ic="aic", approximation=True, max_p=3, max_q=3, max_P=1, max_Q=1, nmodels=12
        )


class Arima(Model):
    """ARIMA of a given order (p, d, q), and (P, D, Q) of the season."""

    def __init__(self, order: Order, seasonal_order: Order = (0, 0, 0), season: int = 1, refit_every: int = 24) -> None:
        super().__init__(season, refit_every)
        if min(*order, *seasonal_order) < 0:
            raise HeadwayError(f"order {order}, seasonal {seasonal_order}: expected whole numbers from 0")
        self.order, self.seasonal_order = order, seasonal_order

    def _model(self, season: int) -> Any:
        seasonal = self.seasonal_order if season > 1 else (0, 0, 0)
        return self._models.ARIMA(order=self.order, seasonal_order=seasonal, season_length=season)


class InSample:
    """Not a forecast: what a model fitted on the whole series, its future included, says of it one step ahead.

    SageServe's artifact scales by such a file, made once from the trace it is then judged on. Here to show what that
    is worth: any step ahead is told from the true value right before it.
    """

    cheats = True

    def __init__(self, model: Model, whole: Floats) -> None:
        """`whole`: the series, of which every history is a beginning."""
        self.whole = np.asarray(whole, "f8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            said = model._fit(self.whole).predict_in_sample(level=[LEVEL])
        self.mean, self.high = said["fitted"], said[f"fitted-hi-{LEVEL}"]

    def forecast(self, history: Floats, steps: int, quantiles: Sequence[float]) -> Floats:
        """As the Protocol says, but for the cheating."""
        at = slice(len(history), len(history) + steps)
        if len(history) + steps > len(self.whole):
            raise HeadwayError(f"{len(history) + steps} steps; the series has {len(self.whole)}")
        return normal_quantiles(self.mean[at], self.high[at], quantiles, history)


def normal_quantiles(mean: Floats, high: Floats, quantiles: Sequence[float], history: Floats) -> Floats:
    """Of normal errors, from a mean and the upper end of its interval; 0 and up.

    A model that runs away is held to twice what was ever seen, or to the last value where it says nothing at all.
    """
    normal = NormalDist()
    mean = np.nan_to_num(np.asarray(mean, "f8"), nan=float(history[-1]))
    error = np.nan_to_num((np.asarray(high, "f8") - mean) / normal.inv_cdf(0.5 + LEVEL / 200), nan=0.0, posinf=0.0)
    scores = np.array([normal.inv_cdf(q) for q in quantiles])
    said = mean + scores[:, None] * np.maximum(error, 0.0)
    return np.asarray(np.clip(said, 0.0, 2 * float(history.max())), "f8")


def _statsforecast() -> Any:
    try:
        from statsforecast import models
    except ImportError:
        raise HeadwayError("ETS and ARIMA need statsforecast: pip install 'headway[forecast]'") from None
    return models
