"""Sources: a trace, a closed loop, sessions. A stand-in for a fleet drives them."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import starmap
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import HeadwayError
from headway.core.record import Outcome
from headway.core.request import Request, Segment
from headway.workload.sessions import Sessions, SessionTurns, flattened
from headway.workload.sources import ClosedLoop, RequestSource, TraceSource
from headway.workload.table import Workload


def plain(num: int, **columns: object) -> Workload:
    base = {"arrival_s": np.arange(num) * 0.5, "prompt_tokens": np.arange(num) + 10}
    base["output_tokens"] = np.full(num, 7)
    return Workload({**base, **{n: np.asarray(c) for n, c in columns.items()}})


Answer = Callable[[Request], tuple[float, Outcome]]


def drive(source: RequestSource, answer: Answer) -> list[tuple[Request, float, Outcome]]:
    """Every request in order of arrival, with its end."""
    seen: list[tuple[Request, float, Outcome]] = []
    ends: list[tuple[float, int, Request, Outcome]] = []
    last_s = 0.0
    while ends or source.peek_s() is not None:
        at_s = source.peek_s()
        if at_s is None or (ends and ends[0][0] <= at_s):
            end_s, _, request, outcome = heappop(ends)
            source.ended(request, end_s, outcome)
            continue
        request = source.pop(Request)
        assert request.arrival_s == at_s >= last_s and request.id == len(seen)
        last_s = at_s
        took_s, outcome = answer(request)
        seen.append((request, at_s + took_s, outcome))
        heappush(ends, (at_s + took_s, request.id, request, outcome))
    return seen


def after(took_s: float) -> Answer:
    return lambda request: (took_s, Outcome.FINISHED)


def test_trace_source_plays_its_rows() -> None:
    workload = plain(20_000, tier=np.arange(20_000) % 3)
    source = TraceSource(workload)
    assert source.num_requests == 20_000 and not source.reactive
    assert [r for r, _, _ in drive(source, after(3))] == list(starmap(Request, workload.tuples()))
    assert source.peek_s() is None
    with pytest.raises(IndexError):
        source.pop(Request)


def test_the_table_of_a_trace_holds_what_was_issued() -> None:
    source = TraceSource(plain(5))
    assert len(source.table()) == 0
    issued = [source.pop(Request) for _ in range(3)]
    assert list(starmap(Request, source.table().tuples())) == issued
    assert TraceSource(plain(0)).peek_s() is None


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 8), st.integers(0, 30), st.sampled_from([0.0, 0.5, 2.0]), st.integers(0, 999))
def test_a_closed_loop_keeps_its_clients_busy(concurrency: int, num: int, think_s: float, seed: int) -> None:
    random = Random(seed)
    workload = plain(num, deadline_s=np.arange(num) * 0.5 + 4)
    source = ClosedLoop(workload, concurrency, think_s)
    outcomes = [Outcome.FINISHED, Outcome.CANCELLED, Outcome.REJECTED]
    seen = drive(source, lambda r: (random.choice([0.0, 1.0, random.random()]), random.choice(outcomes)))
    assert [r.prompt_tokens for r, _, _ in seen] == workload.prompt_tokens.tolist()
    assert [r.arrival_s for r, _, _ in seen[:concurrency]] == [0.0] * min(concurrency, num)
    ends = sorted(end_s + think_s for _, end_s, _ in seen)
    # The k-th end brings the request k + concurrency.
    assert [r.arrival_s for r, _, _ in seen[concurrency:]] == ends[: max(num - concurrency, 0)]
    assert all(r.deadline_s is not None and abs(r.deadline_s - r.arrival_s - 4) < 1e-9 for r, _, _ in seen)
    assert list(starmap(Request, source.table().validate().tuples())) == [r for r, _, _ in seen]


def test_closed_loop_needs_at_least_one_client() -> None:
    with pytest.raises(HeadwayError, match="concurrency: 0"):
        ClosedLoop(plain(1), 0)
    with pytest.raises(HeadwayError, match="think_s"):
        ClosedLoop(plain(1), 1, float("nan"))


def two_sessions() -> SessionTurns:
    """A session of three turns under a system prompt of 100 tokens, and one of two turns without one."""
    rows = Workload(
        {
            "arrival_s": np.array([0.0, 0.0, 0.0, 5.0, 5.0]),
            "prompt_tokens": np.array([10, 20, 30, 40, 50]),
            "output_tokens": np.array([1, 2, 3, 4, 5]),
            "timeout_s": np.array([9.0] * 5),
            "deadline_s": np.array([7.0, 7.0, 7.0, 12.0, 12.0]),
        }
    )
    think_s = np.array([99.0, 10.0, 20.0, 99.0, 1.0])
    return SessionTurns(rows, np.array([0, 3, 5]), think_s, np.array([1, -1]), np.array([7, 100]))


def test_prompt_of_a_turn_contains_the_conversation() -> None:
    source = Sessions(two_sessions())
    assert source.num_requests == 5
    seen = [r for r, _, _ in drive(source, after(2))]
    assert [(r.arrival_s, r.session_id, r.prompt_tokens) for r in seen] == [
        (0.0, 0, 110),
        (5.0, 1, 40),
        (8.0, 1, 94),
        (12.0, 0, 131),
        (34.0, 0, 163),
    ]
    assert seen[4].prefix == (
        Segment(1, 100),
        Segment(2, 10),
        Segment(3, 1),
        Segment(4, 20),
        Segment(5, 2),
        Segment(6, 30),
    )
    assert [r.output_id for r in seen] == [3, 9, 11, 5, 7]
    assert all(r.timeout_s == 9 and r.deadline_s == r.arrival_s + 7 for r in seen)
    assert list(starmap(Request, source.table().validate().tuples())) == seen


@pytest.mark.parametrize("outcome", [Outcome.CANCELLED, Outcome.REJECTED])
def test_a_session_stops_at_a_turn_that_did_not_finish(outcome: Outcome) -> None:
    source = Sessions(two_sessions())
    seen = drive(source, lambda r: (2.0, outcome if r.prompt_tokens == 110 else Outcome.FINISHED))
    assert [r.session_id for r, _, _ in seen] == [0, 1, 1]
    assert source.num_requests == 3


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 8), st.booleans())
def test_sessions_chain_and_the_table_agrees(seed: int, num: int, grouped: bool) -> None:
    random = np.random.default_rng(seed)
    counts = random.integers(1, 6, num)
    offsets = np.concatenate(([0], np.cumsum(counts))).astype("i8")
    rows = Workload(
        {
            "arrival_s": np.repeat(random.integers(0, 4, num) * 1.0, counts),
            "prompt_tokens": random.integers(1, 9, offsets[-1]),
            "output_tokens": random.integers(1, 9, offsets[-1]),
        }
    )
    think_s = random.integers(0, 3, offsets[-1]) * 1.0
    group = random.integers(-1, 3, num) if grouped else None
    turns = SessionTurns(rows, offsets, think_s, group, np.array([5, 6, 7]) if grouped else None)
    source = Sessions(turns)
    lucky = Random(seed)
    seen = drive(
        source,
        lambda r: (lucky.choice([0.0, 1.0]), lucky.choice([*[Outcome.FINISHED] * 9, Outcome.CANCELLED])),
    )
    assert source.num_requests == len(seen)
    table = source.table().validate()
    assert list(starmap(Request, table.tuples())) == [r for r, _, _ in seen]
    last: dict[int, Request] = {}
    for request, _, _ in seen:
        assert sum(s.tokens for s in request.prefix) == request.prompt_tokens
        before = last.get(request.session_id or 0)
        if before is not None:
            assert before.output_id is not None
            prefix = (*before.prefix, Segment(before.output_id, before.output_tokens))
            assert request.prefix[: len(prefix)] == prefix and len(request.prefix) == len(prefix) + 1
        last[request.session_id or 0] = request
    own = [s.id for r in last.values() for s in r.prefix if s.id >= turns.num_groups()]
    assert len(own) == len(set(own))
    flat = flattened(turns).validate()
    assert len(flat) == len(rows)


def test_inconsistent_turns_are_errors() -> None:
    rows = plain(3)
    for offsets, think_s in (
        ([0, 2], [0, 0, 0]),
        ([0, 0, 3], [0, 0, 0]),
        ([0, 3], [0, 0]),
        ([0, 3], [0, -1, 0]),
    ):
        with pytest.raises(HeadwayError, match="sessions: "):
            SessionTurns(rows, np.array(offsets), np.array(think_s, "f8"))
