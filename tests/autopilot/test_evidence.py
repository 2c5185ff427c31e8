"""Evidence that may be looked at after every pair: exact without an effect, by all orders of the periods."""

from __future__ import annotations

from itertools import product
from math import exp
from random import Random
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.autopilot.evidence import bounds, is_above, is_below, log_evidence, pairs_needed
from headway.autopilot.staging import OVERDISPERSION, staging, staging_for_dollars
from headway.core.errors import HeadwayError

SIZES = st.lists(st.floats(0, 1), min_size=1, max_size=8)
GAINS = st.lists(st.floats(-1, 1), min_size=1, max_size=30)


@settings(max_examples=25)
@given(SIZES)
def test_without_an_effect_the_evidence_is_1_in_the_mean_over_all_orders(sizes: list[float]) -> None:
    signs = product((1, -1), repeat=len(sizes))
    found = [exp(log_evidence([s * d for s, d in zip(each, sizes, strict=True)])) for each in signs]
    assert fmean(found) == pytest.approx(1, rel=1e-9)


def test_looking_after_every_pair_finds_an_effect_that_is_not_there_in_at_most_alpha_of_all_orders() -> None:
    sizes, alpha, found = [0.1 + 0.05 * (i % 5) for i in range(9)], 0.2, 0
    for signs in product((1, -1), repeat=len(sizes)):
        gains = [s * d for s, d in zip(signs, sizes, strict=True)]
        found += any(is_above(gains[:num], 0, alpha) for num in range(1, len(gains) + 1))
    assert 0 < found / 2 ** len(sizes) <= alpha


@settings(max_examples=30)
@given(GAINS)
def test_bounds_are_where_the_evidence_is_enough(gains: list[float]) -> None:
    found = bounds(gains, 0.05)
    assert -1 <= found.low <= found.high <= 1
    assert found.low == -1 or (is_above(gains, found.low, 0.05) and not is_above(gains, found.low + 1e-6, 0.05))
    assert found.high == 1 or (is_below(gains, found.high, 0.05) and not is_below(gains, found.high - 1e-6, 0.05))


def test_the_pairs_that_are_expected_are_enough_in_most_runs() -> None:
    random = Random(1)
    for gain, deviation in ((0.2, 0.1), (0.1, 0.15), (0.02, 0.01)):
        num = round(pairs_needed(gain, deviation, 0.05))
        runs = [[random.gauss(gain, deviation) for _ in range(num)] for _ in range(60)]
        found = [any(is_above(run[:end], 0, 0.05) for end in range(1, num + 1)) for run in runs]
        assert fmean(found) >= 0.8


@given(st.floats(0.01, 0.8), st.floats(0, 1), st.floats(0.1, 100), st.floats(0.1, 60), st.floats(600, 200_000))
def test_a_change_is_tried_for_a_tenth_to_a_half_of_a_time_that_is_enough(
    gain: float, attainment: float, rate: float, e2e_s: float, time_s: float
) -> None:
    try:
        found = staging(gain, attainment, rate, e2e_s, time_s, 0.05)
    except HeadwayError:
        return
    assert 0.1 - 1e-9 <= found.share <= 0.5
    assert found.counted_s * rate >= 50 - 1e-6 and found.settle_s == e2e_s
    assert found.most_pairs * (2 * found.period_s + found.rest_s) <= time_s * (1 + 1e-9) + 2 * found.period_s


def test_more_traffic_is_tried_with_a_smaller_share_and_too_little_not_at_all() -> None:
    shares = [staging(0.2, 0.6, rate, 8, 7200, 0.05).share for rate in (0.5, 2, 10)]
    assert shares == sorted(shares, reverse=True) and shares[0] > 2 * shares[-1]
    with pytest.raises(HeadwayError, match=r"20\.0 points cannot be told within 0\.5 h"):
        staging(0.2, 0.6, 0.5, 8, 1800, 0.05)
    with pytest.raises(HeadwayError, match="not to add to the SLO attainment"):
        staging(0, 0.6, 0.5, 8, 1800, 0.05)


@given(
    st.floats(0.01, 0.4),
    st.floats(1e-4, 0.01),
    st.floats(0, 1),
    st.floats(1, 200),
    st.floats(0.1, 60),
    st.floats(600, 2e5),
)
def test_periods_for_a_saving_have_requests_enough_to_show_a_loss(
    least: float, most_lost: float, attainment: float, rate: float, e2e_s: float, time_s: float
) -> None:
    try:
        found = staging_for_dollars(least, most_lost, attainment, rate, e2e_s, time_s, 0.05)
    except HeadwayError:
        return
    assert found.counted_s * rate * most_lost > OVERDISPERSION
    assert found.most_pairs * (2 * found.period_s + found.rest_s) <= time_s * (1 + 1e-9) + 2 * found.period_s


def test_a_saving_that_cannot_be_told_says_so() -> None:
    with pytest.raises(
        HeadwayError, match=r"a saving of 10\.0% that costs at most 0\.10 points .* within 2 h at 1 req"
    ):
        staging_for_dollars(0.1, 0.001, 0.99, 1, 8, 7200, 0.05)
    with pytest.raises(HeadwayError, match="lose more SLO attainment than its saving is worth"):
        staging_for_dollars(0.1, 0.0, 0.99, 100, 8, 7200, 0.05)
