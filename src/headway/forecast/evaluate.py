"""Forecasters compared on demand that came: errors by rolling origin, and the GPUs each needs for one SLO."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import numpy as np
from msgspec import Struct

from headway.core.errors import HeadwayError
from headway.core.forecast import Floats
from headway.forecast.methods import LEAK, make
from headway.forecast.scaling import Demand, Expected, Scaled, matched
from headway.workload.series import Aggregate, DemandSeries

QUANTILES = (0.1, 0.5, 0.9, 0.95)
CLAIRVOYANT = "clairvoyant"


class Question(Struct, frozen=True, forbid_unknown_fields=True):
    """How to compare."""

    methods: tuple[str, ...] = ("last-value", "seasonal-naive", "ets", "arima", "blend", "arima-leak")
    step_s: float = 3600.0
    """Of the series that is forecast."""
    of: Aggregate = "max"
    """What a step of it is, of the steps of the series given: their maximum, as SageServe scales by, or their mean."""
    horizon: int = 1
    """Steps ahead: how early GPUs must be asked for."""
    season: int = 24
    """Steps after which the series looks alike."""
    warmup: int | None = None
    """Steps known before the first forecast; None: two seasons."""
    quantiles: tuple[float, ...] = QUANTILES
    capacity: float | None = None
    """Demand that one instance serves, in units of the series; None: a tenth of the largest mean of a series."""
    gpus_per_instance: int = 8
    exceeded: float = 0.01
    """Share of the steps of the series given in which demand may be above capacity: the SLO matched."""

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
    """Of the steps forecast `horizon` ahead. Shares are of 1."""

    mape: float | None
    """Mean of |median - actual| / actual, where the actual is not 0; None: it always is."""
    smape: float
    """Mean of 2 |median - actual| / (median + actual)."""
    wape: float | None
    """Sum of |median - actual| over the sum of actuals."""
    under_share: float
    """How often more came than the median said."""
    pinball: dict[str, float | None]
    """By quantile: mean pinball loss over the mean of the actuals."""
    coverage: dict[str, float]
    """By quantile: how often no more came than it said."""


class Row(Struct, frozen=True, forbid_unknown_fields=True):
    """One method."""

    method: str
    cheats: bool
    """It has seen what it forecasts."""
    errors: Errors
    """Of all series together."""
    by_series: dict[str, Errors]
    scaled: Scaled | None
    """What scaling by it takes at the matched SLO; None: out of reach."""
    forecast_s: float
    """Mean wall seconds of one forecast."""


class Evaluation(Struct, frozen=True, forbid_unknown_fields=True):
    """The answer."""

    question: Question
    series: tuple[str, ...]
    num_forecasts: int
    """Of each method."""
    capacity: float
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    """Series left out."""


def evaluate(
    series: Sequence[DemandSeries], question: Question, progress: Callable[[float], None] | None = None
) -> Evaluation:
    """Forecasts every step after the warm-up from all that came up to `horizon` steps before it, and scores that.

    Series that are too short for that are left out; HeadwayError where all are. The last row is what a clairvoyant
    needs, who knows what comes.
    """
    raw, stepped, notes = _long_enough(series, question)
    first = _first(question)
    actual = [each.values[first:] for each in stepped]
    capacity = question.capacity or max(float(each.values.mean()) for each in stepped) / 10
    if capacity <= 0:
        raise HeadwayError("every series is 0 throughout; expected some demand")
    demand = [_demand(*pair, first, capacity, question) for pair in zip(raw, stepped, strict=True)]
    rows: list[Row] = []
    todo = len(question.methods) * len(stepped)
    for method in question.methods:
        said, began = [], perf_counter()
        for each in stepped:
            said.append(_rolled(each, method, first, question))
            if progress is not None:
                progress((len(rows) * len(stepped) + len(said)) / todo)
        num = sum(each.shape[1] for each in said)
        rows.append(_row(method, stepped, said, actual, demand, question, (perf_counter() - began) / num))
    known = [np.tile(values, (len(question.quantiles), 1)) for values in actual]
    rows.append(_row(CLAIRVOYANT, stepped, known, actual, demand, question, 0.0))
    names = tuple(each.name for each in stepped)
    return Evaluation(question, names, sum(map(len, actual)), capacity, tuple(rows), notes)


def _first(question: Question) -> int:
    """The first step that is judged."""
    return (question.season * 2 if question.warmup is None else question.warmup) + question.horizon - 1


def _long_enough(
    series: Sequence[DemandSeries], question: Question
) -> tuple[list[DemandSeries], list[DemandSeries], tuple[str, ...]]:
    """As they are and in steps, without those too short, and what is said of these."""
    least = _first(question) + 2
    raw: list[DemandSeries] = []
    stepped: list[DemandSeries] = []
    notes = []
    for each in series:
        made = each.resampled(question.step_s, question.of)
        if len(made) >= least:
            raw.append(each)
            stepped.append(made)
        else:
            notes.append(
                f"{each.name}: {len(made)} steps of {question.step_s:g} s; expected {least} or more: "
                f"{least - question.horizon - 1} to begin with, {question.horizon} ahead, and two to judge by"
            )
    if not stepped:
        raise HeadwayError("; ".join(notes) or "no series to forecast")
    return raw, stepped, tuple(f"left out: {note}" for note in notes)


def _demand(raw: DemandSeries, stepped: DemandSeries, first: int, capacity: float, question: Question) -> Demand:
    """What came in the steps that are judged, a row each."""
    num = round(stepped.step_s / raw.step_s)
    fine = raw.values[first * num : len(stepped) * num].reshape(-1, num)
    return Demand(fine, stepped.step_s, capacity, question.gpus_per_instance)


def _rolled(each: DemandSeries, method: str, first: int, question: Question) -> Floats:
    """Quantiles (rows) of each step from `first` on, made `horizon` steps before."""
    forecaster = make(method, question.season, each.values)
    ends = range(first - question.horizon + 1, len(each) - question.horizon + 1)
    said = [forecaster.forecast(each.values[:end], question.horizon, question.quantiles)[:, -1] for end in ends]
    return np.array(said).T


def _row(
    method: str,
    series: Sequence[DemandSeries],
    said: Sequence[Floats],
    actual: Sequence[Floats],
    demand: Sequence[Demand],
    question: Question,
    forecast_s: float,
) -> Row:
    quantiles = question.quantiles
    pairs = zip(series, said, actual, strict=True)
    by_series = {each.name: _errors(told, came, quantiles) for each, told, came in pairs}
    pooled = _errors(np.concatenate(said, axis=1), np.concatenate(actual), quantiles)
    knows = method == CLAIRVOYANT
    scaled = matched([_expected(each, quantiles, knows) for each in said], demand, question.exceeded)
    return Row(method, knows or method.endswith(LEAK), pooled, by_series, scaled, forecast_s)


def _expected(said: Floats, quantiles: Sequence[float], knows: bool) -> Expected:
    """The spread is up to the largest quantile; who knows what comes has none, and takes a share of it instead."""
    median = said[quantiles.index(0.5)]
    return Expected(median, median if knows else said[quantiles.index(max(quantiles))] - median)


def _errors(said: Floats, actual: Floats, quantiles: Sequence[float]) -> Errors:
    median = said[quantiles.index(0.5)]
    off, some = np.abs(median - actual), actual > 0
    both, total = median + actual, float(actual.sum())
    over = [said[i] - actual for i in range(len(quantiles))]
    pinball = [float(np.maximum(q * -o, (1 - q) * o).sum()) for q, o in zip(quantiles, over, strict=True)]
    return Errors(
        mape=float((off[some] / actual[some]).mean()) if some.any() else None,
        smape=float((2 * off / np.where(both > 0, both, 1.0)).mean()),
        wape=float(off.sum()) / total if total else None,
        under_share=float((actual > median).mean()),
        pinball={f"{q:g}": loss / total if total else None for q, loss in zip(quantiles, pinball, strict=True)},
        coverage={f"{q:g}": float((o >= 0).mean()) for q, o in zip(quantiles, over, strict=True)},
    )
