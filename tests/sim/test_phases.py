"""Phases of reasoning requests in simulation, and the PASCAL paper's own timeline."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headway.core.record import MoveOutcome, Records
from headway.core.request import Request
from headway.policies.migration.pascal import PascalMigration
from headway.policies.ordering.fcfs import FcfsOrdering
from headway.policies.ordering.phases import PascalOrdering
from headway.policies.ordering.time_sharing import RoundRobinOrdering
from headway.policies.routing.kv import PascalRouter
from simulation import Made, Scenario, by_request, play, pool, request, seconds


@pytest.fixture(params=["stretch", "exact"])
def step(request: pytest.FixtureRequest) -> Any:
    return request.param


THREE = [request(0, 0.0, 1, 8), request(1, 1.0, 1, 8), request(2, 2.0, 1, 8)]


def timeline(step: Any, ordering: Any, seats: int) -> Records:
    """Figure 2: A, B and C arrive at 0, 1 and 2, a token takes one unit of time, and so many run at once."""
    engine = {"max_num_seqs": seats, "preemption": "swap", "host_memory_bytes": 1e9}
    return play(THREE, pool(**engine), step=step, ordering=ordering, line=seconds(1.0))


@pytest.mark.parametrize(
    ("ordering", "seats", "ttft"),
    [(FcfsOrdering, 3, 1.0), (FcfsOrdering, 2, 7.0), (Made(RoundRobinOrdering, (4,)), 2, 3.0)],
)
def test_the_third_request_of_figure_2_waits_as_the_paper_says(
    step: Any, ordering: Any, seats: int, ttft: float
) -> None:
    done = by_request(timeline(step, ordering, seats).requests)
    # A copy to or from host memory takes some microseconds.
    assert done["first_token_s"][2] - 2.0 == pytest.approx(ttft, abs=1e-2)


def test_turns_of_figure_2_are_taken_as_the_paper_draws_them(step: Any) -> None:
    records = timeline(step, Made(RoundRobinOrdering, (4,)), 2)
    segments = records.segments
    stays = [
        (r, round(a), round(e))
        for r, a, e in zip(*(segments[n] for n in ("request", "admitted_s", "end_s")), strict=True)
    ]
    # A is out from 4 to 5, B from 5 to 8, C from 8 on until A is done.
    assert sorted(stays)[:4] == [(0, 0, 4), (0, 5, 9), (1, 1, 5), (1, 8, 12)]
    assert sorted(stays)[4] == (2, 4, 8)


def pascal(requests: list[Request], step: Any = "stretch", **given: Any) -> Records:
    """Two replicas under PASCAL's three policies."""
    engine = {"preemption": "swap", "host_memory_bytes": 1e9, "kv_capacity_tokens": 2000, "replicas": 2}
    return Scenario(
        tuple(requests),
        (pool(**engine),),
        router=PascalRouter,
        ordering=PascalOrdering,
        migration=PascalMigration,
        **given,
    ).play(step)


@pytest.mark.parametrize(
    ("output", "reasoning"),
    [(5, 0), (5, 5), (1, 1), (1, 0), (6, 1)],
    ids=["none", "no answer", "one", "plain", "short"],
)
def test_odd_phases_end_well(step: Any, output: int, reasoning: int) -> None:
    """No reasoning at all, a marker that never comes, an answer that is empty."""
    requests = [request(i, 0.01 * i, 20, output, reasoning_tokens=reasoning) for i in range(12)]
    done = by_request(pascal(requests, step).requests)
    assert (done["generated_tokens"] == output).all()
    assert np.isnan(done["answer_s"]).all() == (reasoning >= output)
    assert np.isnan(done["reasoning_end_s"]).all() == (reasoning == 0 or reasoning >= output)


def test_an_answer_moves_to_where_fewer_reason_and_only_its_start_is_held_up(step: Any) -> None:
    """Replica 0 has a crowd that reasons for long; who begins to answer there goes to the idle replica 1."""
    crowd = [request(i, 0.0, 50, 400, reasoning_tokens=390) for i in range(8)]
    records = pascal([*crowd, request(8, 0.0, 50, 60, reasoning_tokens=20)], step)
    moves = records.moves
    mine = moves["request"] == 8
    assert mine.any() and (moves["outcome"][mine] == MoveOutcome.DONE).all()
    done = by_request(records.requests)
    arrived_s = moves["end_s"][mine][0]
    assert done["reasoning_end_s"][8] <= moves["start_s"][mine][0] <= arrived_s <= done["answer_s"][8]
    assert done["moves"][8] == 1
    assert (done["generated_tokens"][:8] == 400).all()
