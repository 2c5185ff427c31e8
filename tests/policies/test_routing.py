"""What each router promises, on fleets made by hand."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import FakeFleet, FakeReplica, FakeRequest, finished, fleet, fleets
from headway.core.policy import Router
from headway.core.record import Outcome
from headway.core.request import Segment
from headway.policies import ROUTERS
from headway.policies.routing.affinity import PrefixAffinityRouter, SessionAffinityRouter
from headway.policies.routing.jsq_tokens import JsqTokensOracleRouter, JsqTokensRouter
from headway.policies.routing.kv import LeastKvRouter
from headway.policies.routing.least_loaded import LeastLoadedRouter, PowerOfTwoRouter
from headway.policies.routing.round_robin import RoundRobinRouter

REQUEST = FakeRequest()


def route(router: Router, view: FakeFleet, request: FakeRequest = REQUEST) -> int:
    return router.route(request, view).replica


def of_group(id: int) -> FakeRequest:
    return FakeRequest(prefix=(Segment(id, 100),))


# round-robin


@given(num_replicas=st.integers(1, 12), num_requests=st.integers(0, 60))
def test_round_robin_counts_differ_by_at_most_one(num_replicas: int, num_requests: int) -> None:
    router, view = RoundRobinRouter(), fleet(*[0] * num_replicas)
    counts = Counter({i: 0 for i in range(num_replicas)})
    counts.update(route(router, view) for _ in range(num_requests))
    assert max(counts.values()) - min(counts.values()) <= 1


def test_round_robin_goes_on_where_it_was_when_replicas_come_and_go() -> None:
    router, view = RoundRobinRouter(), fleet(0, 0, 0, 0)
    r0, r1, r2, r3 = view.replicas
    assert [route(router, view) for _ in range(2)] == [0, 1]
    view.replicas = [r0, r2, r3]  # the last one chosen is gone
    assert [route(router, view) for _ in range(2)] == [2, 3]
    view.replicas = [r0, r1, r2, r3]
    assert [route(router, view) for _ in range(5)] == [0, 1, 2, 3, 0]
    view.replicas = [r1, r2, r3]  # one before the cursor is gone
    assert [route(router, view) for _ in range(3)] == [1, 2, 3]


@pytest.mark.ci
@given(st.data())
def test_round_robin_serves_all_that_stay_while_others_flap(data: st.DataObject) -> None:
    router, view = RoundRobinRouter(), fleet(*[0] * 6)
    stable, flapping = view.replicas[:3], view.replicas[3:]
    counts: Counter[int] = Counter()
    for _ in range(60):
        there = [replica for replica in flapping if data.draw(st.booleans())]
        view.replicas = [*stable, *there]
        counts[route(router, view)] += 1
    assert max(counts[i] for i in range(3)) - min(counts[i] for i in range(3)) <= 1


# random and power-of-two


def test_random_is_uniform() -> None:
    router, view = ROUTERS["random"](), fleet(0, 0, 0, 0)
    counts = Counter(route(router, view) for _ in range(8000))
    chi_squared = sum((counts[i] - 2000) ** 2 / 2000 for i in range(4))
    assert chi_squared < 16.3  # 0.1% point, 3 degrees of freedom


class Draws:
    """A random stream that gives these numbers."""

    def __init__(self, *numbers: float) -> None:
        self.random = iter(numbers).__next__


def test_power_of_two_takes_the_less_loaded_of_its_two() -> None:
    view = fleet(5, 3, 9, 1)
    for i in range(4):
        for j in (k for k in range(4) if k != i):
            second = (j if j < i else j - 1) / 3 + 0.01
            view.random = Draws(i / 4 + 0.01, second)  # type: ignore[assignment]
            loads = [replica.num_in_flight for replica in view.replicas]
            assert loads[route(PowerOfTwoRouter(), view)] == min(loads[i], loads[j])


@given(view=fleets, seed=st.integers(0, 1000))
def test_power_of_two_never_takes_the_one_most_loaded(view: FakeFleet, seed: int) -> None:
    view.random = Random(seed)
    loads = [max(r.num_in_flight, r.num_waiting + r.num_running) for r in view.replicas]
    worst = loads.index(max(loads))
    if len(loads) > 1 and loads.count(loads[worst]) == 1:
        assert route(PowerOfTwoRouter(), view) != worst


def test_power_of_two_draws_every_pair_alike() -> None:
    view = fleet(*range(5))
    counts = Counter(route(PowerOfTwoRouter(), view) for _ in range(20_000))
    for i in range(5):  # replica i wins against the 4 - i that are more loaded, of 10 pairs
        assert counts[i] / 20_000 == pytest.approx((4 - i) / 10, abs=0.015)


# by load


@given(view=fleets)
def test_least_loaded_is_the_first_minimum(view: FakeFleet) -> None:
    loads = [max(r.num_in_flight, r.num_waiting + r.num_running) for r in view.replicas]
    assert route(LeastLoadedRouter(), view) == loads.index(min(loads))


def test_least_loaded_counts_what_is_on_its_way() -> None:
    stale = FakeReplica(0, num_in_flight=9, num_waiting=0, num_running=2)
    seen = FakeReplica(1, num_in_flight=1, num_waiting=3, num_running=4)
    assert route(LeastLoadedRouter(), FakeFleet([stale, seen])) == 1


@pytest.mark.ci
@given(view=fleets, lengths=st.lists(st.integers(1, 10_000), max_size=20))
def test_jsq_tokens_is_the_first_minimum(view: FakeFleet, lengths: list[int]) -> None:
    router = JsqTokensRouter(prior_output_tokens=100, prior_num_requests=4)
    for length in lengths:
        router.learn(finished(length))
    mean = (400 + sum(lengths)) / (4 + len(lengths))
    left = [
        r.prefill_tokens_left + max(r.num_in_flight * mean - r.tokens_generated, r.num_in_flight) for r in view.replicas
    ]
    assert left[route(router, view)] == pytest.approx(min(left))


def test_jsq_tokens_learns_what_changes_its_mind() -> None:
    many_short = FakeReplica(0, num_in_flight=5)
    one_prompt = FakeReplica(1, prefill_tokens_left=1000)
    view = FakeFleet([many_short, one_prompt])
    router = JsqTokensRouter(prior_output_tokens=500, prior_num_requests=1)
    assert route(router, view) == 1
    for outcome in (Outcome.CANCELLED, Outcome.REJECTED, Outcome.UNFINISHED):
        for _ in range(50):
            router.learn(finished(1, outcome))
    assert route(router, view) == 1
    for _ in range(50):
        router.learn(finished(20))
    assert route(router, view) == 0


@given(view=fleets)
def test_jsq_tokens_oracle_is_the_first_minimum(view: FakeFleet) -> None:
    left = [r.prefill_tokens_left + r.output_tokens_left for r in view.replicas]
    assert route(JsqTokensOracleRouter(), view) == left.index(min(left))


@given(view=fleets)
def test_least_kv_is_the_minimum(view: FakeFleet) -> None:
    shares = [(r.kv_blocks_used + r.prefill_tokens_left / 16) / r.kv_blocks_total for r in view.replicas]
    assert shares[route(LeastKvRouter(), view)] == pytest.approx(min(shares))


def test_least_kv_compares_shares_and_breaks_ties_by_requests() -> None:
    large = FakeReplica(0, kv_blocks_used=500, kv_blocks_total=10_000)
    small = FakeReplica(1, kv_blocks_used=90, kv_blocks_total=1000)
    assert route(LeastKvRouter(), FakeFleet([large, small])) == 0
    full = [FakeReplica(i, kv_blocks_used=1000, num_in_flight=n) for i, n in enumerate((9, 7, 8))]
    assert route(LeastKvRouter(), FakeFleet(full)) == 1
    full[1].prefill_tokens_left = 64
    assert route(LeastKvRouter(), FakeFleet(full)) == 2


# prefix-affinity


def test_prefix_groups_stick_and_spread() -> None:
    router, view = PrefixAffinityRouter(), fleet(*[0] * 8)
    homes = {group: route(router, view, of_group(group)) for group in range(4000)}
    assert all(route(router, view, of_group(group)) == home for group, home in homes.items())
    counts = Counter(homes.values())
    assert len(counts) == 8
    assert all(count == pytest.approx(500, rel=0.2) for count in counts.values())


def test_prefix_groups_of_a_lost_replica_move_and_no_others() -> None:
    router, view = PrefixAffinityRouter(), fleet(*[0] * 8)
    before = [route(router, view, of_group(group)) for group in range(2000)]
    everyone = view.replicas
    view.replicas = [replica for replica in everyone if replica.id != 3]
    during = [route(router, view, of_group(group)) for group in range(2000)]
    view.replicas = everyone
    after = [route(router, view, of_group(group)) for group in range(2000)]
    assert after == before
    assert {b for b, d in zip(before, during, strict=True) if b != d} == {3}
    orphans = Counter(d for b, d in zip(before, during, strict=True) if b == 3)
    assert len(orphans) == 7 and max(orphans.values()) < 0.3 * sum(orphans.values())


@given(
    groups=st.lists(st.integers(0, 3), min_size=1, max_size=200),
    num_replicas=st.integers(1, 9),
    load_factor=st.floats(1.0, 3.0),
    spare_requests=st.integers(0, 5),
)
def test_prefix_affinity_bounds_the_load(
    groups: list[int], num_replicas: int, load_factor: float, spare_requests: int
) -> None:
    router, view = PrefixAffinityRouter(load_factor, spare_requests), fleet(*[0] * num_replicas)
    for placed, group in enumerate(groups, start=1):
        view.replicas[route(router, view, of_group(group))].num_in_flight += 1
        most = max(replica.num_in_flight for replica in view.replicas)
        assert most <= load_factor * placed / num_replicas + 1 + spare_requests


def test_prefix_affinity_groups_by_leading_segments() -> None:
    view = fleet(*[0] * 16)
    shared = [FakeRequest(prefix=(Segment(1, 50), Segment(i, 50))) for i in range(100, 140)]
    assert len({route(PrefixAffinityRouter(), view, request) for request in shared}) == 1
    assert len({route(PrefixAffinityRouter(num_segments=2), view, request) for request in shared}) > 8
    assert route(PrefixAffinityRouter(num_segments=2), view, of_group(1)) in range(16)


def test_affinities_fall_back_to_the_least_loaded() -> None:
    view = fleet(4, 2, 3)
    assert route(PrefixAffinityRouter(), view) == route(SessionAffinityRouter(), view) == 1


# session-affinity


def test_a_session_stays_until_its_replica_goes() -> None:
    router, view = SessionAffinityRouter(), fleet(4, 2, 3)
    turn = FakeRequest(session_id=7)
    assert route(router, view, turn) == 1
    view.replicas[1].num_in_flight = 99
    assert route(router, view, turn) == 1
    everyone = view.replicas
    view.replicas = [everyone[0], everyone[2]]
    assert route(router, view, turn) == 2
    view.replicas = everyone
    assert route(router, view, turn) == 2


def test_the_session_that_was_silent_longest_is_forgotten_first() -> None:
    router, view = SessionAffinityRouter(max_sessions=2), fleet(0, 0)
    for session, in_flight in ((1, (0, 5)), (2, (5, 0)), (1, (9, 9)), (3, (5, 0))):
        for replica, num in zip(view.replicas, in_flight, strict=True):
            replica.num_in_flight = num
        route(router, view, FakeRequest(session_id=session))
    view.replicas[0].num_in_flight = view.replicas[1].num_in_flight = 9
    view.replicas[1].num_in_flight = 20
    assert route(router, view, FakeRequest(session_id=1)) == 0
    assert route(router, view, FakeRequest(session_id=3)) == 1
    assert route(router, view, FakeRequest(session_id=2)) == 0  # had been on 1
