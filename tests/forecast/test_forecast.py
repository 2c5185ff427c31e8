"""Forecasters: what each says of series whose answer is known, and what must hold of all."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import HeadwayError
from headway.core.policy import Floats, Forecaster
from headway.forecast.methods import Blend, make
from headway.forecast.naive import LastValue, SeasonalNaive

QUANTILES = (0.1, 0.5, 0.9, 0.99)
NAIVE = ("last-value", "seasonal-naive", "seasonal-mean")
FITTED = ("ets", "arima", "blend", "arima:1-0-1", "arima:1-0-0:0-1-1")
BLENDED = [pytest.mark.ci]  # as long as its parts, which are tested one by one
EVERY = [
    *NAIVE,
    *(
        pytest.param(name, marks=[pytest.mark.filterwarnings("default"), *(BLENDED if name == "blend" else ())])
        for name in FITTED
    ),
]


def forecaster(name: str, season: int = 6) -> Forecaster:
    if name not in NAIVE:
        pytest.importorskip("statsforecast")
    return make(name, season)


def week(num: int = 72, season: int = 6, seed: int = 0, noise: float = 0.1) -> Floats:
    """A period, and noise."""
    shape = 10 + 5 * np.sin(2 * np.pi * np.arange(num) / season)
    return np.asarray(shape * np.exp(np.random.default_rng(seed).normal(0, noise, num)), "f8")


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("num", [1, 2, 7, 8, 13, 72])
def test_quantiles_in_order_finite_and_not_below_0(name: str, num: int) -> None:
    for history in (week(num), np.zeros(num), np.full(num, 3.0), np.where(np.arange(num) % 2, 1e-9, 1e9)):
        said = forecaster(name).forecast(history, 7, QUANTILES)
        assert said.shape == (4, 7)
        assert np.isfinite(said).all() and (said >= 0).all()
        assert (np.diff(said, axis=0) >= -1e-9 * np.abs(said).max()).all()


@pytest.mark.parametrize("name", EVERY)
def test_the_same_history_gives_the_same_answer_whatever_was_asked_before(name: str) -> None:
    series, used = week(), forecaster(name)
    for end in (30, 25, 61):
        used.forecast(series[:end], 3, QUANTILES)
    used.forecast(week(seed=9), 2, (0.5,))
    assert np.array_equal(used.forecast(series, 3, QUANTILES), forecaster(name).forecast(series, 3, QUANTILES))


@pytest.mark.parametrize("name", EVERY)
def test_the_future_is_not_seen(name: str) -> None:
    series = week()
    poisoned = series.copy()
    poisoned[50:] = 1e12
    clean, other = forecaster(name), forecaster(name)
    for end in (47, 49, 50):
        assert np.array_equal(clean.forecast(series[:end], 4, QUANTILES), other.forecast(poisoned[:end], 4, QUANTILES))


@pytest.mark.parametrize("name", EVERY)
def test_pickled_between_two_forecasts(name: str) -> None:
    used = forecaster(name)
    used.forecast(week(40), 1, (0.5,))
    copy = pickle.loads(pickle.dumps(used))
    assert np.array_equal(copy.forecast(week(41), 2, QUANTILES), used.forecast(week(41), 2, QUANTILES))


def test_last_value_and_its_spread() -> None:
    history = np.array([1.0, 3, 2, 6, 5])  # moves of 1 step: 2 -1 4 -1; of 2 steps: 1 3 3
    said = LastValue().forecast(history, 2, (0.5, 1.0, 0.0))
    assert said[0].tolist() == [5, 5]
    assert said[1].tolist() == [5 + 4 - 0.5, 5 + 3 - 3]
    assert said[2].tolist() == [5 - 1 - 0.5, 5 + 1 - 3]


def test_seasonal_naive_repeats_the_last_season() -> None:
    history = np.array([1.0, 2, 3, 11, 12, 13])
    said = SeasonalNaive(3).forecast(history, 7, (0.5,))
    assert said[0].tolist() == [11, 12, 13, 11, 12, 13, 11]
    assert SeasonalNaive(9).forecast(history, 1, (0.5,)).tolist() == [[13]]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40), st.integers(1, 8), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_medians_of_the_naive(values: list[float], season: int, steps: int) -> None:
    history = np.array(values)
    last = LastValue().forecast(history, steps, (0.5,))[0]
    assert last.tolist() == [history[-1]] * steps
    median = SeasonalNaive(season).forecast(history, steps, (0.5,))[0]
    if len(history) >= season:
        assert median.tolist() == np.resize(history[-season:], steps).tolist()


@pytest.mark.parametrize("name", ["ets", "arima", "arima:1-0-0:0-1-1"])
def test_models_know_a_season(name: str) -> None:
    series = week(78, noise=0.02)
    said = forecaster(name).forecast(series[:72], 6, (0.5,))[0]
    assert np.abs(said - series[72:]).mean() < 0.5 < np.abs(series[71] - series[72:]).mean()


def test_arima_finds_an_autoregression_and_its_error() -> None:
    random, series = np.random.default_rng(1), np.zeros(600)
    for i in range(1, len(series)):
        series[i] = 0.8 * series[i - 1] + random.normal()
    series += 50
    low, median, high = forecaster("arima:1-0-0", 1).forecast(series, 1, (0.1, 0.5, 0.9))[:, 0]
    assert median == pytest.approx(50 + 0.8 * (series[-1] - 50), abs=0.5)
    assert (high - low) / 2 == pytest.approx(1.2816, rel=0.12)


def test_what_is_new_is_taken_in_without_a_new_fit() -> None:
    series = week(60, noise=0.02) + np.r_[np.zeros(50), np.full(10, 20.0)]
    used = forecaster("arima:1-0-0", 1)
    before, after = (used.forecast(series[:end], 1, (0.5,))[0, 0] for end in (50, 59))  # both fitted on 48
    assert after > before + 5


def test_a_blend_is_the_mean_of_its_parts() -> None:
    low, high = Linear([1, 2]), Linear([3, 8])
    mean = Blend([low, high]).forecast(np.ones(3), 2, (0.0, 1.0))
    assert mean.tolist() == [[2, 5], [4, 10]]
    assert not Blend([low]).cheats
    high.cheats = True
    assert Blend([low, high]).cheats


def test_a_leak_knows_the_future_and_says_so() -> None:
    pytest.importorskip("statsforecast")
    series = week(noise=0.3)
    poisoned = series.copy()
    poisoned[60:] *= 50
    clean, other = make("arima-leak", 6, series), make("arima-leak", 6, poisoned)
    assert clean.cheats and not make("arima", 6).cheats
    one, two = (each.forecast(series[:50], 2, QUANTILES) for each in (clean, other))
    assert one.shape == (4, 2) and not np.array_equal(one, two)
    with pytest.raises(HeadwayError, match="the series has 72"):
        clean.forecast(series, 1, QUANTILES)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("arma", "did you mean 'arima'"),
        ("arima:1-2", "three whole numbers"),
        ("arima:1-0-0:0-1-1:2-2-2", "one order or two"),
        ("arima-leak", "expected the whole series"),
        ("last-value-leak", "only a model that is fitted"),
    ],
)
def test_names(name: str, expected: str) -> None:
    if "arima" in name:
        pytest.importorskip("statsforecast")
    with pytest.raises(HeadwayError, match=expected):
        make(name, 24)


def test_without_statsforecast_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "statsforecast", None)
    with pytest.raises(HeadwayError, match=r"pip install 'headway\[forecast\]'"):
        make("ets", 24)
    assert make("seasonal-naive", 24).forecast(np.ones(3), 1, (0.5,)).tolist() == [[1.0]]


class Linear:
    """Forecasts its own values, times 1 + q for the quantile q."""

    cheats = False

    def __init__(self, values: Sequence[float]) -> None:
        self.values = np.array(values)

    def forecast(self, history: Floats, steps: int, quantiles: Sequence[float]) -> Floats:
        return np.asarray(np.outer([1 + q for q in quantiles], self.values[:steps]), "f8")
