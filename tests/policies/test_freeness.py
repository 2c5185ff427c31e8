"""Freeness, headroom, and the router and the scaler that go by them, against the paper's numbers and by hand."""

from __future__ import annotations

import pickle
from dataclasses import replace
from itertools import pairwise
from math import exp, inf, isinf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from fakes import FakeFleet, FakePool, FakePools, FakeReplica, FakeRequest
from headway.core.errors import HeadwayError
from headway.core.record import Ended, Outcome
from headway.policies.freeness import (
    AdaptiveHeadroom,
    Headroom,
    free_share,
    freeness,
    full_freeness,
    violated_slo,
)
from headway.policies.routing.freest import FreestRouter
from headway.policies.scaling.freeness import FreenessScaler

REQUEST = FakeRequest()

blocks = st.integers(0, 5000)
replicas = st.builds(
    FakeReplica,
    kv_blocks_used=blocks,
    kv_blocks_total=st.integers(1, 5000),
    head_demand_blocks=blocks,
    num_running=st.integers(0, 300),
    num_in_flight=st.integers(0, 3),
    num_by_tier=st.dictionaries(st.integers(0, 12), st.integers(0, 3), max_size=5),
    is_draining=st.booleans(),
)


# Headroom.


def test_the_paper_s_four_tiers_take_31_percent_of_the_cache() -> None:
    shares = Headroom(num_tiers=4, h_max=0.2, decay=1.0).shares
    assert shares[0] == 0.2
    assert [shares[i + 1] / shares[i] for i in range(3)] == pytest.approx([0.37] * 3, abs=0.003)
    assert sum(shares) == pytest.approx(0.311, abs=0.0005)  # Fig. 3


@pytest.mark.parametrize("num_tiers", range(2, 11))
def test_auto_decay_leaves_the_last_tier_a_hundredth(num_tiers: int) -> None:
    shares = Headroom(num_tiers, decay="auto").shares
    assert shares[-1] == pytest.approx(0.2 / 100)
    assert all(a > b for a, b in pairwise(shares))


def test_a_budget_is_charged_once_for_each_tier_that_is_present() -> None:
    headroom = Headroom(num_tiers=3)
    assert headroom.share([]) == 0
    assert headroom.share([0]) == headroom.share([0, 0, 0]) == 0.2
    assert headroom.share([0, 2]) == pytest.approx(0.2 + 0.2 * exp(-2))
    assert headroom.share([2, 3, 9]) == pytest.approx(0.2 * exp(-2))  # later tiers are as the last


def test_binary_headroom_is_for_tier_0_alone() -> None:
    headroom = Headroom(num_tiers=4, kind="binary")
    assert (headroom.share([0]), headroom.share([1, 2, 3, 9]), headroom.share([0, 1])) == (0.2, 0, 0.2)


def test_no_headroom_where_there_is_nobody_to_keep_away() -> None:
    for headroom in (Headroom(kind="none"), Headroom(num_tiers=1), Headroom(num_tiers=1, decay="auto")):
        assert headroom.share(range(10)) == 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [({"num_tiers": 0}, "num_tiers"), ({"h_max": 1.5}, "h_max"), ({"h_max": -0.1}, "h_max"), ({"decay": -1}, "decay")],
)
def test_headroom_refuses_what_makes_no_sense(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(HeadwayError, match=named):
        Headroom(**arguments)


# Adaptive headroom.


def ended(tier: int = 0, ttft_s: float = 1.0, outcome: Outcome = Outcome.FINISHED, **others: Any) -> Ended:
    first_s = ttft_s if outcome is Outcome.FINISHED else None
    return Ended(0, outcome, "", tier, 0, 0.0, first_s, ttft_s + 10.0, 10, 101, **{"slo_ttft_s": 2.0, **others})


@pytest.mark.parametrize(
    ("record", "violated"),
    [
        (ended(), False),
        (ended(ttft_s=2.0), False),
        (ended(ttft_s=2.1), True),
        (ended(slo_tpot_s=0.1), False),
        (ended(slo_tpot_s=0.09), True),
        (ended(slo_tpot_s=10 / 49.5, num_sequences=2), False),
        (ended(slo_tpot_s=0.2, num_sequences=2), True),
        (ended(slo_e2e_s=10.9), True),
        (ended(slo_ttft_s=None, slo_e2e_s=11.0), False),
        (ended(slo_ttft_s=None), None),
        (ended(outcome=Outcome.REJECTED), True),
        (ended(outcome=Outcome.CANCELLED), True),
        (ended(outcome=Outcome.UNFINISHED), None),
    ],
)
def test_whether_an_slo_was_missed(record: Ended, violated: bool | None) -> None:
    assert violated_slo(record) is violated


@pytest.mark.parametrize(
    ("slos", "violated"), [({}, None), ({"slo_e2e_s": 10.0}, True), ({"slo_e2e_s": 12.0, "slo_ttft_s": 0.1}, False)]
)
def test_of_an_answer_that_is_not_streamed_the_duration_is_judged(
    slos: dict[str, float], violated: bool | None
) -> None:
    assert violated_slo(structs.replace(ended(**slos), first_token_s=None)) is violated


def test_one_token_has_no_tpot_to_miss() -> None:
    record = Ended(0, Outcome.FINISHED, "", 0, 0, 0.0, 1.0, 1.0, 10, 1, slo_tpot_s=0.001)
    assert violated_slo(record) is False


def test_adaptive_headroom_starts_where_the_static_one_stays() -> None:
    adaptive, static = AdaptiveHeadroom(), Headroom()
    assert adaptive.shares == static.shares
    static.learn(ended(ttft_s=9.0))
    assert adaptive.shares == static.shares
    adaptive.learn(ended(slo_ttft_s=None))
    assert adaptive.shares == static.shares


def test_a_tier_that_misses_its_slos_gets_more_and_then_less_again() -> None:
    headroom = AdaptiveHeadroom()
    start = headroom.shares
    headroom.learn(ended(1, ttft_s=9.0))
    assert headroom.shares[1] == pytest.approx(start[1] * exp(0.05 * 0.95))
    assert headroom.shares[:1] + headroom.shares[2:] == start[:1] + start[2:]
    for _ in range(19):  # 1 in 20 is the target
        headroom.learn(ended(1))
    assert headroom.shares == pytest.approx(start)


def test_adaptive_budgets_have_bounds_and_keep_their_order() -> None:
    headroom = AdaptiveHeadroom()
    start = headroom.shares
    for _ in range(100):
        headroom.learn(ended(0, ttft_s=9.0))
    assert headroom.shares[0] == pytest.approx(0.4)
    for _ in range(1000):
        headroom.learn(ended(0))
    assert headroom.shares[0] == pytest.approx(0.05)
    assert headroom.shares[1] == headroom.shares[0] < start[1]  # no more than the tier above
    for _ in range(100):
        headroom.learn(ended(7, ttft_s=9.0))
    assert headroom.shares[3] == pytest.approx(2 * start[3])  # tier 7 is as the last


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=200))
def test_adaptive_budgets_never_grow_down_the_tiers(story: list[tuple[int, bool]]) -> None:
    headroom = AdaptiveHeadroom()
    for tier, late in story:
        headroom.learn(ended(tier, ttft_s=9.0 if late else 1.0))
    assert all(a >= b > 0 for a, b in zip(headroom.shares, headroom.shares[1:], strict=False))
    assert pickle.loads(pickle.dumps(headroom)).shares == headroom.shares


# Freeness.


def test_freeness_by_hand() -> None:
    replica = FakeReplica(
        kv_blocks_total=1000, kv_blocks_used=300, head_demand_blocks=50, num_running=10, num_by_tier={0: 4, 3: 7, 1: 0}
    )
    assert freeness(replica) == 65.0
    assert full_freeness(replica, Headroom()) == pytest.approx((650 - 200 - 200 * exp(-3)) / 10)
    assert full_freeness(replica, Headroom(kind="binary")) == 45.0
    assert free_share(replica) == 0.65
    replica.num_running = 0
    assert freeness(replica) == 650.0  # B counts as 1
    replica.is_draining = True
    assert freeness(replica) == full_freeness(replica, Headroom()) == -inf


@given(replica=replicas, more=st.integers(1, 100))
def test_freeness_falls_as_a_replica_fills(replica: FakeReplica, more: int) -> None:
    headroom = Headroom()
    here = full_freeness(replica, headroom)
    used = replace(replica, kv_blocks_used=replica.kv_blocks_used + more)
    wanted = replace(replica, head_demand_blocks=replica.head_demand_blocks + more)
    tiered = replace(replica, num_by_tier={**replica.num_by_tier, 1: 1})
    if isinf(here):
        assert full_freeness(used, headroom) == full_freeness(tiered, headroom) == -inf
    else:
        assert full_freeness(used, headroom) == full_freeness(wanted, headroom) < here
        assert full_freeness(tiered, headroom) <= here <= freeness(replica)
        assert free_share(used) < free_share(replica) <= 1


# freest


def chosen(router: FreestRouter, *offered: FakeReplica) -> int:
    return router.route(REQUEST, FakeFleet(offered)).replica


@given(offered=st.lists(replicas, min_size=1, max_size=6), kind=st.sampled_from(("exponential", "binary", "none")))
def test_freest_is_the_freest_that_does_not_drain(offered: list[FakeReplica], kind: Any) -> None:
    for id, replica in enumerate(offered):
        replica.id = id
    staying = [replica for replica in offered if not replica.is_draining]
    got = chosen(FreestRouter(headroom=kind), *offered)
    if staying:
        headroom = Headroom(kind=kind)
        assert got == min(staying, key=lambda r: (-full_freeness(r, headroom), r.num_in_flight, r.id)).id
    else:
        loads = [max(r.num_in_flight, r.num_waiting + r.num_running) for r in offered]
        assert got == loads.index(min(loads))


def test_an_urgent_request_keeps_others_away() -> None:
    urgent = FakeReplica(0, kv_blocks_used=300, num_running=1, num_by_tier={0: 1})
    late = FakeReplica(1, kv_blocks_used=400, num_running=1, num_by_tier={3: 1})
    assert chosen(FreestRouter(), urgent, late) == 1
    assert chosen(FreestRouter(headroom="binary"), urgent, late) == 1
    assert chosen(FreestRouter(headroom="none"), urgent, late) == 0
    assert chosen(FreestRouter(h_max=0.05), urgent, late) == 0


def test_adaptive_headroom_moves_the_choice() -> None:
    urgent = FakeReplica(0, kv_blocks_used=300, num_running=1, num_by_tier={0: 1})
    late = FakeReplica(1, kv_blocks_used=600, num_running=1, num_by_tier={3: 1})
    routers = FreestRouter(adaptive=True), FreestRouter()
    assert [chosen(router, urgent, late) for router in routers] == [0, 0]
    for _ in range(50):
        for router in routers:
            router.learn(ended(0, ttft_s=9.0))
    assert [chosen(router, urgent, late) for router in routers] == [1, 0]


# The scaler.


def pool(*states: FakeReplica, **others: Any) -> FakePool:
    return FakePool(replicas=states, **{"min_replicas": 1, "max_replicas": 10, **others})


def full(is_draining: bool = False) -> FakeReplica:
    """Its first in line lacks 60 blocks; 100 run: freeness -0.6."""
    return FakeReplica(
        kv_blocks_used=1000, kv_blocks_total=1000, head_demand_blocks=60, num_running=100, is_draining=is_draining
    )


def at(left: int, is_draining: bool = False) -> FakeReplica:
    """So many blocks left for 100 requests."""
    return replace(full(is_draining), kv_blocks_used=1000 - left, head_demand_blocks=0)


def scaled(scaler: FreenessScaler, one: FakePool, now: float = 0.0) -> int | None:
    return scaler.scale(FakePools([one], now)).get("main")


@pytest.mark.parametrize(
    ("one", "wanted"),
    [
        (pool(full(), full()), 3),
        (pool(at(151), at(150)), 1),
        (pool(at(150), at(150)), None),  # 1.5 is not above 1.5
        (pool(at(0), at(0)), None),
        (pool(full(), at(20)), None),  # the mean is -0.2
        (pool(full(), full(), num_starting=1), None),
        (pool(full(), full(), max_replicas=2), None),
        (pool(at(900), at(900), min_replicas=2), None),
        (pool(at(900), min_replicas=0), None),  # never down to none
        (pool(at(900), at(900), at(900, True)), None),  # one goes already
        (pool(full(), at(900, True)), 2),  # who drains does not count
        (pool(min_replicas=2), 2),
        (pool(min_replicas=0), 1),
        (pool(at(900, True), min_replicas=0), 1),
        (pool(min_replicas=0, max_replicas=0), None),
    ],
)
def test_a_pool_s_next_step(one: FakePool, wanted: int | None) -> None:
    assert scaled(FreenessScaler(), one) == wanted


def test_headroom_asks_for_no_replicas() -> None:
    urgent = replace(at(160), num_by_tier={0: 50, 1: 50})
    assert scaled(FreenessScaler(), pool(urgent, urgent)) == 1


def test_pools_step_one_by_one_and_each_on_its_own() -> None:
    scaler = FreenessScaler(cooldown_s=10.0)
    east, west = pool(full(), name="east"), pool(at(900), at(900), name="west")
    assert scaler.scale(FakePools([east], 0.0)) == {"east": 2}
    assert scaler.scale(FakePools([east, west], 9.9)) == {"west": 1}
    assert scaler.scale(FakePools([east, west], 10.0)) == {"east": 2}


def test_what_normalised_thresholds_mean() -> None:
    literal, normalised = FreenessScaler(), FreenessScaler(normalised=True)
    assert scaled(literal, pool(at(200), at(200))) == 1  # 80% used, and one less is wanted
    assert scaled(normalised, pool(at(200), at(200))) is None
    assert scaled(normalised, pool(at(601), at(601))) == 1
    assert scaled(normalised, pool(at(99), at(99)), 10.0) == 3
    assert scaled(FreenessScaler(normalised=True, in_above=0.1, out_below=0.05), pool(at(200), at(200))) == 1


def test_one_replica_less_never_asks_for_one_more() -> None:
    for num in range(2, 10):
        used = 400  # of 1000, the most at which one goes
        after = 1000 - used * num // (num - 1)
        assert scaled(FreenessScaler(normalised=True), pool(*[at(after)] * (num - 1))) is None


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"out_below": 2.0}, "out_below"),
        ({"interval_s": 0}, "interval_s"),
        ({"cooldown_s": -1}, "cooldown_s"),
        ({"normalised": True, "in_above": 0.1}, "out_below"),
    ],
)
def test_the_scaler_refuses_what_makes_no_sense(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(HeadwayError, match=named):
        FreenessScaler(**arguments)


def test_freeness_of_a_share() -> None:
    assert freeness(FakeReplica(kv_blocks_used=100, num_running=2), 0.3) == 300.0
