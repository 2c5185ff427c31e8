"""The boundaries of a stretch against a search through all of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.sim.timeline import boundary_s, completed, first_boundary_at

clocks = st.tuples(st.floats(0, 1e5), st.floats(1e-5, 1.0), st.one_of(st.just(0.0), st.floats(1e-9, 1e-3)))


@given(clocks, st.integers(0, 300), st.integers(0, 300), st.floats(-0.5, 1.5), st.booleans())
def test_boundaries_equal_those_of_a_full_search(
    clock: tuple[float, float, float], low: int, more: int, share: float, on_boundary: bool
) -> None:
    high = low + more
    start_s, a_s, b_s = clock
    boundaries = {k: boundary_s(start_s, a_s, b_s, k) for k in range(low, high + 1)}
    first, last = boundaries[low], boundaries[high]
    now = boundaries[low + int(share * more) % (more + 1)] if on_boundary else first + share * (last - first)
    at_or_after = [k for k, time_s in boundaries.items() if time_s >= now]
    assert first_boundary_at(start_s, a_s, b_s, now, low, high) == min(at_or_after, default=high)
    at_or_before = [k for k, time_s in boundaries.items() if time_s <= now]
    assert completed(start_s, a_s, b_s, now, low, high) == max(at_or_before, default=low)


def test_a_boundary_is_the_sum_of_its_iterations() -> None:
    start_s, a_s, b_s = 3.0, 0.01, 1e-5
    time_s = start_s
    for k in range(1000):
        assert boundary_s(start_s, a_s, b_s, k) == pytest.approx(time_s, abs=1e-9)
        time_s += a_s + k * b_s
