"""The histogram: bins with inclusive upper bounds, quantiles, and merging."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from headway.gateway.telemetry.metrics import Histogram

BOUNDS = (0.1, 1.0, 10.0)


def test_a_bound_belongs_to_the_bin_below_it_and_the_last_bin_is_open() -> None:
    histogram = Histogram(BOUNDS)
    for value in (0.05, 0.1, 0.10001, 10.0, 10.5):
        histogram.observe(value)
    histogram.observe(2.0, 3)
    assert histogram.cumulative() == [2, 3, 7, 8]
    assert math.isclose(histogram.total, 0.05 + 0.1 + 0.10001 + 10.0 + 10.5 + 6.0)


def test_quantiles_are_the_geometric_middles_of_their_bins() -> None:
    histogram = Histogram(BOUNDS)
    assert histogram.quantile(0.5) is None
    histogram.observe(2.0, 9)
    histogram.observe(0.5)
    assert histogram.quantile(0.1) == math.sqrt(0.1) and histogram.quantile(0.5) == math.sqrt(10.0)
    histogram.clear()
    histogram.observe(1e9)
    assert histogram.quantile(1.0) == 10.0, "the open bin has no middle"


@given(st.lists(st.floats(0, 100)), st.lists(st.floats(0, 100)))
def test_a_merge_counts_what_both_have_counted(first: list[float], second: list[float]) -> None:
    one, other, both = Histogram(BOUNDS), Histogram(BOUNDS), Histogram(BOUNDS)
    for value in first:
        one.observe(value)
        both.observe(value)
    for value in second:
        other.observe(value)
        both.observe(value)
    one.merge(other.counts, other.total)
    assert one.cumulative() == both.cumulative() and math.isclose(one.total, both.total)
