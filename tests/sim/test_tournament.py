"""Which slot has the least value, and which request is checked next."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.control.live import Live
from headway.sim.checks import Checks
from headway.sim.tournament import InterpretedTournament, Tournament

_CHANGES = st.lists(st.tuples(st.integers(0, 40), st.sampled_from([0.0, 0.5, 1.0, 2.0, inf])), max_size=60)


@pytest.mark.parametrize("kind", [Tournament, InterpretedTournament])
@given(changes=_CHANGES)
def test_the_least_value_and_the_lowest_of_its_slots(kind: type[Tournament], changes: list[tuple[int, float]]) -> None:
    of_slots, values = kind(), list[float]()
    for slot, value in changes:
        of_slots.extend_to(slot + 1)
        values += [inf] * (slot + 1 - len(values))
        of_slots.set(slot, value)
        values[slot] = value
        assert of_slots.least == min(values)
        if of_slots.least < inf:
            assert of_slots.pop() == values.index(min(values))
            of_slots.set(values.index(min(values)), min(values))


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5)), max_size=60))
def test_due_requests_are_those_by_tick_in_order_of_their_ids(changes: list[tuple[int, int]]) -> None:
    """0: the request leaves."""
    checks, ticks, lives = Checks(), dict[int, int](), [Live(id, 0.0, 1, 1) for id in range(21)]
    for id, tick in changes:
        if tick:
            checks.put(lives[id], tick)
            ticks[id] = tick
        else:
            if ticks.pop(id, None) is not None:
                checks.remove(lives[id])
        assert (lives[id].check_slot >= 0) == (id in ticks)
    while ticks:
        now = min(ticks.values())
        assert checks.ticks.least == now
        due = sorted(id for id, tick in ticks.items() if tick == now)
        assert [live.id for live in checks.due(now)] == due
        for id in due:
            assert lives[id].check_slot < 0
            del ticks[id]
    assert checks.ticks.least == inf
