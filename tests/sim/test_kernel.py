"""The order of events."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.control.policies import Policies
from headway.core.fleet import Fleet
from headway.policies.ordering.fcfs import FcfsOrdering
from headway.policies.routing.round_robin import RoundRobinRouter
from headway.sim.cluster import simulate
from headway.sim.kernel import ARRIVAL, COMMAND, FINISH, TICK, Kernel
from headway.workload.sources import TraceSource
from simulation import pool, request, workload


@given(st.lists(st.tuples(st.sampled_from([0.0, 1.0, 1.5]), st.integers(0, 3), st.integers(0, 2)), max_size=40))
def test_events_are_ordered_by_time_priority_key_and_sequence(events: list[tuple[float, int, int]]) -> None:
    kernel, seen = Kernel(), []
    for number, (time_s, priority, key) in enumerate(events):
        kernel.at(time_s, priority, key, lambda now, number: seen.append(number), number)
    assert len(kernel.heap) == len(events)
    kernel.run()
    assert seen == sorted(range(len(events)), key=lambda number: (*events[number], number))


@dataclass
class Deciding:
    """A replica that logs its decisions."""

    id: int
    log: list[Any]

    def decide(self, now: float) -> None:
        self.log.append((now, "decide", self.id))


def test_replicas_decide_last_and_in_order_of_id() -> None:
    kernel, log = Kernel(), []
    replicas = [Deciding(id, log) for id in range(3)]

    def happen(now: float, argument: tuple[str, int | None]) -> None:
        log.append((now, argument[0]))
        if argument[1] is not None:
            kernel.undecided.append(replicas[argument[1]])

    for priority, name, wakes in [(TICK, "tick", None), (ARRIVAL, "arrival", 0), (FINISH, "finish", 2)]:
        kernel.at(1.0, priority, 0, happen, (name, wakes))
    kernel.at(1.0, COMMAND, 0, happen, ("command", None))
    kernel.at(2.0, FINISH, 0, happen, ("finish", 1))
    kernel.run()
    assert [entry[1] for entry in log] == [
        "finish",
        "command",
        "arrival",
        "tick",
        "decide",
        "decide",
        "finish",
        "decide",
    ]
    assert [entry[2] for entry in log if entry[1] == "decide"] == [0, 2, 1]


def test_a_run_stops_before_later_events() -> None:
    kernel, seen = Kernel(), []
    for time_s in (1.0, 2.0, 3.0):
        kernel.at(time_s, TICK, 0, lambda now, _: seen.append(now))
    kernel.run(2.0)
    assert (seen, len(kernel.heap)) == ([1.0, 2.0], 1)
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
