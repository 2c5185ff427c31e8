"""Agent programs: their graphs, when their calls arrive, and what their prompts share."""

from __future__ import annotations

import numpy as np
import pytest

from headway.core.errors import HeadwayError
from headway.core.record import Outcome
from headway.core.request import Request, Segment
from headway.workload.generate import build, generate
from headway.workload.programs import ProgramCalls, Programs
from headway.workload.spec import AgentsSpec, PrefixGroups, WorkloadSpec
from headway.workload.table import Workload


def fork() -> ProgramCalls:
    """A step, two calls beside each other that go on from it, a step after both; and a program of one call."""
    rows = Workload(
        {
            "arrival_s": np.array([0.0, 0.0, 0.0, 0.0, 5.0]),
            "prompt_tokens": np.array([100, 10, 20, 30, 7]),
            "output_tokens": np.array([5, 6, 7, 8, 9]),
        }
    )
    return ProgramCalls(
        rows,
        np.array([0, 4, 5]),
        np.array([-1, 0, 0, 0, -1]),
        [(), (0,), (0,), (1, 2), ()],
        np.array([0.0, 1.0, 2.0, 3.0, 0.0]),
        np.array([0, -1], "i4"),
        np.array([50], "i4"),
    )


def ended(source: Programs, request: Request, now_s: float, outcome: Outcome = Outcome.FINISHED) -> None:
    source.ended(request, now_s, outcome)


def test_a_call_arrives_when_all_that_it_depends_on_have_ended() -> None:
    source = Programs(fork())
    first = source.pop(Request)
    assert (first.arrival_s, first.prompt_tokens, first.session_id) == (0.0, 150, 0)
    assert source.peek_s() == 5.0
    ended(source, first, 1.0)
    left, right = source.pop(Request), source.pop(Request)
    assert [(one.arrival_s, one.prompt_tokens) for one in (left, right)] == [(2.0, 165), (3.0, 175)]
    ended(source, right, 4.0)
    single = source.pop(Request)
    assert (single.prompt_tokens, single.prefix, single.session_id) == (7, (Segment(9, 7),), 1)
    ended(source, left, 10.0)
    last = source.pop(Request)
    assert (last.arrival_s, last.prompt_tokens) == (13.0, 185)
    assert last.prefix == (Segment(0, 50), Segment(1, 100), Segment(2, 5), Segment(7, 30))
    assert left.prefix == (*last.prefix[:3], Segment(3, 10))
    assert (first.output_id, left.output_id, last.output_id) == (2, None, None)
    assert source.peek_s() is None
    table = source.table()
    assert table.arrival_s.tolist() == [0.0, 2.0, 3.0, 5.0, 13.0]
    assert [request.prefix for request in map(lambda row: Request(*row), table.tuples())] == [
        one.prefix for one in (first, left, right, single, last)
    ]


def test_what_depends_on_a_failed_call_does_not_come() -> None:
    source = Programs(fork())
    first = source.pop(Request)
    ended(source, first, 1.0)
    left, right = source.pop(Request), source.pop(Request)
    ended(source, left, 3.0, Outcome.REJECTED)
    ended(source, right, 4.0)
    assert source.num_requests == 4
    assert source.pop(Request).session_id == 1
    assert source.peek_s() is None


def test_a_call_that_depends_on_a_later_one_is_an_error() -> None:
    plan = fork()
    with pytest.raises(HeadwayError, match="call 1 depends on one that is not before it"):
        ProgramCalls(plan.rows, plan.offsets, plan.context, [(), (2,), (0,), (1, 2), ()], plan.delay_s)


SPEC = WorkloadSpec(
    arrivals=1.0,
    num_requests=500,
    prompt_tokens=100,
    output_tokens=20,
    slo=None,
    prefixes=PrefixGroups(num_groups=2, prefix_tokens=1000),
    agents=AgentsSpec(steps=6, tool_s=2.0, tool_cv=0, fan_out_share=0.5, fan_out=3, sub_steps=2),
)


@pytest.mark.parametrize("sub_context", ["parent", "opening"])
def test_generated_programs_grow_and_share_their_openings(sub_context: str) -> None:
    from msgspec.structs import replace

    agents = replace(SPEC.agents, sub_context=sub_context)
    source = build(replace(SPEC, agents=agents), 1)
    seen: list[Request] = []
    while source.peek_s() is not None:
        request = source.pop(Request)
        seen.append(request)
        source.ended(request, request.arrival_s + 1.0, Outcome.FINISHED)
    assert len(seen) == 500 == source.num_requests
    assert all(sum(segment.tokens for segment in one.prefix) == one.prompt_tokens for one in seen)
    assert {one.prefix[0].id for one in seen} == {0, 1}
    known: dict[int, tuple[Segment, ...]] = {}
    for one in seen:
        for i, segment in enumerate(one.prefix):
            assert known.setdefault(segment.id, one.prefix[: i + 1]) == one.prefix[: i + 1]
    whole = [one for one in seen if one.session_id == 0]
    num_fans, rest = divmod(len(whole) - 6, 6)
    assert rest == 0 and num_fans >= 1
    # Every step adds 120 tokens, and 60 for each three answers of sub-agents.
    assert max(one.prompt_tokens for one in whole) >= 1000 + 6 * 120 - 20
    shortest = min(len(one.prefix) for one in whole[1:])
    assert shortest == (2 if sub_context == "opening" else 4)


def test_programs_as_a_table_stand_their_tools_apart() -> None:
    table = generate(SPEC, 1)
    assert len(table) == 500 and table.prefix is not None
    first = table.take(table.columns["session_id"] == 0)
    gaps = np.unique(np.diff(first.arrival_s))
    assert set(gaps.round(6).tolist()) <= {0.0, 2.0}


def test_prefixes_of_tenants_are_their_own() -> None:
    spec = WorkloadSpec(
        arrivals=1.0,
        num_requests=2000,
        prompt_tokens=100,
        output_tokens=20,
        tenants={"a": 1.0, "b": 3.0},
        prefixes=PrefixGroups(num_groups=3, prefix_tokens=500, per_tenant=True),
    )
    table = generate(spec, 1)
    assert table.prefix is not None
    assert np.array_equal(table.prefix.ids // 3, table.columns["tenant"].astype("i8"))
    assert len(np.unique(table.prefix.ids)) == 6
