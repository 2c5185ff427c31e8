"""Routers that ask what each replica has cached, and orderings by attained service."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace as with_values

from fakes import FakeFleet, FakeReplica, FakeRequest, finished
from headway.core.request import Segment
from headway.policies.ordering.attained import LeastAttainedServiceOrdering, VtcOrdering
from headway.policies.routing.dlpm import DlpmRouter
from headway.policies.routing.dualmap import DualMapRouter
from headway.policies.routing.dynamo_cost import DynamoCostRouter
from headway.policies.routing.llm_d_scorers import LlmDScorersRouter
from headway.policies.routing.lmetric import LmetricRouter
from headway.policies.routing.preble import PrebleRouter
from headway.policies.routing.remaining_work import RemainingWorkRouter

PROMPT = FakeRequest(prompt_tokens=1000, prefix=(Segment(1, 512), Segment(2, 488)))


def fleet(*replicas: dict[str, Any], now: float = 0.0) -> FakeFleet:
    """Replicas; `hit` is what each has cached of any request."""
    made = []
    for id, values in enumerate(replicas):
        hit = values.pop("hit", 0)
        made.append(FakeReplica(id=id, combo=id, cached=dict.fromkeys(range(1000), hit), **values))
    return FakeFleet(made, now)


def test_lmetric_multiplies_uncached_tokens_and_requests() -> None:
    route = LmetricRouter().route
    assert route(PROMPT, fleet({"hit": 500}, {"hit": 600})).replica == 1
    # 400 tokens with the 4th request against 1,000 with the first, or with the second.
    assert route(PROMPT, fleet({"hit": 600, "num_in_flight": 3}, {})).replica == 1
    assert route(PROMPT, fleet({"hit": 600, "num_in_flight": 3}, {"num_in_flight": 1})).replica == 0
    waiting = {"prefill_tokens_left": 2000, "expected_cached_tokens": 1900, "num_in_flight": 1}
    assert route(PROMPT, fleet(waiting, {"prefill_tokens_left": 200, "num_in_flight": 1})).replica == 0


def test_dynamo_adds_blocks_to_prefill_and_active_blocks() -> None:
    replicas = {"hit": 800, "kv_blocks_used": 90}, {"kv_blocks_used": 0}
    # 12.5 blocks to prefill, 102.5 active; 62.5 and 62.5.
    assert DynamoCostRouter().route(PROMPT, fleet(*map(dict, replicas))).replica == 0
    assert DynamoCostRouter(overlap_weight=0.1).route(PROMPT, fleet(*map(dict, replicas))).replica == 1


def test_dynamos_temperature_draws_the_worse_replica_at_times() -> None:
    view = fleet({"hit": 800}, {})
    drawn = Counter(DynamoCostRouter(temperature=1.0).route(PROMPT, view).replica for _ in range(2000))
    assert drawn[1] / 2000 == pytest.approx(1 / (1 + 2.718), abs=0.04)
    assert {DynamoCostRouter(temperature=0.01).route(PROMPT, view).replica for _ in range(100)} == {0}


def test_llm_d_weights_prefix_queue_and_kv() -> None:
    route = LlmDScorersRouter().route
    assert route(PROMPT, fleet({"hit": 900, "num_waiting": 4}, {})).replica == 0  # 2.7 + 0 against 0 + 2
    assert route(PROMPT, fleet({"hit": 600, "num_waiting": 4}, {})).replica == 1  # 1.8 against 2
    assert route(PROMPT, fleet({"kv_blocks_used": 500}, {"kv_blocks_used": 400})).replica == 1
    limited = LlmDScorersRouter(max_waiting=3).route
    assert limited(PROMPT, fleet({"hit": 900, "num_waiting": 4}, {})).replica == 1
    assert limited(PROMPT, fleet({"hit": 900, "num_waiting": 4}, {"num_waiting": 5})).replica == 0
    view = fleet({}, {}, {})
    assert {route(PROMPT, view).replica for _ in range(50)} == {0, 1, 2}


def test_preble_exploits_a_long_prefix_until_its_replica_is_far_ahead() -> None:
    router = PrebleRouter()
    chosen = [router.route(replace(PROMPT, id=id), fleet({"hit": 900}, {"hit": 10})).replica for id in range(12)]
    assert chosen[:2] == [0, 0]
    assert 1 in chosen


def test_preble_explores_by_load_if_less_than_half_is_cached() -> None:
    router = PrebleRouter(window_s=60.0)
    assert router.route(PROMPT, fleet({"hit": 400}, {})).replica == 0
    assert router.route(PROMPT, fleet({"hit": 400}, {})).replica == 1  # the first has work
    assert router.route(PROMPT, fleet({"hit": 400}, {}, now=100.0)).replica == 0  # that was long ago


def test_dualmap_meets_at_two_replicas_and_leaves_the_cached_one_for_the_slo() -> None:
    router = DualMapRouter(slo_ttft_s=1.0, prior_tokens_per_s=1000.0)
    ids = set()
    for id in range(200):
        loads = [{"num_in_flight": 1, "prefill_tokens_left": Random(id + 7 * i).randrange(5000)} for i in range(8)]
        ids.add(router.route(replace(PROMPT, id=id), fleet(*loads)).replica)
    assert len(ids) == 2
    first, second = sorted(ids)
    cached = [{"hit": 500 if i == first else 0} for i in range(8)]
    assert router.route(PROMPT, fleet(*map(dict, cached))).replica == first
    cached[first]["prefill_tokens_left"] = 5000
    assert router.route(PROMPT, fleet(*map(dict, cached))).replica == second
    assert router.route(replace(PROMPT, slo_ttft_s=60.0), fleet(*map(dict, cached))).replica == first


def test_dualmap_learns_seconds_a_token() -> None:
    router = DualMapRouter(slo_ttft_s=1.0, prior_tokens_per_s=1e6)
    for id in range(300):
        router.route(replace(PROMPT, id=id), fleet({}))
        router.learn(with_values(finished(1), id=id, first_token_s=4.0))
    assert router._s_per_token == pytest.approx(0.004, rel=0.01)


def test_remaining_work_counts_capacity_and_what_is_cached() -> None:
    route = RemainingWorkRouter().route
    assert route(PROMPT, fleet({}, {"hit": 100})).replica == 1
    assert route(PROMPT, fleet({"hit": 100}, {"kv_blocks_total": 4000})).replica == 1
    profiled = [{"goodput_rps": 2.0}, {"goodput_rps": 1.0, "kv_blocks_total": 4000}]
    assert route(PROMPT, fleet(*profiled)).replica == 0


def test_dlpm_follows_the_prefix_for_a_quantum() -> None:
    router = DlpmRouter(quantum_tokens=1000.0)
    view = fleet({"hit": 500}, {"hit": 400})
    acme = replace(PROMPT, tenant="acme")
    # 500 uncached tokens a request at the first replica, 600 at the second.
    assert [router.route(replace(acme, id=id), view).replica for id in range(6)] == [0, 0, 1, 1, 0, 0]
    assert router.route(replace(PROMPT, tenant="globex", id=9), view).replica == 0
    router = DlpmRouter(quantum_tokens=1000.0)
    router.route(acme, view)
    router.learn(finished(300))
    assert router.route(replace(acme, id=1), view).replica == 1


def ranked(ordering: Any, *requests: FakeRequest) -> list[int]:
    return [one.id for one in sorted(requests, key=lambda one: (ordering.rank(one, 0.0), one.id))]


def test_vtc_serves_the_tenant_with_less_and_lifts_the_one_that_was_idle() -> None:
    vtc = VtcOrdering()
    acme, globex = FakeRequest(1, tenant="acme", prompt_tokens=500), FakeRequest(2, tenant="globex", prompt_tokens=100)
    assert ranked(vtc, acme, globex) == [1, 2]
    vtc.started(acme, 0.0)
    assert [vtc.rank(one, 0.0)[1] for one in (acme, globex)] == [500, 500]  # lifted, as it was idle
    assert ranked(vtc, FakeRequest(3, tenant="acme"), globex) == [2, 3]
    vtc.started(globex, 0.0)
    assert vtc.rank(FakeRequest(4, tenant="globex"), 0.0)[1] == 600
    assert ranked(vtc, FakeRequest(4, tenant="globex"), FakeRequest(5, tenant="acme")) == [5, 4]
    vtc.ended(replace(acme, generated_tokens=200))
    vtc.ended(replace(acme, generated_tokens=200))
    assert vtc.rank(FakeRequest(6, tenant="acme"), 0.0)[1] == 900
    assert ranked(vtc, FakeRequest(6, tenant="acme", tier=0), FakeRequest(7, tenant="new", tier=1)) == [6, 7]


def test_a_program_with_many_calls_goes_behind_one_with_few() -> None:
    las = LeastAttainedServiceOrdering()
    for id in range(3):
        call = FakeRequest(id, session_id=1, prompt_tokens=600)
        las.started(call, 0.0)
        las.ended(replace(call, generated_tokens=10))
    old, new = FakeRequest(7, session_id=1), FakeRequest(8, 5.0, session_id=2)
    single = FakeRequest(9, 6.0, tenant="acme")
    assert ranked(las, old, new, single) == [8, 9, 7]
    assert [las.rank(one, 0.0)[1] for one in (old, new, single)] == [1860.0, 0.0, 0.0]
