"""`headway forecast`: the demand of the coming weeks, and forecasters compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from headway.cli.output import (
    ABOVE_0,
    PATH,
    POSITIVE,
    SECONDS_ABOVE_0,
    SubCommands,
    as_json_option,
    counting,
    list_option,
    no_progress_option,
    print_json,
    print_said,
    print_table,
)
from headway.core.errors import HeadwayError
from headway.forecast.demand import METHODS, SPREAD, forecast_days
from headway.forecast.demand_file import save
from headway.forecast.evaluate import Evaluation, EvaluationSettings, MethodResult
from headway.forecast.evaluate import evaluate as evaluated
from headway.report.demand import said
from headway.workload.series import DemandSeries, read_series

DEFAULT = EvaluationSettings()


@click.group(cls=SubCommands)
def command() -> None:
    """Forecast the demand of the coming weeks; compare forecasts, and the cost of scaling by them."""


@command.command()
@click.argument("days", type=PATH, nargs=-1, required=True)
@click.option(
    "--growth", type=ABOVE_0, default=1.0, show_default=True, help="Factor of demand from one month to the next: 1.4."
)
@click.option("--months", type=ABOVE_0, default=1.0, show_default=True, help="Months, of 730 hours, to forecast.")
@click.option("--time-zone", default="UTC", show_default=True, help="Of the days' profile, as in Europe/Berlin.")
@click.option(
    "--begins", help="When the first DAY began, as 2026-03-02T00:00. Default: as its records say, else a Monday."
)
@click.option("--first", help="The first hour to forecast. Default: the midnight after the records.")
@list_option(
    "--methods",
    default=",".join(METHODS),
    show_default=True,
    help="Forecasters to choose from by held-out days, separated by commas; as in forecast evaluate.",
)
@click.option(
    "--assumed-spread",
    type=ABOVE_0,
    default=SPREAD,
    show_default=True,
    help="Where one day is known: standard deviation of demand from day to day, as a share.",
)
@click.option("-o", "--out", type=PATH, help="Write the forecast, a Parquet file that plans read with --demand.")
@as_json_option("Print JSON instead of the table.")
def demand(
    days: tuple[Path, ...],
    growth: float,
    months: float,
    time_zone: str,
    begins: str | None,
    first: str | None,
    methods: str,
    assumed_spread: float,
    out: Path | None,
    as_json: bool,
) -> None:
    """Forecast the requests of the coming weeks by hour, with quantiles, from recorded days.

    Each DAY is a folder of records of headway serve or simulate, or any file that --trace accepts. With two or more
    days, held-out days select the forecaster and its quantiles; with one day, the quantiles are assumed, and a note
    says so.
    """
    found = forecast_days(
        days,
        growth_per_month=growth,
        months=months,
        time_zone=time_zone,
        begins=begins,
        first=first,
        methods=tuple(_items(methods)),
        assumed_spread=assumed_spread,
    )
    if out is not None:
        save(found, out)
        click.echo(f"wrote {out}", err=True)
    if as_json:
        print_json(found)
        return
    print_said(said(found))


@command.command()
@click.argument("series", type=PATH)
@list_option(
    "--methods",
    default=",".join(DEFAULT.methods),
    show_default=True,
    help="Separated by commas: last-value, seasonal-naive, ets, arima (order by AIC), blend (of these), seasonal-mean, "
    "arima:2-1-1 or arima:1-0-1:0-1-1 (given orders). With the suffix -leak: fitted on the future too.",
)
@list_option("--only", help="Names of series, separated by commas. Default: all.")
@list_option("--columns", help="Columns of values, separated by commas. Default: all.")
@click.option("--step-s", type=SECONDS_ABOVE_0, default=DEFAULT.step_s, show_default=True, help="Step of the forecast.")
@click.option(
    "--of",
    type=click.Choice(["max", "mean"]),
    default=DEFAULT.of,
    show_default=True,
    help="How the file's steps within a step are combined.",
)
@click.option(
    "--horizon", type=POSITIVE, default=1, show_default=True, help="Steps ahead: how early GPUs are requested."
)
@click.option(
    "--season",
    type=POSITIVE,
    default=DEFAULT.season,
    show_default=True,
    help="Period of the series in steps.",
)
@click.option("--warmup", type=POSITIVE, help="Steps before the first forecast. Default: two seasons.")
@list_option(
    "--quantiles",
    default=",".join(f"{q:g}" for q in DEFAULT.quantiles),
    show_default=True,
    help="Quantiles, separated by commas, 0.5 among them.",
)
@click.option(
    "--capacity",
    type=ABOVE_0,
    help="Demand that one instance serves, in the file's unit. Default: a tenth of the largest mean.",
)
@click.option(
    "--gpus", type=POSITIVE, default=DEFAULT.gpus_per_instance, show_default=True, help="GPUs of an instance."
)
@click.option(
    "--exceeded",
    type=click.FloatRange(0, 1, max_open=True),
    default=DEFAULT.exceeded,
    show_default=True,
    help="The SLO at which GPU-hours are compared: share of time in which demand may exceed capacity.",
)
@as_json_option("Print JSON instead of tables.")
@no_progress_option
def evaluate(series: Path, only: str | None, columns: str | None, **flags: Any) -> None:
    """Compare methods on past demand: forecast each step from earlier steps, and scale by the forecasts.

    SERIES is a CSV file, gzip or not, with a column of times (time_s, time or timestamp) and columns of values. Text
    columns are keys: each combination of keys is a series. Steps must be even and complete.

    GPU-hours are for instances that serve the median plus head-room, where the head-room makes every method exceed
    capacity equally often. Its unit is the distance from the median to the largest quantile.
    """
    as_json, no_progress = flags.pop("as_json"), flags.pop("no_progress")
    question = _question(flags)
    chosen = _chosen(read_series(series, _items(columns)), _items(only), series)
    with counting("forecasting series", not no_progress) as report:
        todo = len(chosen) * len(question.methods)
        evaluation = evaluated(
            chosen, question, None if report is None else lambda share: report(round(share * todo), todo)
        )
    for note in evaluation.notes:
        click.echo(f"note: {note}", err=True)
    if as_json:
        print_json(evaluation)
    else:
        _print(evaluation)


def _question(flags: dict[str, Any]) -> EvaluationSettings:
    try:
        flags["quantiles"] = tuple(sorted({float(each) for each in _items(flags["quantiles"])}))
    except ValueError:
        raise HeadwayError(f"--quantiles: {flags['quantiles']!r}; expected numbers, with commas between") from None
    flags["methods"] = tuple(_items(flags["methods"]))
    flags["gpus_per_instance"] = flags.pop("gpus")
    try:
        return EvaluationSettings(**flags)
    except ValueError as error:
        raise HeadwayError(str(error)) from None


def _chosen(series: Sequence[DemandSeries], only: Sequence[str], path: Path) -> list[DemandSeries]:
    by_name = {each.name: each for each in series}
    for name in only:
        if name not in by_name:
            raise HeadwayError(f"--only: {path} has no series {name!r}; it has: {', '.join(by_name)}")
    return [by_name[name] for name in only] if only else list(series)


def _items(text: str | None) -> list[str]:
    return [each.strip() for each in (text or "").split(",") if each.strip()]


def _print(evaluation: Evaluation) -> None:
    question = evaluation.question
    heading = f"{len(evaluation.series)} series, {evaluation.num_forecasts:,} forecasts each: the {question.of} of "
    heading += f"{question.step_s:g} s, {question.horizon} ahead\n"
    heading += (
        f"capacity {evaluation.capacity:,.4g} an instance, exceeded {question.exceeded:.2%} of the time at most; "
    )
    click.echo(heading + "* has seen what it forecasts\n")
    quantiles = [f"{q:g}" for q in question.quantiles]
    headers = ["method", "MAPE", "sMAPE", "WAPE", "under", *(f"pinball {q}" for q in quantiles)]
    headers += [*(f"<= {q}" for q in quantiles), "ms"]
    print_table(headers, [_errors(row, quantiles) for row in evaluation.rows])
    click.echo()
    headers = ["scaled by", "head-room", "GPU-hours", "exceeded", "idle"]
    print_table(headers, [_scaled(row) for row in evaluation.rows])
    click.echo()
    rows = [(name, *(row.by_series[name].wape for row in evaluation.rows)) for name in evaluation.series]
    print_table(["WAPE by series", *(_name(row) for row in evaluation.rows)], rows)


def _name(row: MethodResult) -> str:
    return row.method + " *" * row.cheats


def _errors(row: MethodResult, quantiles: Sequence[str]) -> tuple[object, ...]:
    errors = row.errors
    return (
        _name(row),
        errors.mape,
        errors.smape,
        errors.wape,
        errors.under_share,
        *(errors.pinball[q] for q in quantiles),
        *(errors.coverage[q] for q in quantiles),
        round(row.forecast_s * 1e3, 1),
    )


def _scaled(row: MethodResult) -> tuple[object, ...]:
    result = row.scaled
    if result is None:
        return (_name(row), None, None, "out of reach", None)
    return (
        _name(row),
        round(result.headroom, 2),
        result.gpu_hours,
        f"{result.exceeded_share:.2%}",
        f"{result.idle_share:.0%}",
    )
