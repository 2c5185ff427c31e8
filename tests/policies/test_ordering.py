"""The order in which each ordering serves requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import FakeRequest
from headway.core.policy import MovingOrdering, Ordering, SteppedOrdering
from headway.policies import ORDERINGS
from headway.policies.ordering.deadlines import EdfOrdering
from headway.policies.ordering.fcfs import FcfsOrdering
from headway.policies.ordering.oracle import ShortestRemainingOrdering, ShortestToAnswerOrdering
from headway.policies.ordering.tiers import PriorityOrdering
from headway.policies.ordering.time_sharing import RoundRobinOrdering


def served(ordering: Ordering, requests: list[FakeRequest]) -> list[int]:
    """Ids in order of rank; ties go to the lower id."""
    return [r.id for r in sorted(requests, key=lambda r: (ordering.rank(r, 100.0), r.id))]


def test_fcfs_goes_by_arrival_and_then_by_id() -> None:
    requests = [FakeRequest(0, 5.0), FakeRequest(1, 2.0), FakeRequest(2, 2.0, tier=0, generated_tokens=9)]
    assert served(FcfsOrdering(), requests) == [1, 2, 0]


def test_priority_goes_by_tier_and_then_by_arrival() -> None:
    requests = [FakeRequest(0, 1.0, tier=2), FakeRequest(1, 9.0, tier=0), FakeRequest(2, 4.0, tier=0)]
    assert served(PriorityOrdering(), requests) == [2, 1, 0]


def test_edf_takes_the_first_deadline_that_a_request_has() -> None:
    requests = [
        FakeRequest(0, 10.0, deadline_s=40.0, slo_e2e_s=1.0),
        FakeRequest(1, 10.0, slo_e2e_s=25.0),
        FakeRequest(2, 10.0, slo_ttft_s=20.0),
        FakeRequest(3, 10.0),
    ]
    ranks = [EdfOrdering(default_deadline_s=7.0).rank(request, 100.0) for request in requests]
    assert ranks == [(40.0, 10.0), (35.0, 10.0), (30.0, 10.0), (17.0, 10.0)]
    assert served(EdfOrdering(default_deadline_s=7.0), requests) == [3, 2, 1, 0]
    assert served(EdfOrdering(default_deadline_s=60.0), requests) == [2, 1, 0, 3]


def test_shortest_remaining_counts_what_is_left() -> None:
    requests = [
        FakeRequest(0, output_tokens=50),
        FakeRequest(1, output_tokens=900, generated_tokens=880),
        FakeRequest(2, 1.0, output_tokens=50),
    ]
    assert served(ShortestRemainingOrdering(), requests) == [1, 0, 2]


def test_shortest_to_answer_counts_to_the_first_answering_token() -> None:
    requests = [
        FakeRequest(0, output_tokens=900, reasoning_tokens=50, generated_tokens=40),  # 11 to go
        FakeRequest(1, output_tokens=20, reasoning_tokens=12),  # 13 to go
        FakeRequest(2, output_tokens=900),  # its first token is its answer's
        FakeRequest(3, output_tokens=900, reasoning_tokens=50, generated_tokens=51),  # answers, 849 left
        FakeRequest(4, output_tokens=60, reasoning_tokens=50, generated_tokens=51),  # answers, 9 left
        FakeRequest(5, 1.0, output_tokens=40, reasoning_tokens=12),  # as 1, but later
    ]
    ordering = ShortestToAnswerOrdering()
    assert served(ordering, requests) == [2, 0, 1, 5, 4, 3]
    assert [ordering.next_change_tokens(request) for request in requests] == [11, 13, 1, None, None, 13]


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 12)), min_size=1, max_size=5), st.data())
def test_no_order_of_service_brings_answers_sooner_in_the_mean(lengths: list[tuple[int, int]], data: Any) -> None:
    """One token at a time, all requests there from the start: against any other order of service."""

    def mean_first_answer(first: Callable[[list[FakeRequest]], FakeRequest]) -> float:
        requests = [FakeRequest(i, output_tokens=r + a, reasoning_tokens=r) for i, (r, a) in enumerate(lengths)]
        began, clock = {}, 0
        while left := [request for request in requests if request.generated_tokens < request.output_tokens]:
            clock += 1
            served = first(left)
            served.generated_tokens += 1
            if served.generated_tokens == served.reasoning_tokens + 1:
                began[served.id] = clock
        return sum(began.values()) / len(began)

    best = mean_first_answer(lambda left: min(left, key=lambda request: ShortestToAnswerOrdering().rank(request, 0.0)))
    assert best <= mean_first_answer(lambda left: data.draw(st.sampled_from(left)))


@given(num_requests=st.integers(1, 6), quantum=st.integers(1, 5), rounds=st.integers(1, 12))
def test_round_robin_gives_each_a_quantum_before_anyone_gets_two(num_requests: int, quantum: int, rounds: int) -> None:
    ordering = RoundRobinOrdering(quantum_tokens=quantum)
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
    assert EdfOrdering(preemptive=True).preemptive
    assert not PriorityOrdering(preemptive=False).preemptive
    assert not ShortestRemainingOrdering(preemptive=False).preemptive
