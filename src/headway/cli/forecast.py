"""`headway forecast`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from headway.cli.output import counting, print_json, print_table
from headway.core.errors import HeadwayError
from headway.forecast.evaluate import Evaluation, EvaluationSettings, MethodResult
from headway.forecast.evaluate import evaluate as evaluated
from headway.workload.series import DemandSeries, read_series

_above_0 = click.FloatRange(min=0, min_open=True)
_positive = click.IntRange(min=1)
DEFAULT = EvaluationSettings()


@click.group()
def command() -> None:
    """Compare forecasts of demand, and what scaling by them takes."""


@command.command()
@click.argument("series", type=click.Path(path_type=Path))
@click.option(
    "--methods",
    default=",".join(DEFAULT.methods),
    show_default=True,
    help="With commas between: last-value, seasonal-naive, ets, arima (order by AIC), blend (of these), arima:2-1-1 or "
    "arima:1-0-1:0-1-1 (orders given). With -leak at the end: fitted on the future too.",
)
@click.option("--only", help="Names of series, with commas between; else all of the file.")
@click.option("--columns", help="Columns of values, with commas between; else all.")
@click.option("--step-s", type=_above_0, default=DEFAULT.step_s, show_default=True, help="Steps to forecast in.")
@click.option(
    "--of",
    type=click.Choice(["max", "mean"]),
    default=DEFAULT.of,
    show_default=True,
    help="What a step is, of the file's steps within it.",
)
@click.option("--horizon", type=_positive, default=1, show_default=True, help="Steps ahead: how early to ask for GPUs.")
@click.option(
    "--season",
    type=_positive,
    default=DEFAULT.season,
    show_default=True,
    help="Steps after which the series looks alike.",
)
@click.option("--warmup", type=click.IntRange(min=1), help="Steps known before the first forecast; else two seasons.")
@click.option(
    "--quantiles",
    default=",".join(f"{q:g}" for q in DEFAULT.quantiles),
    show_default=True,
    help="With commas between, 0.5 among them.",
)
@click.option(
    "--capacity", type=_above_0, help="What an instance serves, in the file's units; else a tenth of the largest mean."
)
@click.option("--gpus", type=_positive, default=DEFAULT.gpus_per_instance, show_default=True, help="Of an instance.")
@click.option(
    "--exceeded",
    type=click.FloatRange(0, 1, max_open=True),
    default=DEFAULT.exceeded,
    show_default=True,
    help="Share of time in which demand may be above capacity: the SLO at which GPU-hours are compared.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON in place of tables.")
@click.option("--no-progress", is_flag=True, help="No progress bar.")
def evaluate(series: Path, only: str | None, columns: str | None, **flags: Any) -> None:
    """Compare methods on demand that came: each hour is forecast from what came before, and scaled for.

    SERIES is a CSV file, gzip or not, with a column of times (time_s, t_seconds or timestamp) and columns of
    values. Columns of text are keys: each combination of them is a series. Steps must be even and none missing.

    GPU-hours are those of instances for the median and so much head-room that each method exceeds capacity as
    often: head-room is counted in distances from the median to the largest quantile.
    """
    as_json, no_progress = flags.pop("as_json"), flags.pop("no_progress")
    question = _question(flags)
    chosen = _chosen(read_series(series, _listed(columns)), _listed(only), series)
    with counting("forecasting series", not no_progress) as tell:
        todo = len(chosen) * len(question.methods)
        found = evaluated(chosen, question, None if tell is None else lambda share: tell(round(share * todo), todo))
    for note in found.notes:
        click.echo(f"note: {note}", err=True)
    if as_json:
        print_json(found)
    else:
        _print(found)


def _question(flags: dict[str, Any]) -> EvaluationSettings:
    try:
        flags["quantiles"] = tuple(sorted({float(each) for each in _listed(flags["quantiles"])}))
    except ValueError:
        raise HeadwayError(f"--quantiles: {flags['quantiles']!r}; expected numbers, with commas between") from None
    flags["methods"] = tuple(_listed(flags["methods"]))
    flags["gpus_per_instance"] = flags.pop("gpus")
    try:
        return EvaluationSettings(**flags)
    except ValueError as error:
        raise HeadwayError(str(error)) from None


def _chosen(found: Sequence[DemandSeries], only: Sequence[str], path: Path) -> list[DemandSeries]:
    known = {each.name: each for each in found}
    for name in only:
        if name not in known:
            raise HeadwayError(f"--only: {path} has no series {name!r}; it has: {', '.join(known)}")
    return [known[name] for name in only] if only else list(found)


def _listed(text: str | None) -> list[str]:
    return [each.strip() for each in (text or "").split(",") if each.strip()]


def _print(found: Evaluation) -> None:
    question = found.question
    told = f"{len(found.series)} series, {found.num_forecasts:,} forecasts each: the {question.of} of "
    told += f"{question.step_s:g} s, {question.horizon} ahead\n"
    told += f"capacity {found.capacity:,.4g} an instance, exceeded {question.exceeded:.2%} of the time at most; "
    click.echo(told + "* has seen what it forecasts\n")
    quantiles = [f"{q:g}" for q in question.quantiles]
    headers = ["method", "MAPE", "sMAPE", "WAPE", "under", *(f"pinball {q}" for q in quantiles)]
    headers += [*(f"<= {q}" for q in quantiles), "ms"]
    print_table(headers, [_errors(row, quantiles) for row in found.rows])
    click.echo()
    headers = ["scaled by", "head-room", "GPU-hours", "exceeded", "idle"]
    print_table(headers, [_scaled(row) for row in found.rows])
    click.echo()
    print_table(["WAPE by series", *(_name(row) for row in found.rows)],
                [(name, *(row.by_series[name].wape for row in found.rows)) for name in found.series])  # fmt: skip


def _name(row: MethodResult) -> str:
    return row.method + " *" * row.cheats


def _errors(row: MethodResult, quantiles: Sequence[str]) -> tuple[object, ...]:
    errors = row.errors
    return (_name(row), errors.mape, errors.smape, errors.wape, errors.under_share,
            *(errors.pinball[q] for q in quantiles), *(errors.coverage[q] for q in quantiles),
            round(row.forecast_s * 1e3, 1))  # fmt: skip


def _scaled(row: MethodResult) -> tuple[object, ...]:
    got = row.scaled
    if got is None:
        return (_name(row), None, None, "out of reach", None)
    return (_name(row), round(got.headroom, 2), got.gpu_hours, f"{got.exceeded_share:.2%}", f"{got.idle_share:.0%}")
