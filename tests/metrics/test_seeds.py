"""Several seeds: intervals of means, and verdicts by the differences seed by seed."""

from __future__ import annotations

from statistics import stdev

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from headway.metrics.interval import deviation
from headway.metrics.seeds import SeededMetrics

SEEDS = tuple(range(8))


def _made(*variants: list[float | None]) -> SeededMetrics:
    return SeededMetrics(SEEDS[: len(variants[0])], tuple(tuple({"x": value} for value in each) for each in variants))


def test_the_interval_is_students() -> None:
    values = [1.0, 2.0, 4.0, 3.5, 2.5]
    low, high = stats.t.interval(0.95, 4, np.mean(values), stats.sem(values))
    found = _made(list(values)).estimate(0, "x")
    assert found is not None
    assert (found.mean, found.low, found.high) == pytest.approx((np.mean(values), low, high))


LIKE = st.integers(-3, 3).map(lambda steps: 0.1 + steps * 2.0**-56)
"""Numbers next to each other, whose deviation is lost where sums are rounded."""
METRICS = st.floats(-1e100, 1e100) | st.integers(-(10**20), 10**20) | LIKE


@given(st.lists(METRICS, min_size=2, max_size=7) | st.lists(LIKE, min_size=2, max_size=7))
def test_deviations_are_those_of_the_standard_library(values: list[float]) -> None:
    assert deviation(values) == stdev(values)


def test_common_seeds_tell_small_differences_from_large_spreads() -> None:
    """Intervals of the two overlap, and every seed says the same."""
    spread = [10.0, 20.0, 15.0, 30.0, 12.0]
    made = _made(list(spread), [value + 0.5 + 0.01 * i for i, value in enumerate(spread)])
    first, second = made.estimate(0, "x"), made.estimate(1, "x")
    assert first is not None and second is not None and second.low < first.high
    assert made.verdicts("x", "low") == ["best", "worse"] and made.verdicts("x", "high") == ["worse", "best"]


def test_what_one_seed_calls_best_may_be_indistinguishable() -> None:
    made = _made([1.0, 2.0, 3.0], [2.0, 1.0, 3.2], [9.0, 9.5, 10.0])
    assert made.verdicts("x", "low") == ["indistinguishable", "indistinguishable", "worse"]


def test_a_false_best_is_as_rare_as_the_level_says() -> None:
    """Of variants that are the same up to noise, one in twenty is called better."""
    random = np.random.default_rng(0)
    found = [_made(*random.normal(0, 1, (2, 5)).tolist()).verdicts("x", "low").count("best") for _ in range(2000)]
    assert 0.035 < np.mean(found) < 0.065


def test_missing_values() -> None:
    assert _made([None, None, None], [1.0, 2.0, 3.0]).verdicts("x", "low") == [None, None]
    made = _made([None, 1.0, 1.1], [5.0, 6.0, 6.3], [None, None, None])
    assert made.verdicts("x", "low") == ["best", "worse", None]
    assert made.estimate(2, "x") is None and made.estimate(0, "y") is None


def test_variants_without_randomness_do_not_vary() -> None:
    same = _made([1.0] * 3, [2.0] * 3)
    assert not same.varies and same.verdicts("x", "low") == ["best", "worse"]
    assert _made([1.0] * 3, [2.0, 2.0, 2.1]).varies
    assert _made([1.0] * 3, [1.0] * 3).verdicts("x", "low") == ["indistinguishable", "indistinguishable"]
