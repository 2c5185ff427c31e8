"""Whether a run shows a queue that grows, on queues whose load is known."""

from __future__ import annotations

import numpy as np
import pytest

from headway.planning.stability import LENGTHEN, Stability, lasting, lasts, stability

LIMIT_S = 5.0


def queue(load: float, num_requests: int, seed: int = 0) -> Stability:
    """A queue with one server, Poisson arrivals and exponential work of 0.1 s on average."""
    random = np.random.default_rng(seed)
    gaps_s = random.exponential(0.1 / load, num_requests)
    work_s = random.exponential(0.1, num_requests)
    wait_s = np.zeros(num_requests)
    for i in range(1, num_requests):
        wait_s[i] = max(0.0, wait_s[i - 1] + work_s[i - 1] - gaps_s[i])
    return stability(np.cumsum(gaps_s), wait_s, wait_s <= LIMIT_S)


def test_an_overload_grows_by_its_share_and_a_light_load_does_not() -> None:
    over, light = queue(1.25, 5000), queue(0.7, 5000)
    assert over.is_growing and over.wait_growth == pytest.approx(0.25, abs=0.08) and not over.is_settled
    assert not light.is_growing and light.is_settled and light.attainment > 0.99
    assert lasts(light, 0.9) and not lasts(over, 0.9)


def test_a_short_run_of_an_overload_meets_what_a_long_one_misses() -> None:
    short = queue(1.05, 400)
    assert short.attainment >= 0.9
    runs = lasting(lambda num: queue(1.05, num), 0.9, 400, 400 * LENGTHEN**3)
    assert runs[0].attainment >= 0.9 and not lasts(runs[-1], 0.9)


def test_a_light_load_needs_two_lengths_and_no_more() -> None:
    runs = lasting(lambda num: queue(0.6, num), 0.9, 1000, 1_000_000)
    assert [run.num_requests for run in runs] == [1000, 1000 * LENGTHEN]
    assert lasts(runs[-1], 0.9)


def test_requests_that_cannot_be_more_are_judged_as_they_are() -> None:
    assert [run.num_requests for run in lasting(lambda num: queue(0.6, num), 0.9, 6000, 500)] == [500]


def test_the_interval_of_the_attainment_comes_from_batches() -> None:
    in_time = np.ones(1000, dtype=bool)
    in_time[500:600] = False
    run = stability(np.arange(1000.0), np.zeros(1000), in_time)
    assert run.attainment == pytest.approx(0.9)
    assert run.attainment_high - run.attainment_low > 0.25, "the misses came together: little is known"
    spread = np.ones(1000, dtype=bool)
    spread[::10] = False
    even = stability(np.arange(1000.0), np.zeros(1000), spread)
    assert even.attainment == pytest.approx(0.9) and even.attainment_high - even.attainment_low < 0.01


@pytest.mark.parametrize("num", [0, 1, 5])
def test_few_requests_show_no_growth(num: int) -> None:
    run = stability(np.arange(float(num)), np.arange(float(num)), np.ones(num, dtype=bool))
    assert run.wait_growth == 0.0 and not run.is_growing


def test_requests_without_a_token_count_as_missed_and_not_as_waits() -> None:
    wait_s = np.full(100, 0.1)
    wait_s[::2] = np.nan
    run = stability(np.arange(100.0), wait_s, ~np.isnan(wait_s))
    assert run.attainment == 0.5 and run.wait_growth == pytest.approx(0.0, abs=1e-9)
