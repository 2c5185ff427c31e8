"""Replicas by rate, against brute force over what is served; and what to reserve, against every other choice."""

from __future__ import annotations

from collections.abc import Callable
from math import log
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from headway.planning.demand.search import HIGHEST, STEP, ServedRates, hours_of_day, runs, to_reserve, used_share
from headway.planning.together import in_threads

RECORDED_RPS = 10.0


def served(of_one: float, gain: float, guess: int = 3, most: int = 64, **more: Any) -> ServedRates:
    """Replicas that serve `of_one` each, and a little more together."""
    return ServedRates(lambda n, load: load * RECORDED_RPS <= of_one * n**gain, RECORDED_RPS, guess, most, **more)


@settings(max_examples=60, deadline=None)
@given(st.floats(0.05, 40), st.floats(1.0, 1.1), st.integers(1, 60), st.floats(0.5, 300))
def test_the_need_is_the_least_number_that_serves_the_rate(of_one: float, gain: float, guess: int, rps: float) -> None:
    found = served(of_one, gain, guess)
    need = found.need(rps)
    rough = found.roughly(rps)
    exact = next((n for n in range(1, 65) if of_one * n**gain >= rps), None)
    strict = next((n for n in range(1, 65) if of_one * n**gain >= rps * STEP), None)  # one step of the grid less
    assert need is None if exact is None else exact <= (need or 65) <= (strict or 65)
    assert (rough is None) == (need is None)
    if need is not None and rough is not None:
        assert abs(rough - need) <= 1 + 0.06 * need


@settings(max_examples=40, deadline=None)
@given(st.floats(0.3, 30), st.lists(st.floats(1, 200), min_size=2, max_size=8), st.data())
def test_a_higher_rate_never_needs_fewer_in_whichever_order_they_are_asked(
    of_one: float, rates: list[float], data: st.DataObject
) -> None:
    asked = data.draw(st.permutations(rates))
    found, other = served(of_one, 1.05), served(of_one, 1.05)
    needs = {rps: found.need(rps) or 65 for rps in asked}
    assert [needs[rps] for rps in sorted(needs)] == sorted(needs.values())
    assert needs == {rps: other.need(rps) or 65 for rps in rates}


@settings(max_examples=20, deadline=None)
@given(st.floats(0.3, 30), st.floats(1, 200))
def test_calls_made_together_find_the_same(of_one: float, rps: float) -> None:
    assert served(of_one, 1.0).need(rps) == served(of_one, 1.0, together=in_threads).need(rps)


def test_rehearsals_are_few() -> None:
    found = served(1.7, 1.02)
    for rps in (15.0, 17.0, 19.0, 21.0, 22.0):
        found.need(rps)
    assert found.num_rehearsals <= 80


def test_what_no_number_serves_and_what_serves_anything() -> None:
    nothing: Callable[[int, float], bool] = lambda n, load: False  # noqa: E731
    assert ServedRates(nothing, RECORDED_RPS, 1, 4).need(1e-3) is None
    anything = ServedRates(lambda n, load: True, RECORDED_RPS, 1, 4)
    assert anything.need(1e3) == 1 and anything.rate(1) == RECORDED_RPS * STEP**HIGHEST
    assert log(anything.rate(1)) < 10


NEEDS = st.lists(st.integers(1, 9), min_size=1, max_size=60)


@given(NEEDS, st.floats(0, 3), st.floats(0.01, 3))
def test_no_other_number_to_reserve_is_cheaper(needs: list[int], reserved: float, rented: float) -> None:
    def usd(base: int) -> float:
        return len(needs) * base * reserved + sum(max(need - base, 0) for need in needs) * rented

    chosen = usd(to_reserve(needs, reserved, rented))
    assert chosen <= min(usd(base) for base in range(11)) + 1e-6
    assert to_reserve(needs, None, rented) == min(needs)


@given(NEEDS)
def test_replica_hours_are_those_of_the_shares(needs: list[int]) -> None:
    assert abs(sum(used_share(needs)) * len(needs) - sum(needs)) < 1e-6


@given(st.lists(st.integers(1, 4), min_size=24, max_size=24), st.integers(0, 4))
def test_runs_of_hours_cover_what_is_above_the_base_once(by_hour: list[int], base: int) -> None:
    covered: dict[int, int] = {}
    for first, length, replicas in runs(hours_of_day(by_hour, range(24)), base):
        for hour in range(first, first + length):
            assert hour % 24 not in covered
            covered[hour % 24] = replicas
    assert covered == {hour: n for hour, n in enumerate(by_hour) if n > base}
