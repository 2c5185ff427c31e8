"""Compares forecasters on past demand: errors by rolling origin, and the GPUs that each needs for one SLO."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import numpy as np
from msgspec import Struct

from headway.core.errors import HeadwayError
from headway.core.policy import Floats
from headway.forecast.methods import LEAK, make
from headway.forecast.scaling import Expected, ObservedDemand, ScalingResult, matched
from headway.workload.series import Aggregate, DemandSeries

QUANTILES = (0.1, 0.5, 0.9, 0.95)
CLAIRVOYANT = "clairvoyant"


class EvaluationSettings(Struct, frozen=True, forbid_unknown_fields=True):
    methods: tuple[str, ...] = ("last-value", "seasonal-naive", "ets", "arima", "blend", "arima-leak")
    step_s: float = 3600.0
    """Step of the forecast series."""
    of: Aggregate = "max"
    """How finer steps of the series are aggregated: by maximum, as SageServe scales, or by mean."""
    horizon: int = 1
    """Number of steps from the last known value to the forecast step, because GPUs must be requested this early."""
    season: int = 24
    """Period of the series in steps."""
    warmup: int | None = None
    """Steps before the first forecast; None: two seasons."""
    quantiles: tuple[float, ...] = QUANTILES
    capacity: float | None = None
    """Demand that one instance serves, in the unit of the series. None: a tenth of the largest mean of a series."""
    gpus_per_instance: int = 8
    exceeded: float = 0.01
    """The SLO: share of the series' steps in which demand may exceed capacity."""

    def __post_init__(self) -> None:
        if not self.methods or len(set(self.methods)) < len(self.methods):
            raise ValueError("methods: expected one or more, each once")
        if self.horizon < 1 or self.season < 1 or self.gpus_per_instance < 1:
            raise ValueError("horizon, season, gpus_per_instance: expected 1 or more")
        inside = all(0 < q < 1 for q in self.quantiles)
        if 0.5 not in self.quantiles or not inside or max(self.quantiles) == 0.5:
            raise ValueError(f"quantiles: {self.quantiles}; expected some between 0 and 1, 0.5 and a larger one too")
        if not 0 <= self.exceeded < 1:
            raise ValueError(f"exceeded: {self.exceeded}; expected 0 to 1")
        if self.capacity is not None and not 0 < self.capacity < float("inf"):
            raise ValueError(f"capacity: {self.capacity}; expected a number above 0")


class Errors(Struct, frozen=True, forbid_unknown_fields=True):
    """Errors of forecasts `horizon` steps ahead, as fractions of 1."""

    mape: float | None
    """Mean of |median - actual| / actual over steps with demand; None without such a step."""
    smape: float
    """Mean of 2 |median - actual| / (median + actual)."""
    wape: float | None
    """Sum of |median - actual| over the sum of actuals."""
    under_share: float
    """Share of steps with more demand than the median."""
    pinball: dict[str, float | None]
    """Maps each quantile to the mean pinball loss over the mean demand."""
    coverage: dict[str, float]
    """Maps each quantile to the share of steps whose demand does not exceed it."""


class MethodResult(Struct, frozen=True, forbid_unknown_fields=True):
    method: str
    cheats: bool
    """Whether the method used the values it forecasts."""
    errors: Errors
    """Errors over all series."""
    by_series: dict[str, Errors]
    scaled: ScalingResult | None
    """The cost of scaling at the matched SLO; None if the SLO cannot be met."""
    forecast_s: float
    """Mean wall seconds of one forecast."""


class Evaluation(Struct, frozen=True, forbid_unknown_fields=True):
    question: EvaluationSettings
    series: tuple[str, ...]
    num_forecasts: int
    """Number of forecasts of each method."""
    capacity: float
    rows: tuple[MethodResult, ...]
    notes: tuple[str, ...] = ()
    """Notes on omitted series, with the reason."""


def evaluate(
    series: Sequence[DemandSeries], question: EvaluationSettings, progress: Callable[[float], None] | None = None
) -> Evaluation:
    """Forecast every step after the warm-up from the values up to `horizon` steps before it, and compare the errors.

    Series that are too short are left out; raises HeadwayError if all are too short. The last row is the method that
    knows the demand.
    """
    raw, stepped, notes = _long_enough(series, question)
    first = _first(question)
    actual = [each.values[first:] for each in stepped]
    capacity = question.capacity or max(float(each.values.mean()) for each in stepped) / 10
    if capacity <= 0:
        raise HeadwayError("every series is 0 throughout; expected some demand")
    demand = [_demand(*pair, first, capacity, question) for pair in zip(raw, stepped, strict=True)]
    rows: list[MethodResult] = []
    todo = len(question.methods) * len(stepped)
    for method in question.methods:
        forecasts, began = [], perf_counter()
        for each in stepped:
            forecasts.append(_rolled(each, method, first, question))
            if progress is not None:
                progress((len(rows) * len(stepped) + len(forecasts)) / todo)
        num = sum(each.shape[1] for each in forecasts)
        rows.append(_row(method, stepped, forecasts, actual, demand, question, (perf_counter() - began) / num))
    truth = [np.tile(values, (len(question.quantiles), 1)) for values in actual]
    rows.append(_row(CLAIRVOYANT, stepped, truth, actual, demand, question, 0.0))
    names = tuple(each.name for each in stepped)
    return Evaluation(question, names, sum(map(len, actual)), capacity, tuple(rows), notes)


def _first(question: EvaluationSettings) -> int:
    """The first step that is evaluated."""
    return (question.season * 2 if question.warmup is None else question.warmup) + question.horizon - 1


def _long_enough(
    series: Sequence[DemandSeries], question: EvaluationSettings
) -> tuple[list[DemandSeries], list[DemandSeries], tuple[str, ...]]:
    """The series as given and aggregated to steps, without those that are too short, and a note for each omitted
    one."""
    least = _first(question) + 2
    raw: list[DemandSeries] = []
    stepped: list[DemandSeries] = []
    notes = []
    for each in series:
        resampled = each.resampled(question.step_s, question.of)
        if len(resampled) >= least:
            raw.append(each)
            stepped.append(resampled)
        else:
            notes.append(
                f"{each.name}: {len(resampled)} steps of {question.step_s:g} s; expected {least} or more: "
                f"{least - question.horizon - 1} to begin with, {question.horizon} ahead, and two to judge by"
            )
    if not stepped:
        raise HeadwayError("; ".join(notes) or "no series to forecast")
    return raw, stepped, tuple(f"left out: {note}" for note in notes)


def _demand(
    raw: DemandSeries, stepped: DemandSeries, first: int, capacity: float, question: EvaluationSettings
) -> ObservedDemand:
    """The demand in the evaluated steps, one row for each step."""
    num = round(stepped.step_s / raw.step_s)
    fine = raw.values[first * num : len(stepped) * num].reshape(-1, num)
    return ObservedDemand(fine, stepped.step_s, capacity, question.gpus_per_instance)


def _rolled(each: DemandSeries, method: str, first: int, question: EvaluationSettings) -> Floats:
    """Quantiles (rows) of each step from `first` on. Each step is forecast `horizon` steps ahead."""
    forecaster = make(method, question.season, each.values)
    ends = range(first - question.horizon + 1, len(each) - question.horizon + 1)
    forecasts = [forecaster.forecast(each.values[:end], question.horizon, question.quantiles)[:, -1] for end in ends]
    return np.array(forecasts).T


def _row(
    method: str,
    series: Sequence[DemandSeries],
    forecasts: Sequence[Floats],
    actual: Sequence[Floats],
    demand: Sequence[ObservedDemand],
    question: EvaluationSettings,
    forecast_s: float,
) -> MethodResult:
    quantiles = question.quantiles
    pairs = zip(series, forecasts, actual, strict=True)
    by_series = {each.name: _errors(forecast, observed, quantiles) for each, forecast, observed in pairs}
    pooled = _errors(np.concatenate(forecasts, axis=1), np.concatenate(actual), quantiles)
    is_clairvoyant = method == CLAIRVOYANT
    scaled = matched([_expected(each, quantiles, is_clairvoyant) for each in forecasts], demand, question.exceeded)
    return MethodResult(method, is_clairvoyant or method.endswith(LEAK), pooled, by_series, scaled, forecast_s)


def _expected(forecasts: Floats, quantiles: Sequence[float], is_clairvoyant: bool) -> Expected:
    """The median, and the spread: the distance from the median to the largest quantile. The method that knows the
    demand has no spread and uses a share of the median."""
    median = forecasts[quantiles.index(0.5)]
    return Expected(median, median if is_clairvoyant else forecasts[quantiles.index(max(quantiles))] - median)


def _errors(forecasts: Floats, actual: Floats, quantiles: Sequence[float]) -> Errors:
    median = forecasts[quantiles.index(0.5)]
    off, some = np.abs(median - actual), actual > 0
    both, total = median + actual, float(actual.sum())
    over = [forecasts[i] - actual for i in range(len(quantiles))]
    pinball = [float(np.maximum(q * -o, (1 - q) * o).sum()) for q, o in zip(quantiles, over, strict=True)]
    return Errors(
        mape=float((off[some] / actual[some]).mean()) if some.any() else None,
        smape=float((2 * off / np.where(both > 0, both, 1.0)).mean()),
        wape=float(off.sum()) / total if total else None,
        under_share=float((actual > median).mean()),
        pinball={f"{q:g}": loss / total if total else None for q, loss in zip(quantiles, pinball, strict=True)},
        coverage={f"{q:g}": float((o >= 0).mean()) for q, o in zip(quantiles, over, strict=True)},
    )
