"""The order of events."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.control.policies import Policies
from headway.core.fleet import Fleet
from headway.policies.ordering.fcfs import FcfsOrdering
from headway.policies.routing.round_robin import RoundRobinRouter
from headway.sim.cluster import simulate
from headway.sim.kernel import ARRIVAL, COMMAND, FINISH, TICK, Kernel, Sleeper
from headway.workload.sources import TraceSource
from simulation import pool, request, workload


class Logging(Sleeper):
    """A replica that logs when it wakes and decides, and then sleeps until the next of its times."""

    def __init__(self, id: int, kernel: Kernel, log: list[Any], wakes_s: Sequence[float] = ()) -> None:
        self.id = id
        self._kernel, self._log, self._wakes_s = kernel, log, iter(wakes_s)
        self.number = kernel.add(self)
        self._sleep()

    def _sleep(self) -> None:
        self._kernel.boundaries.set(self.number, next(self._wakes_s, inf))

    def wake(self, now: float) -> None:
        self._log.append((now, FINISH, self.id))
        assert (self._kernel.priority, self._kernel.key) == (FINISH, self.id)
        self._sleep()

    def decide(self, now: float) -> None:
        self._log.append((now, "decide", self.id))


_TIMES_S = st.sampled_from([0.0, 1.0, 1.5])


@given(
    st.lists(st.tuples(_TIMES_S, st.sampled_from([COMMAND, ARRIVAL, TICK]), st.integers(0, 2)), max_size=40),
    st.lists(st.lists(_TIMES_S, max_size=4).map(sorted), max_size=9),
    st.none() | _TIMES_S,
)
def test_events_are_ordered_by_time_priority_key_and_sequence(
    events: list[tuple[float, int, int]], wakes: list[list[float]], arrival_s: float | None
) -> None:
    kernel, seen = Kernel(), list[Any]()
    for number, (time_s, priority, key) in enumerate(events):
        kernel.at(time_s, priority, key, lambda now, event: seen.append(event), (time_s, priority, key, number))
    for id, times_s in enumerate(wakes):
        Logging(id, kernel, seen, times_s)
    expected = [(time_s, FINISH, id) for id, times_s in enumerate(wakes) for time_s in times_s]
    expected += [(*event, number) for number, event in enumerate(events)]
    if arrival_s is not None:
        kernel.arrival_s, kernel.arrive = arrival_s, lambda now: seen.append((now, ARRIVAL, -1))
        expected.append((arrival_s, ARRIVAL, -1))
    kernel.run()
    assert seen == sorted(expected)
    assert kernel.next_s() == inf


def test_replicas_decide_last_and_in_order_of_id() -> None:
    kernel, log = Kernel(), list[Any]()
    for id in range(3):
        Logging(id, kernel, log, [2.0] if id == 1 else [])

    def happen(now: float, argument: tuple[str, int | None]) -> None:
        log.append((now, argument[0]))
        if argument[1] is not None:
            kernel.undecided.append(argument[1])

    for priority, name, wakes in [(TICK, "tick", 2), (ARRIVAL, "arrival", 0), (COMMAND, "command", None)]:
        kernel.at(1.0, priority, 0, happen, (name, wakes))
    kernel.at(2.0, COMMAND, 0, happen, ("command", 1))
    kernel.run()
    names = ["command", "arrival", "tick", "decide", "decide", FINISH, "command", "decide"]
    assert [entry[1] for entry in log] == names
    assert [entry[2] for entry in log if entry[1] == "decide"] == [0, 2, 1]


def test_a_run_stops_before_later_events() -> None:
    kernel, seen = Kernel(), []
    for time_s in (1.0, 2.0, 3.0):
        kernel.at(time_s, TICK, 0, lambda now, _: seen.append(now))
    kernel.run(2.0)
    assert (seen, kernel.next_s()) == ([1.0, 2.0], 3.0)
    kernel.run()
    assert seen == [1.0, 2.0, 3.0]


def test_a_run_collects_garbage_rarely_and_then_as_before() -> None:
    """Also if it fails; and never where collection is off."""
    seen: list[int] = []

    class Failing(RoundRobinRouter):
        def route(self, request: Any, view: Any) -> Any:
            seen.append(gc.get_threshold()[0])
            raise ZeroDivisionError

    usual, policies = gc.get_threshold(), Policies(Failing, FcfsOrdering)
    try:
        for before in (usual[0], 0):
            gc.set_threshold(before, *usual[1:])
            with pytest.raises(ZeroDivisionError):
                simulate(Fleet((pool(),)), TraceSource(workload([request(0, 0.0, 10, 2)])), policies, seed=0)
            assert gc.get_threshold() == (before, *usual[1:])
    finally:
        gc.set_threshold(*usual)
    assert seen[0] > 100 * usual[0] and seen[1] == 0
