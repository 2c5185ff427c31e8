"""The order in which each ordering serves requests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import FakeRequest
from headway.core.policy import MovingOrdering, Ordering, SteppedOrdering
from headway.policies import ORDERINGS
from headway.policies.ordering.edf import Edf
from headway.policies.ordering.fcfs import Fcfs
from headway.policies.ordering.priority import Priority
from headway.policies.ordering.round_robin import RoundRobin
from headway.policies.ordering.shortest_remaining import ShortestRemaining


def served(ordering: Ordering, requests: list[FakeRequest]) -> list[int]:
    """Ids in order of rank; ties go to the lower id."""
    return [r.id for r in sorted(requests, key=lambda r: (ordering.rank(r, 100.0), r.id))]


def test_fcfs_goes_by_arrival_and_then_by_id() -> None:
    requests = [FakeRequest(0, 5.0), FakeRequest(1, 2.0), FakeRequest(2, 2.0, tier=0, generated_tokens=9)]
    assert served(Fcfs(), requests) == [1, 2, 0]


def test_priority_goes_by_tier_and_then_by_arrival() -> None:
    requests = [FakeRequest(0, 1.0, tier=2), FakeRequest(1, 9.0, tier=0), FakeRequest(2, 4.0, tier=0)]
    assert served(Priority(), requests) == [2, 1, 0]


def test_edf_takes_the_first_deadline_that_a_request_has() -> None:
    requests = [
        FakeRequest(0, 10.0, deadline_s=40.0, slo_e2e_s=1.0),
        FakeRequest(1, 10.0, slo_e2e_s=25.0, slo_ttft_s=1.0),
        FakeRequest(2, 10.0, slo_ttft_s=20.0),
        FakeRequest(3, 10.0),
    ]
    ranks = [Edf(default_deadline_s=7.0).rank(request, 100.0) for request in requests]
    assert ranks == [(40.0, 10.0), (35.0, 10.0), (30.0, 10.0), (17.0, 10.0)]
    assert served(Edf(default_deadline_s=7.0), requests) == [3, 2, 1, 0]
    assert served(Edf(default_deadline_s=60.0), requests) == [2, 1, 0, 3]


def test_shortest_remaining_counts_what_is_left() -> None:
    requests = [
        FakeRequest(0, output_tokens=50),
        FakeRequest(1, output_tokens=900, generated_tokens=880),
        FakeRequest(2, 1.0, output_tokens=50),
    ]
    assert served(ShortestRemaining(), requests) == [1, 0, 2]


@given(num_requests=st.integers(1, 6), quantum=st.integers(1, 5), rounds=st.integers(1, 12))
def test_round_robin_gives_each_a_quantum_before_anyone_gets_two(num_requests: int, quantum: int, rounds: int) -> None:
    ordering = RoundRobin(quantum_tokens=quantum)
    requests = [FakeRequest(i, arrival_s=float(i)) for i in range(num_requests)]
    for clock in range(1, rounds * num_requests + 1):
        first = min(requests, key=lambda r: (ordering.rank(r, float(clock)), r.id))
        first.generated_tokens += quantum
        first.turn = clock  # as an engine does at the end of each quantum
        got = [request.generated_tokens for request in requests]
        assert max(got) - min(got) <= quantum
        assert first.id == (clock - 1) % num_requests


@pytest.mark.parametrize(
    ("name", "quantum", "preemptive"),
    [
        ("fcfs", None, False),
        ("round-robin", 500, True),
        ("priority", None, True),
        ("edf", None, False),
        ("shortest-remaining", None, True),
    ],
)
def test_what_orderings_tell_the_engine(name: str, quantum: int | None, preemptive: bool) -> None:
    ordering = ORDERINGS[name]()
    assert (ordering.quantum, ordering.preemptive) == (quantum, preemptive)
    assert not isinstance(ordering, MovingOrdering | SteppedOrdering)


def test_preemption_is_an_argument() -> None:
    assert Edf(preemptive=True).preemptive
    assert not Priority(preemptive=False).preemptive
    assert not ShortestRemaining(preemptive=False).preemptive
