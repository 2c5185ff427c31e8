"""Forecasts the demand of each hour of the coming weeks, with quantiles, from recorded days and a growth factor.

A registered forecaster gives the profile of a day, or of a week if two weeks were recorded. Held-out days, each
forecast from earlier days, select the forecaster and measure its errors. The quantiles come from these errors as
factors, by split conformal prediction as in `catalog.errors`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from math import ceil, exp
from pathlib import Path
from statistics import NormalDist

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from headway.catalog.errors import quantile
from headway.core.errors import HeadwayError
from headway.core.policy import Floats
from headway.forecast.methods import LEAK, make
from headway.forecast.recorded_hours import DAY_HOURS, HOUR_S, Hours, RecordedHour, recorded_hours
from headway.limits.calendar import moment, zone

HOURS_A_MONTH = 730.0
WEEK_HOURS = 7 * DAY_HOURS
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.975, 0.99)
METHODS = ("seasonal-mean", "seasonal-naive")
SPREAD = 0.25
"""Standard deviation of the logarithm of demand over its forecast, assumed if only one day is known."""
LONGEST_LEAD_DAYS = 7
MOST_HELD_OUT = 28
"""Maximum number of held-out days; the last days are used."""


class DemandOptions(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    growth_per_month: float = 1.0
    """Factor of demand from one month to the next, spread over its hours."""
    months: float = 1.0
    """Number of forecast months, of 730 hours each."""
    methods: tuple[str, ...] = METHODS
    """Forecasters to choose from. The one with the smallest error on the held-out days is used."""
    quantiles: tuple[float, ...] = QUANTILES
    begins: str | None = None
    """The first forecast hour. None: the midnight after the records' end."""
    assumed_spread: float = SPREAD
    """Like `SPREAD`; used only without held-out days."""

    def __post_init__(self) -> None:
        if not 0 < self.growth_per_month < float("inf"):
            raise ValueError(f"growth: {self.growth_per_month}; expected a factor a month above 0, such as 1.4")
        if not 0 < self.months <= 24:
            raise ValueError(f"months: {self.months}; expected above 0, and 24 at most")
        if not self.methods or any(each.endswith(LEAK) for each in self.methods):
            raise ValueError(f"methods: {', '.join(self.methods)}; expected forecasters, none of which leaks")
        inside = all(0 < q < 1 for q in self.quantiles)
        if 0.5 not in self.quantiles or not inside or list(self.quantiles) != sorted(set(self.quantiles)):
            raise ValueError(f"quantiles: {self.quantiles}; expected numbers between 0 and 1 that rise, 0.5 among them")
        if not 0 < self.assumed_spread < 3:
            raise ValueError(f"assumed_spread: {self.assumed_spread}; expected above 0, as 0.25 for about a quarter")


class DemandBacktest(Struct, frozen=True, forbid_unknown_fields=True):
    """Errors of the selected forecaster on unseen days."""

    num_held_out_days: int
    num_held_out_hours: int
    longest_lead_days: int
    wape: float
    """Sum of |forecast - actual| over the sum of actuals."""
    bias: float
    """Mean logarithm of actual over forecast."""
    coverage: dict[str, float]
    """Maps each quantile to the share of held-out hours with a demand of at most the quantile. A day's quantiles come
    from the other days."""
    wape_by_method: dict[str, float]


class ModelDemand(Struct, frozen=True, forbid_unknown_fields=True):
    """The demand for one model; an empty name means all requests."""

    model: str
    prompt_tokens_mean: float
    output_tokens_mean: float
    requests_per_s: tuple[tuple[float, ...], ...]
    """One row for each quantile, one column for each hour."""


class DemandHistory(Struct, frozen=True, forbid_unknown_fields=True):
    days: tuple[str, ...]
    num_requests: int
    num_days: int
    """Calendar days with recorded hours."""
    num_hours: int
    """Recorded hours."""
    begins: str
    ends: str


class DemandForecast(Struct, frozen=True, forbid_unknown_fields=True):
    begins: str
    """The first hour, in ISO 8601 with its offset."""
    time_zone: str
    step_s: float
    growth_per_month: float
    method: str
    season_hours: int
    """Season of the profile in hours: 24 or 168."""
    quantiles: tuple[float, ...]
    total: ModelDemand
    by_model: tuple[ModelDemand, ...]
    """Demand of each model, if requests name several."""
    history: DemandHistory
    backtest: DemandBacktest | None
    """The errors on held-out days; None if only one day was recorded, so that the quantiles are assumed."""
    busiest: RecordedHour
    assumptions: tuple[str, ...]

    @property
    def num_steps(self) -> int:
        return len(self.total.requests_per_s[0])

    def hour(self, step: int) -> datetime:
        """The local time at which a step begins, in the demand's time zone."""
        return moment(self.begins, zone(self.time_zone)) + timedelta(seconds=step * self.step_s)

    def rates(self, quantile: float) -> Floats:
        """Requests per second of all models by hour, at any quantile.

        Between two forecast quantiles, the logarithm is linear in the normal score. Beyond the forecast quantiles, the
        line through the last two is extended.
        """
        normal, known = NormalDist(), np.array(self.quantiles)
        scores = np.array([normal.inv_cdf(q) for q in known])
        rows = np.log(np.maximum(np.array(self.total.requests_per_s), 1e-12))
        at = normal.inv_cdf(quantile)
        if len(scores) == 1:
            return np.asarray(np.exp(rows[0]), "f8")
        i = int(np.clip(np.searchsorted(scores, at), 1, len(scores) - 1))
        share = (at - scores[i - 1]) / (scores[i] - scores[i - 1])
        return np.asarray(np.exp(rows[i - 1] + share * (rows[i] - rows[i - 1])), "f8")

    def of(self, model: str) -> DemandForecast:
        """The forecast for one model; the whole forecast if requests name no such model."""
        own = next((each for each in self.by_model if each.model == model), None)
        return self if own is None else replace(self, total=own, by_model=())

    @property
    def weeks(self) -> list[range]:
        """The steps of each week. The last week may be shorter."""
        steps = round(WEEK_HOURS * HOUR_S / self.step_s)
        return [range(at, min(at + steps, self.num_steps)) for at in range(0, self.num_steps, steps)]


def forecast_days(
    days: Sequence[str | Path],
    *,
    growth_per_month: float = 1.0,
    months: float = 1.0,
    time_zone: str = "UTC",
    begins: str | None = None,
    first: str | None = None,
    methods: Sequence[str] = METHODS,
    assumed_spread: float = SPREAD,
) -> DemandForecast:
    """Forecast demand from recorded days: folders of records, or files of requests in any known format.

    `begins`: when the first day began; None: as in its records. `first`: the first hour to forecast. The other
    arguments are as in `DemandOptions`. Raises HeadwayError for an invalid argument, or days that cannot be read.
    """
    try:
        options = DemandOptions(
            growth_per_month=growth_per_month,
            months=months,
            methods=tuple(methods),
            begins=first,
            assumed_spread=assumed_spread,
        )
    except ValueError as error:
        raise HeadwayError(str(error)) from None
    hours = recorded_hours([Path(day) for day in days], time_zone, begins)
    return forecast_demand(hours, [str(day) for day in days], options, time_zone)


def forecast_demand(hours: Hours, paths: Sequence[str], options: DemandOptions, time_zone: str) -> DemandForecast:
    """The demand of the coming months. Raises HeadwayError if the forecast would begin before the records end."""
    history = _History(hours, options)
    ends = hours.ends
    midnight = ends.replace(hour=0, minute=0, second=0, microsecond=0)
    begins = midnight + timedelta(days=0 if ends == midnight else 1)
    if options.begins is not None:
        begins = moment(options.begins, ends.tzinfo)  # type: ignore[arg-type]
        if begins < ends:
            raise HeadwayError(f"the forecast begins at {begins.isoformat()}; the records end {ends.isoformat()}")
    num = ceil(options.months * HOURS_A_MONTH)
    chosen, backtest, factors = history.judged(history.series(hours.per_hour))
    lead = round((begins - history.begins).total_seconds() / HOUR_S)
    growth = options.growth_per_month ** ((np.arange(num) + (begins - ends).total_seconds() / HOUR_S) / HOURS_A_MONTH)

    def demand(name: str, per_hour: Floats, prompt: float, output: float) -> ModelDemand:
        profile = history.profile(history.series(per_hour), chosen, lead, num) * growth / HOUR_S
        rows = tuple(tuple(float(f"{rate:.5g}") for rate in profile * factor) for factor in factors)
        return ModelDemand(name, prompt, output, rows)

    names = list(hours.by_model) if len(hours.by_model) > 1 else []
    num_of = {name: float(np.nansum(each)) for name, each in hours.by_model.items()}
    total = sum(num_of.values())
    prompt, output = (
        sum(means[name] * num_of[name] for name in num_of if num_of[name]) / total
        for means in (hours.prompt_tokens_mean, hours.output_tokens_mean)
    )
    return DemandForecast(
        begins=begins.isoformat(), time_zone=time_zone, step_s=HOUR_S, growth_per_month=options.growth_per_month,
        method=chosen, season_hours=history.season, quantiles=options.quantiles,
        total=demand("", hours.per_hour, prompt, output),
        by_model=tuple(
            demand(name, hours.by_model[name], hours.prompt_tokens_mean[name], hours.output_tokens_mean[name])
            for name in names
        ),
        history=DemandHistory(
            tuple(paths), hours.num_requests, int(history.is_known.any(axis=1).sum()), int(history.is_known.sum()),
            hours.begins.isoformat(), ends.isoformat(),
        ),
        backtest=backtest, busiest=hours.busiest, assumptions=(*hours.notes, *history.notes(backtest, begins)),
    )  # fmt: skip


class _History:
    """The recorded days as a regular series, without unknown days."""

    def __init__(self, hours: Hours, options: DemandOptions) -> None:
        self.options = options
        known = np.isfinite(hours.per_hour).reshape(-1, DAY_HOURS)
        self.days = np.flatnonzero(known.any(axis=1))
        """Positions of the known days."""
        self.is_known = known[self.days]
        self.has_gaps = len(self.days) < len(known)
        self.season = WEEK_HOURS if len(self.days) >= 15 and not self.has_gaps else DAY_HOURS
        ends_h = (hours.ends - hours.begins).total_seconds() / HOUR_S
        at = (self.days[:, None] * DAY_HOURS + np.arange(DAY_HOURS) + 0.5).clip(max=ends_h)
        self.growth_since = options.growth_per_month ** ((ends_h - at) / HOURS_A_MONTH)
        """Growth from each recorded hour to the end of the records."""
        self.begins = hours.begins + timedelta(days=int(self.days[0]))

    def series(self, per_hour: Floats) -> Floats:
        """Hours in columns and days in rows, scaled to the level of the last recorded hour. Unknown hours get the mean
        of that hour of the day, or of all hours."""
        rows = per_hour.reshape(-1, DAY_HOURS)[self.days] * self.growth_since
        known = np.isfinite(rows)
        num = known.sum(axis=0)
        means = np.where(known, rows, 0.0).sum(axis=0) / np.maximum(num, 1)
        means = np.where(num > 0, means, float(rows[known].mean()))
        return np.where(known, rows, means)

    def profile(self, days: Floats, method: str, first: int, num: int) -> Floats:
        """The profile of the days for `num` hours from hour `first`, counted from the first recorded hour."""
        season = self.season if days.size >= self.season else DAY_HOURS
        one = make(method, season).forecast(days.ravel(), season, (0.5,))[0]
        return np.asarray(one[(first + np.arange(num) - days.size) % season], "f8")

    def judged(self, days: Floats) -> tuple[str, DemandBacktest | None, list[float]]:
        """The method with the smallest errors on held-out days, its errors, and the factor of each quantile."""
        first = self.season // DAY_HOURS
        origins = list(range(first, len(days)))[-MOST_HELD_OUT:]
        if not origins:
            normal = NormalDist()
            factors = [exp(normal.inv_cdf(q) * self.options.assumed_spread) for q in self.options.quantiles]
            return self.options.methods[0], None, factors
        found = {method: self._errors(days, method, origins) for method in self.options.methods}
        wapes = {method: _wape(each) for method, each in found.items()}
        chosen = min(self.options.methods, key=lambda method: wapes[method])
        actual, said, of_day = found[chosen]
        logs = np.log((actual + 0.5) / (said + 0.5))
        quantiles = self.options.quantiles
        factors = _factors(logs, quantiles)
        inside = {f"{q:g}": [] for q in quantiles}  # type: dict[str, list[bool]]
        for day in np.unique(of_day) if len(origins) > 1 else ():
            others = _factors(logs[of_day != day], quantiles)
            for q, factor in zip(quantiles, others, strict=True):
                inside[f"{q:g}"] += list(np.exp(logs[of_day == day]) <= factor)
        backtest = DemandBacktest(
            num_held_out_days=len(origins),
            num_held_out_hours=len(np.unique(of_day)) * DAY_HOURS,
            longest_lead_days=min(LONGEST_LEAD_DAYS, len(days) - origins[0]),
            wape=wapes[chosen],
            bias=float(logs.mean()),
            coverage={q: float(np.mean(each)) for q, each in inside.items() if each},
            wape_by_method=wapes,
        )
        return chosen, backtest, factors

    def _errors(self, days: Floats, method: str, origins: Sequence[int]) -> tuple[Floats, Floats, Floats]:
        """Actual and forecast demand of known hours, and their days, over all origins and lead times."""
        actual, said, of_day = [], [], []
        for origin in origins:
            until = min(origin + LONGEST_LEAD_DAYS, len(days))
            wanted = self.profile(days[:origin], method, origin * DAY_HOURS, (until - origin) * DAY_HOURS)
            known = self.is_known[origin:until].ravel()
            actual.append(days[origin:until].ravel()[known])
            said.append(wanted[known])
            of_day.append(np.repeat(np.arange(origin, until), DAY_HOURS)[known].astype("f8"))
        return np.concatenate(actual), np.concatenate(said), np.concatenate(of_day)

    def notes(self, backtest: DemandBacktest | None, begins: datetime) -> list[str]:
        said = []
        num, unknown = len(self.days), int((~self.is_known.any(axis=0)).sum())
        growth = self.options.growth_per_month
        said.append(
            f"demand grows by a factor of {growth:g} a month, evenly, from the end of the records; the interval does"
            " not hold the error of this factor"
        )
        if self.season == WEEK_HOURS:
            said.append(f"the profile is the week's, from {num} days")
        elif num == 1:
            said.append("one day was recorded: every day is taken to be like it, weekends too")
        else:
            why = "with days missing between them" if self.has_gaps else "and a week's profile needs 15"
            said.append(f"{num} days were recorded, {why}: weekdays and weekends are taken to be alike")
        if backtest is None:
            spread = self.options.assumed_spread
            said.append(
                f"how far days differ is unknown from one day: a spread of {spread:.0%} (standard deviation) is"
                " ASSUMED, not measured"
            )
        else:
            said.append(
                f"quantiles are of the errors on {backtest.num_held_out_days} held-out days, up to"
                f" {backtest.longest_lead_days} days ahead; further ahead they are taken to be no wider"
            )
        if unknown:
            said.append(f"{unknown} of 24 hours of the day were never recorded: they have the mean of the others")
        return said


def _wape(found: tuple[Floats, Floats, Floats]) -> float:
    actual, said, _ = found
    return float(np.abs(actual - said).sum() / max(float(actual.sum()), 1e-9))


def _factors(logs: Floats, quantiles: Sequence[float]) -> list[float]:
    """The factor on the forecast at each quantile. If there are too few errors, quantiles beyond the largest error use
    a normal tail."""
    normal = NormalDist(float(logs.mean()), float(logs.std()) or 1e-12)
    found = []
    for q in quantiles:
        sign = 1.0 if q >= 0.5 else -1.0
        outward = sign * logs
        edge = quantile(outward.tolist(), max(q, 1 - q))
        found.append(sign * (max(sign * normal.inv_cdf(q), float(outward.max())) if edge is None else edge))
    return [exp(each) for each in np.maximum.accumulate(found)]
