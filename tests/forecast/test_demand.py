"""The demand of the coming weeks: against worked examples, and what must hold whatever the days are."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import HeadwayError
from headway.core.policy import Floats
from headway.forecast.demand import DemandForecast, DemandOptions, forecast_days, forecast_demand
from headway.forecast.demand_file import load, save
from headway.forecast.recorded_hours import Hours, RecordedHour, recorded_hours
from headway.workload.files import to_csv, to_parquet
from headway.workload.read import read
from headway.workload.table import Workload

SHAPE = 100.0 + 80 * np.sin(2 * np.pi * (np.arange(24) - 8) / 24)


def hours(per_hour: Floats) -> Hours:
    begins = datetime(2026, 3, 2, tzinfo=UTC)  # a Monday
    known = int(np.isfinite(per_hour).sum())
    ends = datetime.fromtimestamp(begins.timestamp() + 3600 * len(per_hour), UTC)
    busiest = RecordedHour("day", 0.0, 3600.0, 100, 100 / 3600)
    return Hours(begins, per_hour, {"": per_hour}, {"": 10.0}, {"": 5.0}, known, ends, busiest, ())


def made(per_hour: Floats, **options: object) -> DemandForecast:
    return forecast_demand(hours(per_hour), ["day"], DemandOptions(**options), "UTC")  # type: ignore[arg-type]


def test_days_without_noise_are_forecast_exactly() -> None:
    found = made(np.tile(SHAPE, 3))
    assert found.backtest is not None and found.backtest.wape == 0.0
    assert np.allclose(found.rates(0.9), np.resize(SHAPE, 730) / 3600, rtol=1e-3)


def test_growth_is_spread_over_the_month_from_the_end_of_the_records() -> None:
    """Recorded days lie below the level at their end, by the same growth."""
    growth = 1.4 ** ((np.arange(72) + 0.5 - 72) / 730)
    found = made(np.tile(SHAPE, 3) * growth, growth_per_month=1.4)
    expected = np.resize(SHAPE, 730) / 3600 * 1.4 ** (np.arange(730) / 730)
    assert np.allclose(found.rates(0.5), expected, rtol=1e-3)
    assert found.backtest is not None and found.backtest.wape == pytest.approx(0.0, abs=1e-9)


def test_the_profile_is_the_weeks_where_two_weeks_and_a_day_are_known() -> None:
    week = np.concatenate([np.tile(SHAPE, 5), np.tile(SHAPE / 4, 2)])
    found = made(np.concatenate([week, week, SHAPE]))
    assert found.season_hours == 168
    days = found.rates(0.5)[: 4 * 24].reshape(4, 24).sum(axis=1)  # it begins on a Tuesday: four days of work
    assert np.allclose(days, days[0], rtol=1e-4) and found.rates(0.5)[4 * 24 : 5 * 24].sum() == pytest.approx(
        days[0] / 4, rel=1e-4
    )


def test_one_day_has_an_assumed_interval_and_says_so() -> None:
    found = made(SHAPE, assumed_spread=0.5)
    assert found.backtest is None and "ASSUMED" in " ".join(found.assumptions)
    assert found.rates(0.9)[3] / found.rates(0.5)[3] == pytest.approx(np.exp(0.5 * 1.28155), rel=1e-3)


def test_quantiles_hold_for_days_that_were_not_seen() -> None:
    """Days differ by a random factor: over ten histories, nearly 90% of further hours are below the 90% quantile."""
    inside = []
    for seed in range(10):
        random = np.random.default_rng(seed)
        days = SHAPE * np.exp(random.normal(0, 0.2, (114, 1)))
        bound = made(days[:14].ravel(), methods=("seasonal-mean",)).rates(0.9)[:24] * 3600
        inside.append(float((days[14:] <= bound).mean()))
    assert 0.8 <= float(np.mean(inside)) <= 0.97


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 6), st.floats(0.5, 2.0), st.sampled_from([0.0, 0.3]))
def test_quantiles_rise_and_more_growth_is_more_demand(seed: int, num: int, growth: float, missing: float) -> None:
    random = np.random.default_rng(seed)
    days = random.poisson(np.tile(SHAPE, num) / 20).astype("f8")
    days[random.random(len(days)) < missing] = np.nan
    days[0] = 3.0
    found, more = made(days, growth_per_month=growth), made(days, growth_per_month=growth * 1.2)
    rows = np.array(found.total.requests_per_s)
    assert np.isfinite(rows).all() and (np.diff(rows, axis=0) >= 0).all()
    # The profile is taken at the level of the last recorded hour, so that more growth lifts it throughout.
    assert found.rates(0.5).sum() <= more.rates(0.5).sum()


@settings(max_examples=50, deadline=None)
@given(st.floats(0.02, 0.995), st.floats(0.02, 0.995))
def test_any_quantile_lies_between_its_neighbours(one: float, other: float) -> None:
    found = made(np.tile(SHAPE, 3) * np.repeat([0.8, 1.0, 1.3], 24))
    low, high = sorted((one, other))
    assert (found.rates(low) <= found.rates(high) * (1 + 1e-12)).all()


def day(num: int = 600, seed: int = 0, models: bool = False) -> Workload:
    random = np.random.default_rng(seed)
    columns = {
        "arrival_s": np.sort(random.random(num)) * 86400,
        "prompt_tokens": random.integers(5, 50, num),
        "output_tokens": random.integers(1, 9, num),
    }
    if models:
        return Workload({**columns, "model": random.integers(0, 2, num)}, ("a", "b"))
    return Workload(columns)


def test_the_same_requests_in_any_format_give_the_same_forecast(tmp_path: Path) -> None:
    rows = day()
    to_csv(rows, tmp_path / "a.csv")
    to_parquet(read(tmp_path / "a.csv"), tmp_path / "b.parquet")
    (tmp_path / "c.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        + "".join(
            f"{datetime.fromtimestamp(1.7e9 + float(f'{t:.6f}'), UTC):%Y-%m-%d %H:%M:%S.%f},{p},{o}\n"
            for t, p, o in zip(rows.arrival_s - rows.arrival_s[0], rows.prompt_tokens, rows.output_tokens, strict=True)
        )
    )
    one, other, azure = (forecast_days([tmp_path / name]) for name in ("a.csv", "b.parquet", "c.csv"))
    assert one.total == other.total
    assert azure.total.prompt_tokens_mean == pytest.approx(one.total.prompt_tokens_mean)
    assert azure.rates(0.5).sum() == pytest.approx(one.rates(0.5).sum(), rel=0.02)  # its day begins with a request


def test_models_are_forecast_by_themselves(tmp_path: Path) -> None:
    to_parquet(day(models=True), tmp_path / "day.parquet")
    found = forecast_days([tmp_path / "day.parquet"])
    assert [each.model for each in found.by_model] == ["a", "b"]
    parts = np.sum([each.requests_per_s[2] for each in found.by_model], axis=0)
    assert np.allclose(parts, found.rates(0.5), rtol=1e-3)


def test_a_forecast_survives_its_file(tmp_path: Path) -> None:
    to_parquet(day(models=True), tmp_path / "day.parquet")
    found = forecast_days([tmp_path / "day.parquet"], growth_per_month=1.4)
    save(found, tmp_path / "f.parquet")
    assert load(tmp_path / "f.parquet") == found


def test_every_request_is_in_one_hour(tmp_path: Path) -> None:
    for i in range(2):
        to_parquet(day(500, i), tmp_path / f"{i}.parquet")
    found = recorded_hours([tmp_path / "0.parquet", tmp_path / "1.parquet"])
    assert found.per_hour.sum() == pytest.approx(1000, rel=0.01)  # hours in which a record ends are scaled up
    assert found.busiest.requests_per_s >= found.per_hour.max() / 3600 * 0.9


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"growth_per_month": 0.0}, "factor a month above 0"),
        ({"methods": ("arima-leak",)}, "none of which leaks"),
        ({"time_zone": "Mars/Base"}, "Europe/Berlin"),
        ({"begins": "soon"}, "2026-03-02T00:00"),
        ({"first": "1999-01-01"}, "the records end"),
        ({"methods": ("seasonal-mena",)}, "seasonal-mean"),
    ],
)
def test_bad_arguments_are_named(tmp_path: Path, changed: dict[str, object], said: str) -> None:
    to_parquet(day(), tmp_path / "day.parquet")
    with pytest.raises(HeadwayError, match=said):
        forecast_days([tmp_path / "day.parquet"], **changed)  # type: ignore[arg-type]


def test_what_is_no_forecast_is_said(tmp_path: Path) -> None:
    to_parquet(day(), tmp_path / "day.parquet")
    for name in ("day.parquet", "none.parquet"):
        with pytest.raises(HeadwayError, match="forecast demand"):
            load(tmp_path / name)
    with pytest.raises(HeadwayError, match="given twice"):
        forecast_days([tmp_path / "day.parquet", tmp_path / "day.parquet"])
