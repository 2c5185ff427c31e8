"""Phases of reasoning requests in simulation, and the PASCAL paper's own timeline."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from headway.core.record import MoveOutcome, Records
from headway.core.request import Request
from headway.policies.migration.pascal import PascalMigration
from headway.policies.ordering.fcfs import FcfsOrdering
from headway.policies.ordering.phases import PascalOrdering
from headway.policies.ordering.time_sharing import FewestQuantaOrdering, RoundRobinOrdering
from headway.policies.routing.kv import PascalRouter
from simulation import Made, Scenario, by_request, play, pool, request, seconds


@pytest.fixture(params=["stretch", "exact"])
def step(request: pytest.FixtureRequest) -> Any:
    return request.param


QUANTUM = 20
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


class Stays:
    """When each request had how many tokens, where a token takes a second. Made of the records of one replica."""

    def __init__(self, requests: list[Request], records: Records) -> None:
        self.requests = requests
        self.of: dict[int, list[tuple[float, float, int, int]]] = {}
        segments = records.segments
        for row in np.argsort(segments["admitted_s"], kind="stable"):
            mine = self.of.setdefault(int(segments["request"][row]), [])
            before = mine[-1][3] if mine else 0
            gained = int(segments["left_tick"][row] - segments["joined_tick"][row])
            gained += int(not np.isnan(segments["prefill_end_s"][row]))
            mine.append((float(segments["admitted_s"][row]), float(segments["end_s"][row]), before, before + gained))

    def level(self, id: int, tokens: int, by_phase: bool) -> tuple[int, int]:
        """Phase and quanta used."""
        thought = self.requests[id].reasoning_tokens if by_phase else 0
        return (0, tokens // QUANTUM) if tokens < thought or not by_phase else (1, (tokens - thought) // QUANTUM)

    def since_s(self, id: int, tokens: int, by_phase: bool) -> float:
        """When it came to the level that it has with so many tokens."""
        level, first = self.level(id, tokens, by_phase), tokens
        while first and self.level(id, first - 1, by_phase) == level:
            first -= 1
        stays = [stay for stay in self.of[id] if stay[2] < first <= stay[3]]
        return stays[0][0] + first - stays[0][2] if stays else self.requests[id].arrival_s


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "ordering", [Made(PascalOrdering, (QUANTUM, 10_000, True)), Made(FewestQuantaOrdering, (QUANTUM,))]
)
def test_who_came_to_a_level_last_makes_way_first(step: Any, ordering: Any, seed: int) -> None:
    """Nobody is put out while a request runs on that has used as many quanta of its phase for less long."""
    random = np.random.default_rng(seed)
    arrivals, thoughts, answers = random.uniform(0, 200, 24), random.integers(1, 60, 24), random.integers(30, 90, 24)
    requests = [
        request(i, float(t), 1, int(r + a), reasoning_tokens=int(r))
        for i, (t, r, a) in enumerate(zip(np.sort(arrivals), thoughts, answers, strict=True))
    ]
    engine = {"max_num_seqs": 4, "preemption": "swap", "host_memory_bytes": 1e9}
    stays = Stays(requests, play(requests, pool(**engine), step=step, ordering=ordering, line=seconds(1.0)))
    by_phase, num_compared = ordering.policy is PascalOrdering, 0
    for id, mine in stays.of.items():
        for (_, now, _, tokens), _ in pairwise(mine):
            level, since_s = stays.level(id, tokens, by_phase), stays.since_s(id, tokens, by_phase)
            for other, theirs in stays.of.items():
                for begun, ended, before, _ in theirs:
                    if other != id and begun < now - 0.5 and ended > now + 0.5:
                        had = before + round(now - begun)
                        peer, peer_since_s = stays.level(other, had, by_phase), stays.since_s(other, had, by_phase)
                        assert (*peer, peer_since_s) < (*level, since_s + 1.5), (id, other, now)
                        num_compared += peer == level
    assert num_compared


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
