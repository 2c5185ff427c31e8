"""What no run may break: nobody is lost or served twice, nothing leaks, no limit is exceeded, seeds decide all."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings

from headway.control.observe import Scrape
from headway.core.decision import Placement
from headway.core.fleet import Pool
from headway.core.record import Cause, Outcome, Records
from headway.core.request import Segment
from headway.core.view import FleetView, RequestView
from headway.policies.routing.random import RandomRouter
from replica_state import assert_empty, assert_sound, replicas_of, watched
from simulation import (
    MODEL,
    ROUTER_MAKERS,
    Scenario,
    assert_alike,
    by_request,
    num_examples,
    pool,
    request,
    scenarios,
)

fuzz = settings(
    max_examples=num_examples(45),
    derandomize="HEADWAY_FUZZ_EXAMPLES" not in os.environ,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # to shrink one takes minutes
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def output_tokens(records: Records) -> Any:
    return records.workload["output_tokens"][records.requests["request"]]


@fuzz
@given(scenarios())
def test_what_comes_in_comes_out_and_times_are_in_order(scenario: Scenario) -> None:
    records = scenario.play()
    assert_every_request_ends_once(scenario, records)
    assert_tokens_in_are_tokens_out(scenario, records)
    assert_times_are_in_order(records)


def assert_every_request_ends_once(scenario: Scenario, records: Records) -> None:
    issued = len(records.workload["arrival_s"])
    assert sorted(records.requests["request"].tolist()) == list(range(issued))
    stays_for_ever = any(fault.down_s is None and fault.streams is None for fault in scenario.faults)
    if scenario.until_s is None and not stays_for_ever:
        assert issued == len(scenario.requests)
        assert not (records.requests["outcome"] == Outcome.UNFINISHED).any()
    if all(r.timeout_s is None for r in scenario.requests):
        assert not (records.requests["outcome"] == Outcome.CANCELLED).any()


def assert_tokens_in_are_tokens_out(scenario: Scenario, records: Records) -> None:
    requests, segments, stretches = by_request(records.requests), records.segments, records.stretches
    generated = requests["generated_tokens"]
    output = output_of_last_stage(scenario, records)
    finished = requests["outcome"] == Outcome.FINISHED
    assert (generated[finished] == output[finished]).all()
    assert (generated <= output).all()  # a client may give up during the last iteration
    given = segments["left_tick"] - segments["joined_tick"] + ~np.isnan(segments["prefill_end_s"])
    assert (given >= 0).all()
    assert (segments["stage"] <= requests["stage"][segments["request"]]).all()
    last = segments["stage"] == requests["stage"][segments["request"]]
    per_request = np.bincount(segments["request"][last], given[last], len(output)).astype(int)
    assert per_request.tolist() == generated.tolist()
    done = segments["cause"] == Cause.FINISHED
    ends = np.bincount(segments["request"][done & last], minlength=len(output))
    judged = requests["outcome"] != Outcome.FINISHED  # a client may give up while an answer is being judged
    assert ((ends == finished) | (judged & (requests["stage"] >= 0))).all()
    # Each stage that was left for the next had finished its answer.
    assert (
        np.bincount(segments["request"][done & ~last], minlength=len(output)).tolist()
        == np.maximum(requests["stage"], 0).tolist()
    )
    # A request gives its first token once; after a preemption or a crash it goes on with the next.
    num_replicas = len(records.replicas)
    decoded = np.bincount(segments["replica"], segments["left_tick"] - segments["joined_tick"], num_replicas)
    ticked = np.bincount(stretches["replica"], stretches["num_decode"] * stretches["iterations"], num_replicas)
    assert decoded.tolist() == ticked.tolist()


def output_of_last_stage(scenario: Scenario, records: Records) -> Any:
    """Output tokens of each request's last answer."""
    workload, stage = records.workload, by_request(records.requests)["stage"]
    output = workload["output_tokens"].copy()
    for i, model in enumerate(scenario.cascade.models if scenario.cascade else ()):
        own = workload.get(f"output_tokens:{model}")
        if own is not None:
            output = np.where((stage == i) & (own >= 0), own, output)
    return output


def assert_times_are_in_order(records: Records) -> None:
    requests, workload = by_request(records.requests), records.workload
    before = workload["arrival_s"]
    for name in ("placed_s", "admitted_s", "first_token_s", "answer_s", "end_s"):
        times = requests[name]
        happened = ~np.isnan(times)
        assert (times[happened] >= before[happened]).all(), name
        before = np.where(happened, times, before)
    started = ~np.isnan(requests["first_token_s"])
    assert (requests["generated_tokens"][started] > 0).all()
    assert started[requests["outcome"] == Outcome.FINISHED].all()
    assert (requests["end_s"] <= records.end_s).all()
    segments = records.segments
    assert (segments["enqueued_s"] <= segments["admitted_s"]).all()
    assert (segments["admitted_s"] <= segments["end_s"]).all()
    for replica in range(len(records.replicas)):
        of = records.stretches["replica"] == replica
        start_s, k = records.stretches["start_s"][of], records.stretches["iterations"][of]
        a_s, b_s = records.stretches["a_s"][of], records.stretches["b_s"][of]
        ends_s = start_s + k * a_s + b_s * (k * (k - 1) // 2)
        assert (ends_s[:-1] <= start_s[1:] + 1e-12).all(), "iterations of a replica overlap"


@pytest.mark.ci
@fuzz
@given(scenarios())
def test_no_prompt_is_computed_twice_without_cause(scenario: Scenario) -> None:
    breaks = tuple(fault for fault in scenario.faults if fault.streams is not None)
    calm = replace(scenario, faults=breaks, until_s=None, requests=tuple(without_timeout(scenario)))
    records = calm.play()
    requests = by_request(records.requests)
    if requests["preemptions"].any() or scenario.cascade is not None:
        return
    served = requests["outcome"] == Outcome.FINISHED
    computed = records.workload["prompt_tokens"] - requests["cached_prompt_tokens"]
    stretches = records.stretches
    assert (stretches["prefill_tokens"] * stretches["iterations"]).sum() == computed[served].sum()
    assert (computed[served] > 0).all()


def without_timeout(scenario: Scenario) -> list[Any]:
    return [msgspec.structs.replace(r, timeout_s=None) for r in scenario.requests]


@fuzz
@given(scenarios())
def test_a_replica_keeps_its_books_and_its_limits(scenario: Scenario) -> None:
    cluster = watched(scenario.cluster("exact"), assert_sound)
    scenario.run(cluster)
    if scenario.until_s is None:
        for replica in replicas_of(cluster):
            assert_empty(replica)


@pytest.mark.ci
@fuzz
@given(scenarios())
def test_books_hold_where_stretches_begin(scenario: Scenario) -> None:
    cluster = watched(scenario.cluster("stretch"), assert_sound)
    scenario.run(cluster)
    if scenario.until_s is None:
        for replica in replicas_of(cluster):
            assert_empty(replica)


class Checking:
    """The first replica offered. Whoever is offered has room."""

    def __init__(self, window: int | None, max_num_waiting: int | None) -> None:
        self.window, self.max_num_waiting = window, max_num_waiting

    def route(self, request: RequestView, view: FleetView) -> Placement:
        assert view.replicas
        for replica in view.replicas:
            assert self.window is None or replica.num_in_flight < self.window
            assert self.max_num_waiting is None or replica.num_waiting < self.max_num_waiting
            assert replica.num_in_flight >= replica.num_waiting + replica.num_running
            assert 0 <= replica.kv_blocks_used <= replica.kv_blocks_total
            assert replica.tokens_generated >= 0
            assert replica.prefill_tokens_left >= 0
        return Placement(view.replicas[0].id)


@pytest.mark.ci
@fuzz
@given(scenarios())
def test_window_and_queue_limit_hold(scenario: Scenario) -> None:
    limit, window = 3, scenario.window or 7
    # Moves and hand-overs fill queues as they must.
    scenario = replace(scenario, combos=(), migration=None, scaler=None, cascade=None, faults=(), roles=())
    assume(scenario.pools)
    if any(pool.model.name != MODEL.name for pool in scenario.pools):
        scenario = replace(scenario, pools=scenario.pools[:1])
    pools = tuple(
        msgspec.structs.replace(p, engine=msgspec.structs.replace(p.engine, max_num_waiting=limit))
        for p in scenario.pools
    )
    scenario = replace(scenario, pools=pools, scrape=Scrape())
    replace(scenario, router=lambda: Checking(window, limit), window=window).play()
    replace(scenario, router=lambda: Checking(None, limit), window=None).play()


def test_models_do_not_mix() -> None:
    small = msgspec.structs.replace(MODEL, name="small")
    pools = (pool("big", max_num_seqs=4, replicas=2), pool("little", model=small, max_num_seqs=4))
    requests = [request(i, i * 0.01, 50, 20, model=("llama", "small")[i % 3 == 0]) for i in range(60)]
    for router in ROUTER_MAKERS:
        ended = by_request(Scenario(tuple(requests), pools, router).play().requests)
        assert ((ended["replica"] == 2) == (np.arange(60) % 3 == 0)).all()
        assert (ended["outcome"] == Outcome.FINISHED).all()


# Determinism.


def varied(router: Callable[[], Any] = RandomRouter, seed: int = 0) -> Scenario:
    """A run in which everything takes part that could depend on hashing or on chance."""
    rng = np.random.default_rng(3)
    requests = tuple(
        request(
            i,
            i * 0.02,
            int(rng.integers(40, 200)),
            int(rng.integers(1, 60)),
            region=("north", "south", "east")[i % 3],
            session_id=i % 11,
            prefix=(Segment(i % 5, 40),),
            tier=i % 4,
            timeout_s=2.0 if i % 7 == 0 else None,
        )
        for i in range(120)
    )
    engine = {"prefix_caching": True, "kv_capacity_tokens": 1000, "max_num_seqs": 16}
    pools: tuple[Pool, ...] = (pool(replicas=3, **engine), pool("other", replicas=2, **engine))
    return Scenario(requests, pools, router, scrape=Scrape(0.1, 0.02, 0.3), seed=seed)


def digest(records: Records) -> str:
    """Of every bit of the three tables."""
    found = sha256()
    for table in (records.requests, records.segments, records.stretches):
        for name in sorted(table):
            found.update(table[name].tobytes())
    return found.hexdigest()


@pytest.mark.parametrize("router", ROUTER_MAKERS, ids=lambda maker: maker.__name__)
def test_the_same_seed_gives_the_same_run(router: Callable[[], Any]) -> None:
    one, other = varied(router).play(), varied(router).play()
    assert_alike(one.requests, other.requests)
    assert digest(one) == digest(other)


def test_another_seed_gives_another_run() -> None:
    assert len({digest(varied(RandomRouter, seed).play()) for seed in range(4)}) == 4


@pytest.mark.ci
def test_hashing_has_no_say() -> None:
    code = (
        "from simulation import ROUTER_MAKERS; from sim.test_conservation import digest, varied; "
        "print(*(digest(varied(router).play()) for router in ROUTER_MAKERS))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={
                **os.environ,
                "PYTHONHASHSEED": seed,
                "PYTHONPATH": os.pathsep.join(sys.path),
            },
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("0", "12345")
    }
    assert len(found) == 1
