"""The evaluation: errors against their definitions, GPU-hours against brute force, the command."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.cli import main
from headway.core.errors import HeadwayError
from headway.forecast.evaluate import CLAIRVOYANT, Evaluation, EvaluationSettings, evaluate
from headway.forecast.scaling import Expected, ObservedDemand, matched, scaled
from headway.workload.series import DemandSeries

NAIVE = ("last-value", "seasonal-naive")


def days(num: int = 6, seed: int = 0, step_s: float = 900.0, name: str = "x") -> DemandSeries:
    at = np.arange(num * 96)
    noise = np.exp(np.random.default_rng(seed).normal(0, 0.2, len(at)))
    return DemandSeries(name, 0.0, step_s, 100 * (1.3 + np.sin(2 * np.pi * at / 96)) * noise)


def small(**changes: object) -> EvaluationSettings:
    return EvaluationSettings(**{"methods": NAIVE, **changes})  # type: ignore[arg-type]


def row(found: Evaluation, method: str):  # type: ignore[no-untyped-def]
    return next(each for each in found.rows if each.method == method)


def test_errors_of_the_last_value_by_hand() -> None:
    series = days()
    found = row(evaluate([series], small(of="mean")), "last-value").errors
    hours = series.values.reshape(-1, 4).mean(axis=1)
    expected, came = hours[47:-1], hours[48:]
    off = np.abs(expected - came)
    assert found.mape == pytest.approx((off / came).mean())
    assert found.smape == pytest.approx((2 * off / (expected + came)).mean())
    assert found.wape == pytest.approx(off.sum() / came.sum())
    assert found.under_share == pytest.approx((came > expected).mean())
    assert found.pinball["0.5"] == pytest.approx(off.sum() / 2 / came.sum())
    assert found.coverage["0.5"] == pytest.approx((came <= expected).mean())
    assert abs(found.coverage["0.9"] - 0.9) < 0.1


@pytest.mark.parametrize("horizon", [1, 3])
def test_the_horizon_is_how_old_the_news_is(horizon: int) -> None:
    series = days()
    found = evaluate([series], small(horizon=horizon, of="max"))
    hours = series.values.reshape(-1, 4).max(axis=1)
    first = 48 + horizon - 1
    off = np.abs(hours[first - horizon : -horizon] - hours[first:])
    assert row(found, "last-value").errors.wape == pytest.approx(off.sum() / hours[first:].sum())
    assert found.num_forecasts == len(hours) - first


def test_together_and_by_series() -> None:
    found = evaluate([days(name="a"), days(seed=1, name="b")], small())
    errors = row(found, "seasonal-naive")
    assert list(errors.by_series) == ["a", "b"] == list(found.series)
    low, high = sorted(each.wape or 0 for each in errors.by_series.values())
    assert low <= (errors.errors.wape or 0) <= high


def test_who_knows_what_comes_needs_least() -> None:
    found = evaluate([days()], small(exceeded=0.02))
    ideal = row(found, CLAIRVOYANT)
    assert ideal.cheats and ideal.errors.wape == 0
    for each in found.rows:
        assert each.scaled is not None and each.scaled.exceeded_share <= 0.02
        assert each.scaled.gpu_hours >= 0.95 * ideal.scaled.gpu_hours


@pytest.mark.ci
def test_a_leak_is_marked_and_better_than_honest() -> None:
    pytest.importorskip("statsforecast")
    found = evaluate([days()], EvaluationSettings(methods=("arima", "arima-leak")))
    honest, leak = row(found, "arima"), row(found, "arima-leak")
    assert (honest.cheats, leak.cheats) == (False, True)
    assert leak.errors.wape < honest.errors.wape


def test_short_series_are_left_out_or_refused() -> None:
    found = evaluate([days(name="long"), days(2, name="short")], small())
    assert found.series == ("long",)
    assert "left out: short: 48 steps of 3600 s; expected 50 or more: 48 to begin with" in found.notes[0]
    with pytest.raises(HeadwayError, match="short: 48 steps"):
        evaluate([days(2, name="short")], small())
    with pytest.raises(HeadwayError, match="is 0 throughout"):
        evaluate([DemandSeries("x", 0, 3600, np.zeros(100))], small())


def brute_force(expected: Expected, demand: ObservedDemand, exceeded: float) -> float:
    """The least GPU-hours over a fine grid of head-rooms."""
    found = [scaled([expected], [demand], h) for h in np.arange(-20, 60, 0.01)]
    return min(each.gpu_hours for each in found if each.exceeded_share <= exceeded)


@pytest.mark.ci
@given(st.integers(0, 10_000), st.floats(0, 0.3))
@settings(max_examples=12, deadline=None)
def test_least_headroom_against_brute_force(seed: int, exceeded: float) -> None:
    random = np.random.default_rng(seed)
    fine = random.uniform(0, 100, (12, 4))
    expected = Expected(random.uniform(10, 80, 12), random.uniform(5, 20, 12))
    demand = ObservedDemand(fine, 3600.0, 7.0, 2)
    found = matched([expected], [demand], exceeded)
    assert found is not None and found.exceeded_share <= exceeded
    assert found.gpu_hours == pytest.approx(brute_force(expected, demand, exceeded), rel=0.01)


def test_gpu_hours_by_hand() -> None:
    expected = Expected(np.array([10.0, 25, 0]), np.array([0.0, 5, 0]))
    demand = ObservedDemand(np.array([[10.0, 11], [40, 20], [3, 3]]), 1800.0, 10.0, 8)
    found = scaled([expected], [demand], 1.0)  # 1, 3 and 1 instances
    assert found.gpu_hours == 5 * 8 / 2
    assert found.exceeded_share == 2 / 6
    assert found.idle_share == pytest.approx(1 - (1 + 1 + 3 + 2 + 0.3 + 0.3) / 10)


def test_no_headroom_helps_where_no_spread_is_seen() -> None:
    blind = Expected(np.zeros(3), np.zeros(3))
    assert matched([blind], [ObservedDemand(np.full((3, 2), 50.0), 3600.0, 10.0)], 0.1) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"methods": ()},
        {"methods": ("a", "a")},
        {"horizon": 0},
        {"quantiles": (0.1, 0.9)},
        {"quantiles": (0.5,)},
        {"quantiles": (0.5, 1.0)},
        {"exceeded": 1.0},
        {"capacity": 0.0},
    ],
)
def test_questions_that_make_no_sense(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="expected"):
        EvaluationSettings(**changes)  # type: ignore[arg-type]


def file(folder: Path) -> Path:
    path = folder / "demand.csv"
    rows = [f"{900 * i},{a},{b}" for i, (a, b) in enumerate(zip(days().values, days(seed=2).values, strict=True))]
    path.write_text("\n".join(["time_s,a,b", *rows]) + "\n")
    return path


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["forecast", "evaluate", str(file(tmp_path)), "--methods", "last-value,seasonal-naive"]
    assert main([*line, "--json", "--only", "b", "--capacity", "20"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["series"] == ["b"] and found["capacity"] == 20
    assert [each["method"] for each in found["rows"]] == [*NAIVE, CLAIRVOYANT]
    assert main(line) == 0
    out = capsys.readouterr()
    assert "GPU-hours" in out.out and "clairvoyant *" in out.out and not out.err


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--methods", "last-values"], "did you mean 'last-value'"),
        (["--only", "c"], "no series 'c'; it has: a, b"),
        (["--quantiles", "half"], "expected numbers"),
        (["--quantiles", "0.2"], "0.5 and a larger one"),
        (["--step-s", "1000"], "multiple of its own"),
        (["--columns", "A"], "unknown column"),
    ],
)
def test_mistakes_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], expected: str
) -> None:
    assert main(["forecast", "evaluate", str(file(tmp_path)), *options]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.skipif("HEADWAY_DATA" not in os.environ, reason="HEADWAY_DATA is not set")
def test_published_demand(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("statsforecast")
    path = Path(os.environ["HEADWAY_DATA"]) / "demand" / "o365_prompt_tokens_per_minute.csv.gz"
    methods = "last-value,arima,arima-leak"
    assert main(["forecast", "evaluate", str(path), "--only", "A prod,C prod", "--methods", methods, "--json"]) == 0
    rows = {each["method"]: each for each in json.loads(capsys.readouterr().out)["rows"]}
    wape = {name: each["errors"]["wape"] for name, each in rows.items()}
    assert wape["arima-leak"] < wape["arima"] < wape["last-value"]
    assert 0.8 < rows["arima"]["errors"]["coverage"]["0.9"] < 0.98
