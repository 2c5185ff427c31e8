"""Who is moved where: pairs by freeness, and replicas that drain."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, exp
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import FakeFleet, FakePlaced, FakeReplica
from headway.core.decision import Move
from headway.core.errors import HeadwayError
from headway.core.record import Ended, Outcome
from headway.policies.freeness import Headroom, full_freeness
from headway.policies.migration.llumnix import LlumnixMigration, movable


def running(id: int, blocks: int = 10, tier: int = 0, **others: Any) -> FakePlaced:
    return FakePlaced(id, prompt_tokens=16 * blocks - 6, generated_tokens=6, tier=tier, **others)


def waiting(id: int, blocks: int = 10, tier: int = 0, **others: Any) -> FakePlaced:
    state = {"is_running": False, "is_waiting": True, "has_kv": False}
    return FakePlaced(id, prompt_tokens=16 * blocks, tier=tier, **{**state, **others})


def prefilling(id: int) -> FakePlaced:
    return FakePlaced(id, is_running=False)


def at(id: int, *requests: FakePlaced, total: int = 1000, **others: Any) -> FakeReplica:
    """A replica with these requests; the first that waits, in order of tier, is the head of the line."""
    line = sorted((r for r in requests if r.is_waiting), key=lambda r: (r.tier, r.arrival_s, r.id))
    tiers: dict[int, int] = {}
    for request in requests:
        tiers[request.tier] = tiers.get(request.tier, 0) + 1
    inside = [r for r in requests if not r.is_waiting]
    counts = {"num_in_flight": len(requests), "num_waiting": len(line), "num_running": len(inside)}
    return FakeReplica(
        id,
        kv_blocks_used=sum(size(r) for r in inside),
        kv_blocks_total=total,
        num_by_tier=tiers,
        requests=requests,
        head_demand_blocks=size(line[0]) if line else 0,
        **{**counts, **others},
    )


def size(request: FakePlaced) -> int:
    return ceil((request.prompt_tokens + request.generated_tokens) / 16)


def moves(policy: LlumnixMigration, *replicas: FakeReplica) -> list[Move]:
    return list(policy.moves(FakeFleet(replicas)))


def pairs(*replicas: FakeReplica, **arguments: Any) -> list[tuple[int, int]]:
    """(request, target) of each move, without headroom."""
    policy = LlumnixMigration(**{"headroom": "none", **arguments})
    return [(move.request, move.target) for move in moves(policy, *replicas)]


FULL = (running(1, 300), running(2, 200), running(3, 400))


def test_one_request_goes_from_the_fullest_to_the_freest() -> None:
    # (1000 - 900) / 3 is 33; with 200 of 1000 blocks held by 2 the other is at 400
    assert pairs(at(0, *FULL), at(1, running(8, 100), running(9, 100))) == [(2, 1)]
    assert pairs(at(1, running(8, 100), running(9, 100)), at(0, *FULL)) == [(2, 1)]


def test_lowest_pairs_with_highest_and_so_on() -> None:
    levels = {0: 900, 1: 100, 2: 800, 3: 200, 4: 500}  # blocks used by ten requests each
    sites = [
        at(id, *(running(10 * id + i, used // 10, tier=i) for i in range(10))) for id, used in levels.items()
    ]  # the least urgent of replica 0 is request 9, of replica 2 request 29; replica 4 is in the middle
    assert pairs(*sites) == [(9, 1), (29, 3)]
    assert pairs(*sites, threshold=60.0) == [(9, 1), (29, 3)]  # 80 and 60 blocks per request apart
    assert pairs(*sites, threshold=60.1) == [(9, 1)]
    assert pairs(*sites, threshold=80.1) == []


def test_who_waits_without_kv_goes_first_and_of_them_the_most_urgent() -> None:
    line = [waiting(4, tier=2), waiting(5, tier=1, arrival_s=8.0), waiting(6, tier=1, arrival_s=7.0)]
    assert pairs(at(0, *FULL, *line), at(1)) == [(6, 1)]


def test_then_the_least_urgent_with_the_least_kv() -> None:
    ids = [r.id for r in movable([running(1, 5, 0), running(2, 90, 2), running(3, 80, 2), running(4, 80, 2)])]
    assert ids == [3, 4, 2, 1]
    swapped = waiting(5, 70, 2, has_kv=True)
    ids = [r.id for r in movable([*FULL, swapped, waiting(6, 999), prefilling(7), running(8, is_moving=True)])]
    assert ids == [6, 2, 1, 3, 5]


def test_only_a_request_that_decodes_is_copied_live() -> None:
    (move,) = moves(LlumnixMigration(), at(0, *FULL), at(1))
    assert move == Move(2, 1, stage_blocks=16)
    (move,) = moves(LlumnixMigration(stage_blocks=None), at(0, *FULL), at(1))
    assert move.stage_blocks is None
    (move,) = moves(LlumnixMigration(stage_blocks=4), at(0, *FULL, waiting(9)), at(1))
    assert move == Move(9, 1, stage_blocks=None)


def test_the_destination_must_have_room_and_stay_freer_than_the_source_was() -> None:
    small = at(1, total=250)
    assert pairs(at(0, *FULL), small) == [(2, 1)]  # 50 left, and the source had 33
    small.kv_blocks_total = 230
    assert pairs(at(0, *FULL), small) == []  # 30 left
    # an older request of another size may fit
    assert pairs(at(0, *FULL, running(4, 20)), small) == [(4, 1)]


def test_headroom_at_the_destination_counts() -> None:
    lone = at(1, total=250)
    source = at(0, *FULL)
    assert moves(LlumnixMigration(), source, lone) == []  # a fifth of 250 would be kept for tier 0
    assert [m.request for m in moves(LlumnixMigration(h_max=0.05, headroom="binary"), source, lone)] == [2]


def test_two_alike_leave_each_other_alone() -> None:
    one, other = at(0, running(1), running(2)), at(1, running(3), running(4, 9))
    assert full_freeness(other, Headroom()) - full_freeness(one, Headroom()) >= 0.3
    assert moves(LlumnixMigration(), one, other) == []  # it would only change their roles
    assert pairs(at(0, running(1)), at(1)) == []


def test_one_move_at_a_time() -> None:
    busy = (replace(FULL[0], is_moving=True), *FULL[1:])
    assert pairs(at(0, *busy), at(1)) == []
    assert pairs(at(0, *FULL), at(1, num_arriving=1)) == []


@pytest.mark.parametrize("replicas", [[], [at(0, *FULL)], [at(0), at(1)], [at(0, *FULL, is_draining=True)]])
def test_nothing_to_do(replicas: list[FakeReplica]) -> None:
    assert moves(LlumnixMigration(), *replicas) == []


# Draining.


def test_a_draining_replica_sends_several_away_each_to_the_freest() -> None:
    leaving = at(0, *(running(i, 100) for i in range(6)), waiting(7, 100), is_draining=True)
    # replica 1 goes from 1000 to 900 to 800/2, then replica 2 is the freest with 500, then with 400/2 no more
    targets = at(1), at(2, running(20, 500))
    assert pairs(leaving, *targets) == [(7, 1), (0, 1), (1, 2), (2, 1)]
    assert len(pairs(leaving, *targets, evacuations=99)) == 7
    assert pairs(leaving, *targets, evacuations=1) == [(7, 1)]


def test_evacuees_fit_or_stay() -> None:
    leaving = at(0, running(1, 300), running(2, 200), running(3, 90), is_draining=True)
    assert pairs(leaving, at(1, total=400)) == [(3, 1), (2, 1)]  # 300 + 90 + 200 do not fit
    assert pairs(leaving, at(1, total=90)) == []
    free, roomy = at(1, total=210), at(2, *(running(i, 10) for i in range(20, 69)))
    assert pairs(leaving, free, roomy) == [(3, 1), (2, 2), (1, 2)]  # 510 left among 49, and still 10 at the end


def test_what_drains_receives_nothing_and_asks_no_threshold() -> None:
    assert pairs(at(0, *FULL), at(1, is_draining=True)) == []
    assert pairs(at(0, running(1), is_draining=True), at(1), threshold=1e9) == [(1, 1)]


def test_who_receives_evacuees_is_in_no_pair() -> None:
    leaving = at(0, running(1), is_draining=True)
    full, freest, free = at(1, *(replace(r, id=r.id + 10) for r in FULL)), at(2), at(3, running(30, 50))
    assert pairs(leaving, full, freest, free) == [(1, 2), (12, 3)]


# Whatever the fleet.

requests = st.builds(
    lambda kind, blocks, tier, arrival, is_moving: (kind, blocks, tier, arrival, is_moving),
    st.sampled_from(("running", "waiting", "prefilling", "swapped")),
    st.integers(1, 60),
    st.integers(0, 5),
    st.integers(0, 9),
    st.integers(0, 19).map(lambda n: n == 0),
)


@st.composite
def fleets(draw: st.DrawFn) -> list[FakeReplica]:
    replicas, number = [], 0
    for id in range(draw(st.integers(0, 7))):
        placed = []
        for kind, blocks, tier, arrival_s, is_moving in draw(st.lists(requests, max_size=6)):
            others = {"arrival_s": float(arrival_s), "is_moving": is_moving}
            if kind == "running":
                placed.append(running(number, blocks, tier, **others))
            elif kind == "prefilling":
                placed.append(prefilling(number))
            else:
                placed.append(waiting(number, blocks, tier, has_kv=kind == "swapped", **others))
            number += 1
        draining = draw(st.integers(0, 3)) == 0
        total = draw(st.sampled_from((60, 200, 1000)))
        replicas.append(at(id, *placed, total=total, is_draining=draining, num_arriving=draw(st.integers(0, 1))))
    return replicas


@given(fleet=fleets(), evacuations=st.integers(1, 5))
def test_every_move_keeps_the_promises(fleet: list[FakeReplica], evacuations: int) -> None:
    homes = {request.id: (replica, request) for replica in fleet for request in replica.requests}
    made = moves(LlumnixMigration(evacuations=evacuations), *fleet)
    sent = [(homes[move.request], fleet[move.target]) for move in made]
    assert len({move.request for move in made}) == len(made)
    balanced = [(source.id, target.id) for (source, _), target in sent if not source.is_draining]
    roles = [id for pair in balanced for id in pair]
    assert len(roles) == len(set(roles)), "a replica is in two pairs"
    headroom = Headroom()
    for (source, request), target in sent:
        assert not target.is_draining and target is not source
        assert not request.is_moving and (request.is_running or request.is_waiting)
        assert size(request) < target.kv_blocks_total - target.kv_blocks_used
        if source.is_draining:
            assert sum(home is source for (home, _), _ in sent) <= evacuations
            assert target.id not in roles
        else:
            after = replace(
                target,
                num_running=target.num_running + 1,
                kv_blocks_used=target.kv_blocks_used + size(request),
                num_by_tier={**target.num_by_tier, request.tier: 1},
            )
            assert full_freeness(after, headroom) > max(full_freeness(source, headroom), 0.0)
            assert full_freeness(target, headroom) - full_freeness(source, headroom) >= 0.3


@given(fleet=fleets())
def test_pairs_are_the_first_with_the_last(fleet: list[FakeReplica]) -> None:
    for replica in fleet:
        replica.is_draining = False
    headroom = Headroom()
    order = sorted(fleet, key=lambda r: (full_freeness(r, headroom), -r.num_in_flight, -r.id))
    allowed = [(order[i].id, order[-1 - i].id) for i in range(len(order) // 2)]
    homes = {request.id: replica.id for replica in fleet for request in replica.requests}
    assert {(homes[move.request], move.target) for move in moves(LlumnixMigration(), *fleet)} <= set(allowed)


def test_moving_on_until_nobody_gains() -> None:
    """Left to itself, with each move done at once, it comes to rest, and the least freeness has never fallen."""
    sites = {0: [running(i, 10 + i) for i in range(12)], 1: [], 2: [running(20, 400)]}
    least = []
    for _ in range(100):
        fleet = [at(id, *placed) for id, placed in sites.items()]
        least.append(min(full_freeness(replica, Headroom()) for replica in fleet))
        made = moves(LlumnixMigration(), *fleet)
        if not made:
            break
        for move in made:
            (home,) = (id for id, placed in sites.items() if any(r.id == move.request for r in placed))
            (request,) = (r for r in sites[home] if r.id == move.request)
            sites[home].remove(request)
            sites[move.target].append(request)
    assert not made and least == sorted(least)
    assert 5 <= len(sites[0]) <= 7 and 5 <= len(sites[1]) <= 7


def test_it_has_no_use_for_phases_and_learns_only_when_adaptive() -> None:
    policy, static = LlumnixMigration(adaptive=True), LlumnixMigration()
    assert policy.at_phase(running(1), FakeFleet([at(0)])) is None
    assert policy.interval_s == 0.05
    source, target = at(0, *FULL), at(1, running(9, 340, tier=1))
    assert (1000 - 340 - 200 - 200 - 200 * exp(-1)) / 2 > 0
    assert [m.request for p in (policy, static) for m in moves(p, source, target)] == [2, 2]
    for _ in range(99):
        late = Ended(0, Outcome.FINISHED, "", 0, 0, 0.0, 9.0, 9.0, 1, 2, slo_ttft_s=1.0)
        policy.learn(late), static.learn(late)
    assert moves(policy, source, replace(target, kv_blocks_used=410)) == []
    assert [m.request for m in moves(static, source, target)] == [2]


@pytest.mark.parametrize("name", ["interval_s", "threshold", "stage_blocks", "evacuations", "h_max", "num_tiers"])
def test_arguments_are_checked(name: str) -> None:
    arguments: dict[str, Any] = {name: -1}
    with pytest.raises(HeadwayError, match=name):
        LlumnixMigration(**arguments)
