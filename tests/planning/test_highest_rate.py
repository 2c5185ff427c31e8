"""The search for a goodput, against limits that are known."""

from __future__ import annotations

from math import inf, log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.planning.highest_rate import Strains, highest


class Served:
    """Strains of a service with limits at known rates; counts the trials."""

    def __init__(self, *limits: tuple[float, float]) -> None:
        self.limits = limits
        """(rate, slope)"""
        self.trials: list[float] = []

    def __call__(self, rate: float) -> Strains:
        self.trials.append(rate)
        return [slope * log(rate / limit) for limit, slope in self.limits]


rates = st.floats(0.2, 5.0)
slopes = st.floats(2.0, 12.0)


@given(st.lists(st.tuples(rates, slopes), min_size=1, max_size=3), rates)
def test_the_first_limit_within_the_precision(limits: list[tuple[float, float]], start: float) -> None:
    served = Served(*limits)
    found = highest(served, start, 0.01, 100.0, 1.06)
    assert found == pytest.approx(min(rate for rate, _ in limits), rel=0.06)
    assert len(served.trials) <= 25


@given(rates, st.floats(0.8, 1.25), st.floats(3.0, 6.0))
def test_a_close_start_needs_few_trials(limit: float, off: float, slope: float) -> None:
    served = Served((limit, slope))
    assert highest(served, off * limit, 0.01, 100.0, 1.06) == pytest.approx(limit, rel=0.03)
    assert len(served.trials) <= 4


@given(rates, rates, st.sampled_from([0.1, 50.0, inf]))
def test_a_limit_without_a_slope(limit: float, start: float, height: float) -> None:
    """Strains below and above the limit do not depend on the distance to it."""
    found = highest(lambda rate: [-inf if rate <= limit else height, -0.1], start, 0.01, 100.0, 1.02)
    assert found == pytest.approx(limit, rel=0.03)


@pytest.mark.parametrize("off", [1 + 0.02 * i for i in range(-10, 20)])
@pytest.mark.parametrize("flat", [0.05, 0.1, 0.3, 0.6])
def test_a_strain_that_bends_at_the_limit_needs_few_trials(off: float, flat: float) -> None:
    """Waits do not grow below the limit, however near it is, and grow fast above it."""
    limit, trials = 1.0, list[float]()

    def strains(rate: float) -> Strains:
        trials.append(rate)
        return [-flat if rate <= limit else 16 * log(rate / limit) + 0.7]

    assert highest(strains, off * limit, 0.01, 100.0, 1.06) == pytest.approx(limit, rel=0.06)
    assert len(trials) <= 6


def test_rates_below_the_floor_and_above_the_ceiling() -> None:
    assert highest(lambda rate: [1.0], 1.0, 0.1, 8.0, 1.06) == 0.0
    assert highest(lambda rate: [-1.0], 1.0, 0.1, 8.0, 1.06) == pytest.approx(8.0)
