"""INFaaS's costs and states, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import FakeFleet, FakeReplica, FakeRequest
from headway.core.errors import HeadwayError
from headway.core.record import Ended, Outcome
from headway.policies.routing.infaas import InfaasRouter, State


def took(replica: int, seconds: float, outcome: Outcome = Outcome.FINISHED) -> Ended:
    return Ended(0, outcome, "", 0, replica, 5.0, 5.5, 5.0 + seconds, 10, 20)


def chosen(router: InfaasRouter, *offered: FakeReplica) -> int:
    return router.route(FakeRequest(), FakeFleet(offered)).replica


IDLE, OTHER = FakeReplica(0), FakeReplica(1)


def test_states() -> None:
    router = InfaasRouter(overload_share=0.1, interference_factor=1.5)
    router.learn(took(0, 15.0))
    assert router.state(IDLE, 10.0) is State.ACTIVE  # not over 1.5 times the mean
    assert router.state(IDLE, 9.9) is State.INTERFERED
    assert router.state(OTHER, 1.0) is State.ACTIVE  # nothing known of it
    assert router.state(replace(IDLE, num_waiting=25), 9.9) is State.INTERFERED
    assert router.state(replace(IDLE, num_waiting=26), 9.9) is State.OVERLOADED  # of 256
    assert router.state(replace(IDLE, num_waiting=26, is_draining=True), 9.9) is State.INACTIVE


def test_usual_times_are_ewmas_of_what_finished() -> None:
    router = InfaasRouter(alpha=0.0, gamma=0.0, ewma_weight=0.5)
    router.learn(took(0, 4.0))
    router.learn(took(0, 8.0))  # now 6
    router.learn(took(0, 900.0, Outcome.CANCELLED))
    router.learn(took(1, 5.9))
    assert chosen(router, IDLE, OTHER) == 1
    router.learn(took(1, 6.2))  # now 6.05
    assert chosen(router, IDLE, OTHER) == 0


def test_a_new_replica_is_thought_to_be_as_the_mean() -> None:
    router = InfaasRouter(gamma=0.0)
    router.learn(took(0, 4.0))
    router.learn(took(1, 8.0))
    new = FakeReplica(2)
    assert chosen(router, IDLE, OTHER, new) == 0
    assert chosen(router, OTHER, new) == 1  # 8 s each, and the lower id
    assert chosen(router, OTHER, IDLE, new) == 0
    assert chosen(router, replace(IDLE, num_in_flight=3), OTHER, new) == 2  # 3 + 4, 8 and 6


def test_cost_by_hand() -> None:
    router = InfaasRouter(alpha=2.0, beta=3.0, gamma=10.0)
    router.learn(took(0, 1.0))
    router.learn(took(1, 4.0))  # the mean is 2.5 and 4 > 1.5 * 2.5: interfered, half a penalty
    quick, slow = FakeReplica(0, num_in_flight=9), FakeReplica(1)  # 18 + 3 and 12 + 5
    assert chosen(router, quick, slow) == 1
    quick.num_in_flight = 6  # 12 + 3
    assert chosen(router, quick, slow) == 0
    slow.num_running, quick.num_in_flight = 2, 8  # what others placed there counts: 19 and 21
    assert chosen(router, quick, slow) == 0


def test_who_overflows_or_drains_comes_last() -> None:
    overloaded = FakeReplica(0, num_waiting=30)
    draining = FakeReplica(1, is_draining=True)
    active = FakeReplica(2, num_in_flight=120)
    assert chosen(InfaasRouter(), overloaded, draining, active) == 2
    assert chosen(InfaasRouter(), overloaded, draining) == 0
    assert chosen(InfaasRouter(), draining) == 1


@given(
    loads=st.lists(st.integers(0, 4), min_size=1, max_size=6),
    times=st.lists(st.tuples(st.integers(0, 5), st.floats(0.1, 99)), max_size=9),
)
def test_kv_caches_and_tiers_are_nothing_to_it(loads: list[int], times: list[tuple[int, float]]) -> None:
    router = InfaasRouter()
    for replica, seconds in times:
        router.learn(took(replica, seconds))
    plain = [FakeReplica(i, num_in_flight=n) for i, n in enumerate(loads)]
    filled = [replace(r, kv_blocks_used=1000 - 100 * r.id, num_by_tier={r.id: 1}) for r in plain]
    assert chosen(router, *plain) == chosen(router, *filled)


def test_alike_in_all_they_are_levelled() -> None:
    replicas = [FakeReplica(i) for i in range(3)]
    for _ in range(30):
        replicas[chosen(InfaasRouter(), *replicas)].num_in_flight += 1
    assert [replica.num_in_flight for replica in replicas] == [10, 10, 10]


@pytest.mark.parametrize("name", ["alpha", "beta", "gamma", "ewma_weight", "overload_share", "interference_factor"])
def test_arguments_are_checked(name: str) -> None:
    arguments: dict[str, Any] = {name: -1}
    with pytest.raises(HeadwayError, match=name):
        InfaasRouter(**arguments)
    if name == "ewma_weight":
        with pytest.raises(HeadwayError, match="from 0 to 1"):
            InfaasRouter(ewma_weight=1.1)
